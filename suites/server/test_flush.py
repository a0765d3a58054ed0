"""A flush is retried while a server is busy, until a deadline; any other error is raised."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from fixtures.fakes.stub_engine import StubEngine
from fixtures.fakes.stub_server import Reply, StubServer, script
from harness.errors import Busy, ServerError, UsageError
from harness.server.client import flush as flushing
from harness.server.client.flush import flush, flush_cache_with_retry
from harness.server.client.vllm import VllmClient
from harness.server.launch.ports import free_port

BUSY, DONE = Reply(400, "2 requests run"), Reply(200, "Cache flushed.")
REFUSALS = (202, 204, 401, 404, 409, 500, 503)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of every sleep, none of which is slept."""
    seconds: list[float] = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    return seconds


def test_200_returns_at_once(slept: list[float]) -> None:
    with StubServer(script(DONE)) as server:
        flush_cache_with_retry(server.url)
    [asked] = server.asked
    assert (asked.method, asked.path, asked.query) == ("POST", "/flush_cache", {})
    assert slept == []


def test_a_failure_waits_2_s(slept: list[float]) -> None:
    with StubServer(script(BUSY, Reply(503), DONE)) as server:
        flush_cache_with_retry(server.url, VllmClient.flush_path)
    assert [asked.path for asked in server.asked] == ["/reset_prefix_cache"] * 3
    assert slept == [2.0, 2.0]


@pytest.mark.parametrize("tries", [1, 3, 5])
def test_the_last_failure_raises(tries: int, slept: list[float]) -> None:
    with (
        StubServer(script(BUSY)) as server,
        pytest.raises(requests.HTTPError, match="400") as raised,
    ):
        flush_cache_with_retry(server.url, max_retries=tries)
    assert raised.value.response is not None
    assert raised.value.response.status_code == 400
    assert len(server.asked) == tries
    assert slept == [2.0] * (tries - 1)


def test_only_200_is_a_flush(slept: list[float]) -> None:
    with (
        StubServer(script(Reply(202, "accepted"))) as server,
        pytest.raises(requests.HTTPError, match="202"),
    ):
        flush_cache_with_retry(server.url)
    assert len(server.asked) == 3


def test_no_try_is_no_flush() -> None:
    with pytest.raises(UsageError, match="max_retries = 0"):
        flush_cache_with_retry("http://127.0.0.1:9", max_retries=0)


def test_an_absent_server_raises_at_once(slept: list[float]) -> None:
    with pytest.raises(requests.ConnectionError):
        flush_cache_with_retry(f"http://127.0.0.1:{free_port()}")
    assert slept == []


def test_a_server_that_answers_400_is_busy_and_has_not_flushed() -> None:
    with StubServer(script(BUSY)) as server, pytest.raises(ServerError) as raised:
        flush(server.url, deadline_s=0.0)
    said = "a server that answers 400 is busy: it has not flushed, and is asked again"
    assert isinstance(raised.value, Busy), said


def test_busy_is_tried_again_until_it_succeeds() -> None:
    with StubServer(script(BUSY, BUSY, DONE)) as server:
        flushed = flush(f"{server.url}/behind/", deadline_s=9.0, api_key="secret")
    assert flushed.tries == len(server.asked) == 3
    assert 0 < flushed.seconds < 5
    asked_for = {(asked.method, asked.path) for asked in server.asked}
    assert asked_for == {("POST", "/behind/flush_cache")}
    assert {asked.headers["authorization"] for asked in server.asked} == {"Bearer secret"}


def test_a_server_is_asked_to_wait_for_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flushing, "JITTER", lambda _: 0.2)
    with StubServer(script(BUSY, BUSY, DONE)) as server:
        flush(server.url, deadline_s=9.0)
    first, second, third = (float(asked.query["timeout"]) for asked in server.asked)
    assert 8.8 <= first <= 9.0
    said = "each time the server is asked to wait for what is left of the deadline"
    assert first - second >= 0.1, said
    assert second - third >= 0.1, said


