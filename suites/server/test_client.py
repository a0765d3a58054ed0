"""The client sends requests that sglang accepts, and raises for incomplete responses."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from logging import getLogger
from typing import Any

import pytest

from fixtures.fakes.stub_server import Answerer, Asked, Reply, StubServer, script
from harness.errors import ServerError
from harness.server.client import sglang
from harness.server.client.sglang import Answer, Client
from harness.server.client.vllm import VllmClient
from harness.server.launch.ports import free_port

PROMPT = (11, 22, 33)


def body(*ids: int, verified: int | None = 2, finish: str | None = "length") -> dict[str, Any]:
    """A response of sglang with these tokens."""
    meta: dict[str, Any] = {
        "id": "a1",
        "finish_reason": finish and {"type": finish, "length": len(ids)},
        "prompt_tokens": 3,
        "completion_tokens": len(ids),
        "cached_tokens": 1,
    }
    if verified is not None:
        meta["spec_verify_ct"] = verified
    return {"text": " ".join(map(str, ids)), "output_ids": list(ids), "meta_info": meta}


def answer(*ids: int, verified: int = 2, finish: str = "length") -> Answer:
    return Answer(
        output_ids=ids,
        text=" ".join(map(str, ids)),
        prompt_tokens=3,
        completion_tokens=len(ids),
        cached_tokens=1,
        spec_verify_ct=verified,
        finish_reason=finish,
    )


def event(data: object) -> str:
    return f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n"


def streaming(*pieces: str, broken: bool = False) -> Answerer:
    return lambda _: Reply(pieces=pieces, broken=broken)


def test_a_request_is_greedy_and_counted() -> None:
    with StubServer(script(Reply(body=body(5, 6, 7)))) as server:
        assert Client(f"{server.url}/").generate(PROMPT, 3) == answer(5, 6, 7)
    [asked] = server.asked
    assert (asked.method, asked.path) == ("POST", "/generate")
    assert asked.body == {
        "input_ids": [11, 22, 33],
        "sampling_params": {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True},
    }
    assert "authorization" not in asked.headers


def test_options_of_a_request_are_sent() -> None:
    with StubServer(script(Reply(body=body(5)))) as server:
        client = Client(server.url, api_key="secret")
        client.generate(PROMPT, 9, ignore_eos=False, worker=2)
    [asked] = server.asked
    assert asked.headers["authorization"] == "Bearer secret"
    assert asked.body["sampling_params"]["ignore_eos"] is False
    assert asked.body["routed_dp_rank"] == 2


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_every_form_of_a_request_says_whether_it_goes_on_after_the_end_token(
    ignore_eos: bool,
) -> None:
    def answerer(asked: Asked) -> Reply:
        if asked.body.get("stream"):
            return Reply(pieces=[event(body(5)), event("[DONE]")])
        return Reply(body=[body(5)])

    with StubServer(answerer) as server:
        client = Client(server.url)
        client.generate_batch([PROMPT], 1, ignore_eos=ignore_eos)
        list(client.stream(PROMPT, 1, ignore_eos=ignore_eos))
    sent = [asked.body["sampling_params"]["ignore_eos"] for asked in server.asked]
    assert sent == [ignore_eos] * 2, "a batch, a stream"


@pytest.mark.parametrize("said", [{}, {"spec_verify_ct": None}])
def test_a_server_without_speculation_verifies_nothing(said: dict[str, None]) -> None:
    sent = body(5, verified=None, finish="stop")
    sent["meta_info"] |= said
    with StubServer(script(Reply(body=sent))) as server:
        found = Client(server.url).generate(PROMPT, 1)
    assert found == answer(5, verified=0, finish="stop")


def test_a_batch_is_one_request() -> None:
    with StubServer(script(Reply(body=[body(5), body(6, 7)]))) as server:
        found = Client(server.url).generate_batch([PROMPT, (4,)], 2)
    assert found == [answer(5), answer(6, 7)]
    [asked] = server.asked
    assert asked.body["input_ids"] == [[11, 22, 33], [4]]


def test_chunks_come_as_they_are_sent() -> None:
    seen = threading.Event()

    def pieces() -> Iterator[str]:
        yield event(body(5, finish=None))
        assert seen.wait(10), "the first chunk was held back"
        time.sleep(0.2)
        whole = event(body(5, 6))
        yield whole[:20]
        yield whole[20:]
        yield event("[DONE]")

    with StubServer(lambda _: Reply(pieces=pieces())) as server:
        stream = Client(server.url).stream(PROMPT, 2)
        started = time.perf_counter()
        first = next(stream)
        seen.set()
        [second] = stream
    assert server.asked[0].body["stream"] is True
    assert first.answer == answer(5, finish="")
    assert second.answer == answer(5, 6)
    assert started < first.at
    assert 0.19 < second.at - first.at < 5


def test_a_stream_that_is_closed_disconnects() -> None:
    gone = threading.Event()

    def pieces() -> Iterator[str]:
        try:
            for _ in range(2000):
                yield event(body(5, finish=None))
                time.sleep(0.01)
        finally:
            gone.set()

    def answerer(_: object) -> Reply:
        return Reply(pieces=pieces())

    with StubServer(answerer) as server:
        stream = Client(server.url).stream(PROMPT, 2)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert gone.wait(10)


@pytest.mark.parametrize(
    ("pieces", "broken", "message", "status"),
    [
        ((event(body(5)),), False, "ended before it was done", None),
        ((event(body(5)),), True, "the stream broke", None),
        ((event({"error": {"message": "too long", "code": 400}}),), False, "too long", 400),
        ((event({"error": "out of pages"}),), False, "out of pages", None),
        ((event("{oops"),), False, r"no JSON: {oops", None),
        ((event(["x"]),), False, "no answer of /generate", None),
    ],
)
def test_a_stream_that_is_not_whole_raises(
    pieces: tuple[str, ...], broken: bool, message: str, status: int | None
) -> None:
    with (
        StubServer(streaming(*pieces, broken=broken)) as server,
        pytest.raises(ServerError, match=message) as raised,
    ):
        list(Client(server.url).stream(PROMPT, 2))
    assert raised.value.status == status


@pytest.mark.parametrize("status", [202, 400, 401, 413, 422, 500, 503])
def test_other_statuses_raise(status: int) -> None:
    error = {"error": {"message": "max_new_tokens = 0 is not accepted", "code": status}}
    with (
        StubServer(script(Reply(status, error))) as server,
        pytest.raises(ServerError, match=rf"/generate: {status}: .*max_new_tokens = 0") as raised,
    ):
        Client(server.url).generate(PROMPT, 0)
    assert raised.value.status == status


@pytest.mark.parametrize(
    "wrong",
    [
        "<html>",
        [],
        {},
        {"meta_info": None},
        body(5) | {"output_ids": None},
        {key: value for key, value in body(5).items() if key != "output_ids"},
        body(5) | {"meta_info": {"finish_reason": None}},
        body(5) | {"meta_info": body(5)["meta_info"] | {"finish_reason": "length"}},
    ],
)
def test_what_is_no_answer_raises(wrong: object) -> None:
    with (
        StubServer(script(Reply(body=wrong))) as server,
        pytest.raises(ServerError, match="no answer of /generate"),
    ):
        Client(server.url).generate(PROMPT, 1)


def first_model(client: Client) -> object:
    return VllmClient(client.base_url).generate(PROMPT, 1)


@pytest.mark.parametrize("wrong", ["<html>", [], {}, None, 7, {"data": [None]}])
@pytest.mark.parametrize("ask", [Client.models, Client.owner, first_model])
def test_a_list_of_models_of_another_form_raises(ask: Callable[[Client], Any], wrong: Any) -> None:
    with (
        StubServer(script(Reply(body=wrong))) as server,
        pytest.raises(ServerError, match="no answer of /v1/models"),
    ):
        ask(Client(server.url))


@pytest.mark.parametrize("ask", [Client.owner, first_model])
def test_a_server_without_a_model_raises(ask: Callable[[Client], Any]) -> None:
    with (
        StubServer(script(Reply(body={"data": []}))) as server,
        pytest.raises(ServerError, match="no answer of /v1/models"),
    ):
        ask(Client(server.url))
    with StubServer(script(Reply(body={"data": []}))) as server:
        assert Client(server.url).models() == []


PHASES = {"verify": "fast"}


@pytest.mark.parametrize("wrong", ["<html>", [1], None, {"internal_states": [{"phases": PHASES}]}])
def test_phases_of_another_form_raise(wrong: Any) -> None:
    with (
        StubServer(script(Reply(body=wrong))) as server,
        pytest.raises(ServerError, match="no answer of /server_info"),
    ):
        Client(server.url).phases()


@pytest.mark.parametrize("wrong", [None, 7])
def test_answers_of_a_batch_of_another_form_raise(wrong: Any) -> None:
    with (
        StubServer(script(Reply(body=wrong))) as server,
        pytest.raises(ServerError, match="no answer of /generate"),
    ):
        Client(server.url).generate_batch([PROMPT, PROMPT], 1)


def test_a_server_without_a_tokenizer_answers_in_tokens_alone() -> None:
    tokens = {key: value for key, value in body(5).items() if key != "text"}
    with StubServer(script(Reply(body=tokens))) as server:
        answer = Client(server.url).generate(PROMPT, 1)
    assert (answer.output_ids, answer.text) == (tuple(tokens["output_ids"]), "")


def test_a_server_that_is_gone_raises() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    client = Client(url)
    with pytest.raises(ServerError, match=f"{url}/generate: .*refused") as raised:
        client.generate(PROMPT, 1)
    assert raised.value.status is None
    assert client.health() is False


@pytest.fixture
def silent() -> Iterator[StubServer]:
    """A server that accepts connections and says nothing for ten seconds."""
    release = threading.Event()

    def wait(_: object) -> Reply:
        release.wait(10)
        return Reply()

    with StubServer(wait) as server:
        yield server
        release.set()


def test_a_silent_server_raises(silent: StubServer) -> None:
    began = time.monotonic()
    with pytest.raises(ServerError) as raised:
        Client(silent.url, timeout_s=0.2).generate(PROMPT, 1)
    assert time.monotonic() - began < 5.0, "timeout_s ends the wait for an answer"
    assert "timed out" in str(raised.value)


def test_a_silent_server_is_not_healthy_however_patient_its_client(
    silent: StubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang, "HEALTH_S", 0.2)
    began = time.monotonic()
    is_healthy = Client(silent.url, timeout_s=60.0).health()
    assert time.monotonic() - began < 5.0, "a health check waits HEALTH_S, not timeout_s"
    assert not is_healthy


@pytest.mark.parametrize(("status", "well"), [(200, True), (503, False), (404, False)])
def test_health_is_200(status: int, well: bool) -> None:
    with StubServer(script(Reply(status))) as server:
        assert Client(server.url).health() is well
    assert server.asked[0].path == "/health"


@pytest.mark.parametrize("status", [200, 401, 503])
def test_who_says_anything_answers(status: int) -> None:
    with StubServer(script(Reply(status))) as server:
        assert Client(server.url).answers()
    assert not Client(server.url).answers()


def test_what_a_server_says_of_itself() -> None:
    said = {
        "/server_info": {"page_size": 16, "dp_size": 2, "version": "0.5.14"},
        "/v1/models": {"object": "list", "data": [{"id": "gqa"}, {"id": "mla"}]},
    }
    with StubServer(lambda asked: Reply(body=said[asked.path])) as server:
        client = Client(server.url)
        assert client.server_info() == said["/server_info"]
        assert client.cache_shape() == (16, 2)
        assert client.models() == ["gqa", "mla"]


@pytest.mark.parametrize(
    ("said", "delays"),
    [
        ({"internal_states": [{"specgate_gpu_delay_ns": 0, "page_size": 1}]}, True),
        ({"internal_states": [{"page_size": 1}]}, False),
        ({"internal_states": []}, False),
        ({"page_size": 1}, False),
    ],
)
def test_a_server_says_whether_its_gpu_is_slowed_down(said: dict[str, Any], delays: bool) -> None:
    with StubServer(script(Reply(body=said))) as server:
        assert Client(server.url).delays_gpu() is delays
    assert [asked.path for asked in server.asked] == ["/server_info"]


@pytest.mark.parametrize(
    ("info", "phases"),
    [
        ({"page_size": 16}, {}),
        ({"internal_states": []}, {}),
        ({"internal_states": [{"last_gen_throughput": 7.0}]}, {}),
        (
            {"internal_states": [{"phases": {"draft": [81.5, 3], "verify": [700, 4]}}]},
            {"draft": (81.5, 3), "verify": (700.0, 4)},
        ),
    ],
)
def test_phases_are_told_by_servers_that_time_them(
    info: dict[str, Any], phases: dict[str, tuple[float, int]]
) -> None:
    with StubServer(script(Reply(body=info))) as server:
        assert Client(server.url).phases() == phases


def test_caches_are_taken_for_single_tokens_and_one_worker_unless_said() -> None:
    with StubServer(script(Reply(body={"page_size": None}))) as server:
        assert Client(server.url).cache_shape() == (1, 1)


def test_a_server_is_slowed_down_and_requests_are_aborted() -> None:
    with StubServer(script(Reply(body="null"))) as server:
        client = Client(server.url)
        client.slow_down(0.002)
        client.slow_down(None)
        client.abort("a1")
        client.abort("")
        client.abort(None)
    assert [(asked.path, asked.body) for asked in server.asked] == [
        ("/slow_down", {"forward_sleep_time": 0.002}),
        ("/slow_down", {"forward_sleep_time": None}),
        ("/abort_request", {"rid": "a1"}),
        ("/abort_request", {"rid": ""}),
        ("/abort_request", {"abort_all": True}),
    ]


def test_threads_share_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    together, warnings = threading.Barrier(16), list[str]()
    monkeypatch.setattr(
        getLogger("urllib3.connectionpool"), "warning", lambda *said: warnings.append(said[0])
    )

    def echo(asked: Asked) -> Reply:
        together.wait(10)  # so many connections are open at a time
        return Reply(body=body(*asked.body["input_ids"]))

    with StubServer(echo) as server, ThreadPoolExecutor(16) as threads:
        client = Client(server.url)
        found = list(threads.map(lambda one: client.generate([one], 1), range(64)))
    assert [one.output_ids for one in found] == [(one,) for one in range(64)]
    assert not warnings, "a connection that is not kept is opened anew within a measured request"
