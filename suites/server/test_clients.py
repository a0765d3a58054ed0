"""Clients that disconnect, abort or stall do not disturb others and leave nothing allocated."""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import socket
import threading
import time
from functools import partial
from types import SimpleNamespace
from urllib.parse import urlsplit

import psutil
import pytest
import requests

from fixtures.drivers.crowd import many, runs, settled, slowly, state, text, together
from fixtures.pytest_plugin.poll import eventually
from fixtures.pytest_plugin.servers import SHORT
from harness.errors import Busy, ServerError
from harness.server.client.flush import flush
from harness.server.engine_process import supervisor
from harness.server.engine_process.messages import Ready, Reply
from harness.server.engine_process.supervisor import Supervisor
from harness.server.http.engine_client import FlushRefused, Overloaded, Progress, WorkerLost
from suites.server.test_serve import OPTIONS

LONG = 400
"""Tokens of an embedded server with a context of 512."""
SOON_S, NOTICED_S = 4.0, 4.0
"""A request that is not aborted takes several times as long; sglang checks every NOTICED_S
seconds whether the client of a whole response is still connected."""


def sampling(server) -> dict[str, object]:
    """Greedy, or sglang compiles its sampler first, for a minute; long, whatever the model says."""
    return {"max_new_tokens": many(server), "temperature": 0, "ignore_eos": True}


def posted(server, rid: str) -> requests.Response:
    """The answer to a long request of this id, when it has come."""
    body = {"input_ids": SHORT, "rid": rid, "sampling_params": sampling(server)}
    return requests.post(f"{server.url}/generate", json=body, timeout=60)


def raw(server, *, stream: bool) -> socket.socket:
    """A connection that has sent a long request and reads nothing."""
    request = {"input_ids": SHORT, "stream": stream, "sampling_params": sampling(server)}
    body = json.dumps(request)
    address = urlsplit(server.url)
    connection = socket.create_connection((address.hostname, address.port), timeout=30)
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    connection.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
    return connection


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_who_leaves_is_aborted(server, stream):
    with slowly(server):
        with raw(server, stream=stream):
            runs(server)
        settled(server, SOON_S if server.kind == "embedded" else SOON_S + NOTICED_S)


def test_a_stream_that_is_not_read_holds_nobody_up(server):
    with raw(server, stream=True) as slow:
        runs(server)
        assert server.client.generate(text(1, 20), 8).completion_tokens == 8
        received = b""
        while b"[DONE]" not in received:
            part = slow.recv(1 << 16)
            assert part, received[-200:]
            received += part
            time.sleep(0.001)
    assert f'"completion_tokens":{many(server)}'.encode() in received.replace(b" ", b"")
    settled(server)


def test_an_aborted_request_is_told_so(server):
    answers = []
    rid = "to be aborted"
    asking = threading.Thread(target=lambda: answers.append(posted(server, rid).json()))
    with slowly(server):
        asking.start()
        runs(server)
        server.client.abort(rid)
        asking.join()
        settled(server, SOON_S)
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(answers[0]["output_ids"]) < many(server)


def test_a_request_with_a_rid_in_use_is_refused_and_does_not_abort_the_running_one(embedded_server):
    server, rid, answers = embedded_server, "in use", []
    asking = threading.Thread(
        target=lambda: answers.append(posted(server, rid).json()), daemon=True
    )
    with slowly(server):
        asking.start()
        runs(server)
        again = posted(server, rid)
        assert again.status_code == 400
        assert "one that is not in use" in again.json()["error"]["message"]
        # Its steps come after an abort that the refusal would have caused.
        assert server.client.generate(SHORT, 2).completion_tokens == 2
        said = "a request that is refused for its rid does not abort the one that has this rid"
        assert state(server)["running"] >= 1, said
        server.client.abort(rid)
        asking.join()
        settled(server, SOON_S)
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"


def test_who_left_and_comes_again_with_its_rid_gets_an_answer_of_its_own(embedded_server):
    server, prompt = embedded_server, text(1, 20)
    due = server.client.generate(prompt, 8)
    left = {"input_ids": SHORT, "rid": "again", "stream": True, "sampling_params": sampling(server)}
    again = {"input_ids": prompt, "rid": "again"}
    again["sampling_params"] = sampling(server) | {"max_new_tokens": 8}

    def answered() -> requests.Response:
        return requests.post(f"{server.url}/generate", json=again, timeout=60)

    with slowly(server):
        with requests.post(f"{server.url}/generate", json=left, stream=True, timeout=60) as stream:
            next(stream.iter_lines())
        # Refused as long as it is not noticed that the first connection is closed.
        answer = eventually(answered, lambda one: one.status_code != 400).json()
        settled(server, SOON_S)
    told = "the answer to a rid's second request has nothing of the first, which was left"
    assert answer["meta_info"]["finish_reason"] == {"type": "length"}, told
    assert tuple(answer["output_ids"]) == due.output_ids, told


