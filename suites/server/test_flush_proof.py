"""A flush is believed once the next request to every worker finds nothing cached."""

from __future__ import annotations

import pytest

from fixtures.fakes.stub_engine import PAGE_SIZE, StubEngine
from fixtures.fakes.stub_server import Asked, Reply, StubServer
from harness.errors import NotFlushed, ServerError, UsageError
from harness.server.client.flush import flush, prove_flushed
from harness.server.client.sglang import Client

PROMPT = list(range(100, 111))
"""Two whole pages of 4 and three tokens."""


def warmed(server: StubServer, workers: int) -> Client:
    """A client of a server whose every worker has the prompt in its cache."""
    client = Client(server.url)
    for worker in range(workers):
        client.generate(PROMPT, 1, worker=worker)
        assert client.generate(PROMPT, 1, worker=worker).cached_tokens == 8
    return client


def test_a_flush_is_proven() -> None:
    with StubServer(StubEngine()) as server:
        client = warmed(server, 1)
        flush(server.url)
        prove_flushed(client, PROMPT)
        assert client.generate(PROMPT, 1).cached_tokens == 8, "the proof leaves it warm"


def test_without_a_flush_there_is_no_proof() -> None:
    with StubServer(StubEngine()) as server, pytest.raises(NotFlushed, match="8 of 11"):
        prove_flushed(warmed(server, 1), PROMPT)


def test_a_server_that_lies_is_caught() -> None:
    with StubServer(StubEngine(lies=True)) as server:
        client = warmed(server, 1)
        assert flush(server.url).tries == 1
        with pytest.raises(NotFlushed, match="worker 0"):
            prove_flushed(client, PROMPT)


@pytest.mark.parametrize("stuck", [0, 1, 2])
def test_a_worker_that_refused_is_caught(stuck: int) -> None:
    with StubServer(StubEngine(workers=3, stuck=frozenset([stuck]))) as server:
        client = warmed(server, 3)
        flush(server.url)
        with pytest.raises(NotFlushed, match=f"worker {stuck}"):
            prove_flushed(client, PROMPT)


def test_every_worker_is_asked() -> None:
    with StubServer(StubEngine(workers=3)) as server:
        prove_flushed(Client(server.url), PROMPT)
    asked = [one.body["routed_dp_rank"] for one in server.asked if one.path == "/generate"]
    assert asked == [0, 1, 2]


def test_a_lone_worker_is_not_named() -> None:
    with StubServer(StubEngine()) as server:
        prove_flushed(Client(server.url), PROMPT)
    assert "routed_dp_rank" not in server.asked[-1].body


@pytest.mark.parametrize("length", [1, PAGE_SIZE])
def test_a_prompt_that_is_never_cached_proves_nothing(length: int) -> None:
    with (
        StubServer(StubEngine()) as server,
        pytest.raises(UsageError, match=f"{length} is not accepted; accepted: more than 4"),
    ):
        prove_flushed(Client(server.url), PROMPT[:length])


def test_a_server_that_counts_no_cached_tokens_proves_nothing() -> None:
    engine = StubEngine()

    def mute(asked: Asked) -> Reply:
        reply = engine(asked)
        if asked.path == "/generate":
            del reply.body["meta_info"]["cached_tokens"]
        return reply

    with StubServer(mute) as server, pytest.raises(ServerError, match="no answer of /generate"):
        prove_flushed(Client(server.url), PROMPT)