def test_waits_are_jittered_and_bounded(slept: list[float]) -> None:
    with StubServer(script(*[BUSY] * 9, DONE)) as server:
        assert flush(server.url, deadline_s=100.0).tries == 10
    assert len(set(slept)) == len(slept) == 9
    assert all(0 <= wait <= min(0.1 * 2**place, 2.0) for place, wait in enumerate(slept))


def test_no_wait_passes_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flushing, "JITTER", lambda _: 60.0)
    started = time.monotonic()
    with StubServer(script(BUSY)) as server, pytest.raises(Busy, match="2 requests run") as raised:
        flush(server.url, deadline_s=0.3)
    assert 0.3 <= time.monotonic() - started < 3
    assert raised.value.status == 400
    assert len(server.asked) == 2, "one at once, one at the deadline"


@pytest.mark.parametrize("status", REFUSALS)
def test_anything_else_raises_at_once(status: int) -> None:
    with (
        StubServer(script(Reply(status, "no" if status != 204 else ""), DONE)) as server,
        pytest.raises(ServerError, match=str(status)) as raised,
    ):
        flush(server.url)
    assert not isinstance(raised.value, Busy)
    assert raised.value.status == status
    assert len(server.asked) == 1


def test_a_server_that_comes_up_is_flushed() -> None:
    port = free_port()
    with ThreadPoolExecutor() as threads:
        flushed = threads.submit(flush, f"http://127.0.0.1:{port}", deadline_s=20.0)
        time.sleep(0.3)
        with StubServer(script(DONE), port) as server:
            assert flushed.result().tries > 1
    assert flushed.result().seconds >= 0.3
    assert len(server.asked) == 1


def test_an_absent_server_is_busy_at_the_deadline() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(Busy, match="refused") as raised:
        flush(url, deadline_s=0.2)
    assert raised.value.status is None


def test_a_silent_server_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flushing, "HANG_S", 0.1)
    release = threading.Event()

    def silent(_: object) -> Reply:
        release.wait(10)
        return DONE

    with StubServer(silent) as server:
        with pytest.raises(ServerError, match="timed out") as raised:
            flush(server.url, deadline_s=0.2)
        release.set()
    assert not isinstance(raised.value, Busy)


def test_an_answer_shortly_after_its_timeout_is_heard() -> None:
    def late(_: object) -> Reply:
        time.sleep(0.5)
        return DONE

    with StubServer(late) as server:
        flushed = flush(server.url, deadline_s=0.2)
    assert (flushed.tries, len(server.asked)) == (1, 1)
    assert flushed.seconds >= 0.5


@pytest.mark.parametrize("waits", [True, False], ids=["honoured", "dropped by a router"])
def test_a_busy_scheduler_is_waited_for(waits: bool) -> None:
    engine = StubEngine(waits=waits)
    engine.idle.clear()
    with StubServer(engine) as server:
        threading.Timer(0.4, engine.idle.set).start()
        flushed = flush(server.url, deadline_s=20.0)
    assert flushed.seconds >= 0.3
    assert (flushed.tries == 1) is waits
    assert engine.flushes == 1


def test_a_second_flush_waits_for_the_pending_one() -> None:
    engine = StubEngine()
    engine.idle.clear()
    with StubServer(engine) as server, ThreadPoolExecutor() as threads:
        both = [threads.submit(flush, server.url, deadline_s=20.0) for _ in range(2)]
        time.sleep(0.3)
        engine.idle.set()
        tries = sorted(one.result().tries for one in both)
    assert tries[0] == 1
    assert tries[1] > 1
    assert engine.flushes == 2


def test_vllm_that_holds_blocks_is_busy() -> None:
    held = Reply(200, {"success": False})
    with StubServer(script(held, Reply(200, {"success": True}))) as server:
        assert flush(server.url, endpoint=VllmClient.flush_path).tries == 2
    assert server.asked[0].path == "/reset_prefix_cache"
    assert server.asked[0].query["reset_external"] == "true"