def test_a_request_beyond_the_most_that_are_served_is_refused(monkeypatch):
    monkeypatch.setattr(supervisor, "MOST_REQUESTS", 2)

    def send(message):
        pytest.fail(f"one request too many is sent to the engine: {message}")

    serving = SimpleNamespace(
        _requests=dict.fromkeys("ab"),
        _keys={},
        _require_ready=lambda: None,
        _send=send,
        healthy=False,
    )

    async def ask():
        await anext(Supervisor.generate(serving, "c", [1], 1, ignore_eos=True, stream=False))

    with pytest.raises(Overloaded, match="2 requests are being served already"):
        asyncio.run(ask())
    assert [*serving._requests] == ["a", "b"]


def test_a_rid_that_comes_again_is_the_second_requests_when_the_first_is_read_to_its_end():
    sent = []
    serving = SimpleNamespace(
        _requests={},
        _keys={},
        _tickets=itertools.count(),
        _send=sent.append,
        _require_ready=lambda: None,
        healthy=True,
    )
    last = Progress(
        new_ids=(7,), cached_tokens=0, spec_verify_ct=0, engine_s=0.0, finish_reason="length"
    )

    async def known() -> bool:
        first, second = (
            Supervisor.generate(serving, "same", [1], 1, ignore_eos=True, stream=True)
            for _ in range(2)
        )
        read = asyncio.ensure_future(anext(first))
        await asyncio.sleep(0)
        Supervisor._deliver(serving, sent[0].rid, last, last=True)
        assert await read == last
        asked = asyncio.ensure_future(anext(second))
        await asyncio.sleep(0)
        await first.aclose()
        aborted = Supervisor.abort(serving, "same")
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        return aborted

    assert asyncio.run(known()), "a rid in use can be aborted, whoever had it before"
    assert [*serving._keys] == [], "a rid is forgotten with its last request"


def test_abort_all_aborts_every_request():
    aborted = []
    waiting = SimpleNamespace(_keys=dict.fromkeys("abc"), abort=aborted.append)
    Supervisor.abort_all(waiting)
    assert aborted == ["a", "b", "c"], "abort_all aborts every request"


def test_an_engine_that_is_not_ready_is_not_slowed_down():
    sent = []
    starting = SimpleNamespace(healthy=False, _send=sent.append)
    starting._require_ready = partial(Supervisor._require_ready, starting)
    with pytest.raises(WorkerLost, match="is starting or was lost"):
        Supervisor.slow_down(starting, 0.1)
    assert sent == []


def test_a_reply_to_who_has_left_is_dropped():
    async def answered() -> asyncio.Future[Reply]:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        Supervisor._handle(SimpleNamespace(_replies={7: future}), Reply(7, 3))
        return future

    assert asyncio.run(answered()).cancelled()


@pytest.mark.parametrize(("timeout", "asked"), [(0.0, 1), (1.0, 2), (1.2, 3)])
def test_a_flush_asks_the_engine_until_its_timeout(monkeypatch, timeout, asked):
    async def flushed() -> int:
        now, queries = itertools.count(100.0, 0.5), itertools.count(1)

        async def busy(verb: str) -> Reply:
            return Reply(next(queries), None, f"{verb}: 2 requests run")

        monkeypatch.setattr(supervisor, "FLUSH_POLL_S", 0.0)
        engine = SimpleNamespace(
            _flushing=False, _loop=SimpleNamespace(time=lambda: next(now)), _query=busy
        )
        with pytest.raises(FlushRefused, match="2 requests run"):
            await Supervisor.flush(engine, timeout)
        return next(queries) - 1

    told = "two answers a second: a flush is refused by the first at its deadline or behind it"
    assert asyncio.run(flushed()) == asked, told


def test_every_loss_of_the_engine_is_counted():
    lost = SimpleNamespace(
        _ready=asyncio.Event(), _process=SimpleNamespace(exitcode=-9), _requests={}, _replies={},
        _loop=SimpleNamespace(create_task=lambda restart: restart), _restart=lambda: None,
        _closing=False, _was_ready=True, _restarts=0,
    )  # fmt: skip
    for count in (1, 2, 3):
        Supervisor._lost(lost)
        assert lost._restarts == count, "restarts of /server_info counts every loss of the engine"


def test_an_engine_that_was_ready_once_is_started_until_it_is_again(monkeypatch):
    monkeypatch.setattr(supervisor, "RESTART_S", 0.0)
    started = []

    class Process:
        """Ends at once; the first says before that it is ready."""

        exitcode = -9

        def __init__(self, *, args, **_) -> None:
            self._pipe = args[0]

        def start(self) -> None:
            started.append(self)
            if len(started) == 1:
                self._pipe.send(Ready())

        def join(self) -> None:
            """It has ended."""

    async def restarted() -> bool:
        engine = Supervisor(OPTIONS)
        engine._context = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=Process)
        await engine.start()
        while len(started) < 3 and not engine.cannot_start:
            await asyncio.sleep(0.01)
        engine._closing = True
        await asyncio.sleep(0.1)  # until its threads have ended
        return not engine.cannot_start

    told = "an engine that is lost while it starts again is started once more"
    assert asyncio.run(asyncio.wait_for(restarted(), 10)), told


