"""A running server is attached to with its own client; an absent one is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fixtures.fakes.stub_engine import StubEngine
from fixtures.fakes.stub_server import Asked, Reply, StubServer
from harness.errors import NotFlushed, ServerError, UsageError
from harness.server.client.flush import flush, prove_flushed
from harness.server.client.sglang import Client
from harness.server.client.vllm import VllmClient, client_of

pytest_plugins = ["pytester"]

PROMPT = list(range(40))
CARDS = {"data": [{"id": "model", "owned_by": "vllm"}]}
USES = """
def test_it(server):
    assert (server.kind, server.pair, server.running.pid) == ("attached", "mla", None)
    assert server.client.generate([1, 2, 3], 1).output_ids == (7,)
    assert server.flush().tries == 1
"""


class StubVllm:
    """Answers as vLLM does; its cache knows whole prompts, and takes pages of 16.

    Args:
        details: whether cached tokens are counted.
        lies: whether a reset does nothing.
    """

    def __init__(self, *, details: bool = True, lies: bool = False, nulls: bool = False) -> None:
        self.details, self.lies, self.nulls = details, lies, nulls
        self.cache: set[tuple[int, ...]] = set()

    def __call__(self, asked: Asked) -> Reply:
        if asked.path == "/v1/models":
            return Reply(body=CARDS)
        if asked.path == "/reset_prefix_cache":
            if not self.lies:
                self.cache.clear()
            return Reply()
        assert asked.path == "/v1/completions"
        prompt = tuple(asked.body["prompt"])
        usage: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": 3}
        hit = len(prompt) // 16 * 16 if prompt in self.cache else 0
        counted = None if self.nulls and not hit else hit
        usage["prompt_tokens_details"] = {"cached_tokens": counted} if self.details else None
        self.cache.add(prompt)
        return self._stream(usage) if asked.body.get("stream") else self._whole(usage)

    @staticmethod
    def _whole(usage: dict[str, Any]) -> Reply:
        choice = {"index": 0, "text": "a b c", "token_ids": [5, 6, 7], "finish_reason": "length"}
        return Reply(body={"choices": [choice], "usage": usage})

    @staticmethod
    def _stream(usage: dict[str, Any]) -> Reply:
        bodies: list[dict[str, Any]] = [
            {"choices": [{"text": "a", "token_ids": [5], "finish_reason": None}]},
            {"choices": [{"text": " b c", "token_ids": [6, 7], "finish_reason": "length"}]},
            {"choices": [], "usage": usage},
        ]
        return Reply(pieces=[f"data: {text}\n\n" for text in (*map(json.dumps, bodies), "[DONE]")])


def test_a_server_is_known_by_who_owns_its_models() -> None:
    with StubServer(StubVllm()) as server:
        client = client_of(server.url, api_key="secret")
        assert type(client) is VllmClient
        client.models()
        keys = [asked.headers.get("authorization") for asked in server.asked]
        assert keys == ["Bearer secret"] * 2, (
            f"whoever owns the models is asked with the key: {keys}"
        )
    other = Reply(body={"data": [{"id": "model", "owned_by": "sglang"}]})
    with StubServer(lambda _: other) as server:
        assert type(client_of(server.url)) is Client


def test_vllm_is_asked_for_tokens() -> None:
    with StubServer(StubVllm()) as server:
        found = client_of(server.url).generate(PROMPT, 3, ignore_eos=False)
    assert (found.output_ids, found.text, found.finish_reason) == ((5, 6, 7), "a b c", "length")
    assert (found.prompt_tokens, found.completion_tokens, found.cached_tokens) == (40, 3, 0)
    assert found.spec_verify_ct == 0
    assert server.asked[-1].body == {
        "model": "model",
        "prompt": PROMPT,
        "max_tokens": 3,
        "temperature": 0,
        "ignore_eos": False,
        "return_token_ids": True,
    }


def test_what_vllm_streams_is_summed() -> None:
    with StubServer(StubVllm()) as server:
        client = VllmClient(server.url)
        client.generate(PROMPT, 3)
        first, second, last = (chunk.answer for chunk in client.stream(PROMPT, 3))
    assert (first.output_ids, first.completion_tokens, first.finish_reason) == ((5,), 1, "")
    assert (second.output_ids, second.text) == ((5, 6, 7), "a b c")
    assert second.finish_reason == last.finish_reason == "length"
    assert (last.output_ids, last.prompt_tokens, last.cached_tokens) == ((5, 6, 7), 40, 32)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_tokens_of_vllm_are_those_that_it_counts(stream: bool) -> None:
    # With ids of two tokens of three, as where the last one is kept back.
    usage = {"prompt_tokens": 40, "completion_tokens": 3}
    usage |= {"prompt_tokens_details": {"cached_tokens": 0}}
    choice = {"text": "a b", "token_ids": [5, 6], "finish_reason": "stop"}
    whole = json.dumps({"choices": [choice], "usage": usage})
    pieces = Reply(pieces=[f"data: {whole}\n\n", "data: [DONE]\n\n"])

    def answered(asked: Asked) -> Reply:
        if asked.path == "/v1/models":
            return Reply(body=CARDS)
        return pieces if stream else Reply(body=json.loads(whole))

    with StubServer(answered) as server:
        client = VllmClient(server.url)
        found = [one.answer for one in client.stream(PROMPT, 3)] if stream else []
        last = found[-1] if stream else client.generate(PROMPT, 3)
    said = "an answer of vLLM has the tokens of its usage, 3, though ids came of 2"
    assert last.completion_tokens == 3, f"{said}: {last}"


def test_vllm_counts_every_prompt_of_a_batch() -> None:
    with StubServer(StubVllm()) as server:
        client = VllmClient(server.url)
        found = client.generate_batch([PROMPT, PROMPT[:20]], 3, ignore_eos=False)
    assert [one.prompt_tokens for one in found] == [40, 20]
    bodies = [asked.body for asked in server.asked if asked.path == client.path]
    told = "each request of a batch ends at the end token if the batch does"
    assert [body["ignore_eos"] for body in bodies] == [False, False], told
    assert client.generate_batch([], 3) == [], "a batch without a prompt has no answer"


@pytest.mark.parametrize("lies", [True, False])
def test_a_reset_of_vllm_is_proven(lies: bool) -> None:
    with StubServer(StubVllm(lies=lies)) as server:
        client = client_of(server.url)
        client.generate(PROMPT, 1)
        flush(server.url, endpoint=client.flush_path)
        if lies:
            with pytest.raises(NotFlushed, match="32 of 40"):
                prove_flushed(client, PROMPT)
        else:
            prove_flushed(client, PROMPT)


def test_vllm_answers_null_for_no_cached_tokens() -> None:
    with StubServer(StubVllm(nulls=True)) as server:
        found = [VllmClient(server.url).generate(PROMPT, 1).cached_tokens for _ in range(2)]
    assert found == [0, 32]


def test_vllm_that_counts_no_cached_tokens_proves_nothing() -> None:
    with (
        StubServer(StubVllm(details=False)) as server,
        pytest.raises(ServerError, match="--enable-prompt-tokens-details"),
    ):
        prove_flushed(VllmClient(server.url), PROMPT)


def test_vllm_without_token_ids_is_no_answer() -> None:
    old = {"choices": [{"text": "a", "finish_reason": "length"}], "usage": {}}
    replies = {"/v1/models": CARDS, "/v1/completions": old}
    with (
        StubServer(lambda asked: Reply(body=replies[asked.path])) as server,
        pytest.raises(ServerError, match="no completion with token ids"),
    ):
        VllmClient(server.url).generate(PROMPT, 1)


def test_no_worker_of_vllm_is_named() -> None:
    with pytest.raises(UsageError, match="worker = 1 is not accepted"):
        VllmClient("http://127.0.0.1:9").generate(PROMPT, 1, worker=1)


def test_suites_attach_to_a_server_that_runs(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(USES)
    options = ("-p", "fixtures.pytest_plugin.plugin", "-n0", "--server-pair", "mla")
    with StubServer(StubEngine()) as server:
        done = pytester.runpytest_inprocess(*options, "--base-url", server.url)
    done.assert_outcomes(passed=1)


def test_suites_start_a_server_with_further_flags(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr("fixtures.pytest_plugin.servers.find_spec", lambda name: object())
    monkeypatch.setattr(
        "fixtures.pytest_plugin.servers.launch", lambda spec, log: started.append(spec)
    )
    pytester.makepyfile(USES)
    pytester.runpytest_inprocess(
        *("-p", "fixtures.pytest_plugin.plugin", "-n0", "--server", "sglang"),
        *("--server-backend", "specgate_mha", "--server-args", "--page-size 64"),
    )
    [spec] = started
    assert spec.name == "sglang specgate_mha"
    assert spec.argv[-2:] == ("--page-size", "64")


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--server", "sglang"], "--server sglang: sglang is not installed"),
        (["--server", "tgi"], "--server: invalid choice: 'tgi'"),
        (["--base-url", "foo"], "--base-url = 'foo' is not accepted; accepted: http://HOST:PORT"),
        (["--base-url", "http://"], "--base-url = 'http://' is not accepted"),
        (["--server-pair", "swa"], "--server-pair: invalid choice: 'swa'"),
    ],
)
def test_a_server_that_is_not_there_is_refused(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, args: list[str], told: str
) -> None:
    monkeypatch.setattr("fixtures.pytest_plugin.servers.find_spec", lambda name: None)
    done = pytester.runpytest_inprocess("-p", "fixtures.pytest_plugin.plugin", "-n0", *args)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    assert told in "\n".join((*done.outlines, *done.errlines))