def test_all_are_aborted_at_once(server):
    answers, tokens = [], many(server)
    asking = [
        threading.Thread(target=lambda: answers.append(server.client.generate(SHORT, tokens)))
        for _ in range(3)
    ]
    with slowly(server):
        for thread in asking:
            thread.start()
        runs(server, 3)
        server.client.abort(None)
        for thread in asking:
            thread.join()
        settled(server, SOON_S)
    assert [answer.finish_reason for answer in answers] == ["abort"] * 3


def test_a_flush_under_load_is_refused_and_loses_nothing(server):
    alone = server.client.generate(text(2, 40), 60)
    with raw(server, stream=True):
        runs(server)
        answer = requests.post(f"{server.url}/flush_cache", timeout=10)
        assert answer.status_code == 400
        if server.kind == "embedded":
            assert "1 running, 0 waiting" in answer.json()["error"]["message"]
            counted = server.client.server_info()["internal_states"][0]
            said = "a flush that is refused does not reset avg_spec_accept_length of /server_info"
            assert counted.get("avg_spec_accept_length"), said
        with pytest.raises(Busy):
            flush(server.url, deadline_s=0.2)
        again = server.client.generate(text(2, 40), 60)
        assert len(again.output_ids) == len(alone.output_ids) == 60
        if server.kind == "embedded":
            assert again.output_ids == alone.output_ids
            said = "cached_tokens of meta_info counts the cached tokens of a prompt sent before"
            assert again.cached_tokens == 32, said
    assert flush(server.url, deadline_s=20).tries >= 1
    settled(server)


def test_one_flush_at_a_time(server):
    with slowly(server), raw(server, stream=True):
        runs(server)
        url = f"{server.url}/flush_cache"
        calls = [
            lambda: requests.post(url, params={"timeout": 1}, timeout=20),
            lambda: time.sleep(0.2) or requests.get(url, params={"timeout": 1}, timeout=20),
        ]
        first, second = together(2, calls)
    assert {first.status_code, second.status_code} == {400}
    if server.kind == "embedded":
        assert "another flush is pending" in second.text
    settled(server)


def test_a_flush_ends_with_the_client_that_waits_for_it(embedded_server):
    server, url = embedded_server, f"{embedded_server.url}/flush_cache"
    with slowly(server), raw(server, stream=True):
        runs(server)
        with pytest.raises(requests.Timeout):
            requests.post(url, params={"timeout": 5}, timeout=0.5)
        eventually(lambda: requests.post(url, timeout=10).text, lambda told: "1 running" in told, 3)
    settled(server)


def test_two_hundred_clients_at_once(server):
    calls = [lambda i=i: server.client.generate(text(i, 5 + i % 9), 1 + i % 5) for i in range(200)]
    answers = together(200, calls)
    assert [a.completion_tokens for a in answers] == [1 + i % 5 for i in range(200)]
    assert [a.prompt_tokens for a in answers] == [5 + i % 9 for i in range(200)]
    settled(server)
    if server.kind == "embedded":
        assert state(server)["cached_pages"] > 0


def test_a_killed_engine_is_named_and_started_again(fresh_server):
    served = fresh_server(context_length=512)
    failures, statuses = [], []

    def ask() -> None:
        with pytest.raises(ServerError) as caught:
            served.client.generate(SHORT, LONG)
        failures.append(str(caught.value))

    def flush_now() -> None:
        statuses.append(requests.post(f"{served.url}/flush_cache", timeout=10).status_code)

    asking = [threading.Thread(target=ask) for _ in range(3)]
    for thread in asking:
        thread.start()
    eventually(lambda: state(served), lambda counts: counts["running"] == 3)
    worker = psutil.Process(served.client.server_info()["worker_pid"])
    worker.suspend()
    # A question that the engine never answers.
    asking.append(threading.Thread(target=flush_now))
    asking[-1].start()
    time.sleep(0.3)
    worker.kill()
    for thread in asking:
        thread.join()
    said = "a query that waits (/flush_cache, /server_info, /metrics) is answered 503"
    assert statuses == [503], f"{said} when the engine dies: {statuses}"
    assert len(failures) == 3
    said = f"every client of a dead engine is answered 503 and told of its end: {failures}"
    assert all("503" in f and "the engine's process ended with -9" in f for f in failures), said
    assert not served.client.health(), "/health is not 200 after the engine's process has ended"
    assert requests.get(f"{served.url}/v1/models", timeout=5).status_code == 503
    eventually(served.client.health, within_s=30)
    assert served.client.server_info()["restarts"] == 1
    again = requests.post(f"{served.url}/flush_cache", timeout=10).text
    assert "pending" not in again, "a flush that died with its engine is pending no longer"
    settled(served)
