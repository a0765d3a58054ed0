"""A flush of the embedded server is proven by the next request."""

from __future__ import annotations

import pytest

from fixtures.pytest_plugin.servers import Served
from harness.errors import NotFlushed
from harness.server.client.flush import flush_cache_with_retry, prove_flushed

AVERAGE = "avg_spec_accept_length"
PROMPT = [7 + 13 * place % 1900 for place in range(70)]


def test_a_warm_cache_is_flushed(server: Served) -> None:
    server.flush()
    cold = server.client.generate(PROMPT, 5)
    warm = server.client.generate(PROMPT, 5)
    assert cold.cached_tokens == 0
    assert 0 < warm.cached_tokens < len(PROMPT)
    assert warm.output_ids == cold.output_ids
    with pytest.raises(NotFlushed):
        prove_flushed(server.client, PROMPT)
    server.flush()
    prove_flushed(server.client, PROMPT)
    flush_cache_with_retry(server.url, server.client.flush_path)
    assert server.client.generate(PROMPT, 5) == cold


def test_the_accept_length_of_a_server_is_that_since_its_last_flush(
    embedded_server: Served,
) -> None:
    def accepted() -> float | None:
        return embedded_server.client.server_info()["internal_states"][0].get(AVERAGE)

    embedded_server.client.generate(PROMPT, 23)
    assert accepted()
    embedded_server.flush()
    assert accepted() is None
    answer = embedded_server.client.generate(PROMPT[::-1], 12)
    assert accepted() == answer.completion_tokens / answer.spec_verify_ct


def test_chunks_add_up(server: Served) -> None:
    server.flush()
    *_, last = chunks = list(server.client.stream(PROMPT, 12))
    server.flush()
    assert last.answer == server.client.generate(PROMPT, 12)
    assert [chunk.at for chunk in chunks] == sorted(chunk.at for chunk in chunks)
    lengths = [len(chunk.answer.output_ids) for chunk in chunks]
    assert lengths == sorted(set(lengths)), "every chunk brings tokens"
    assert lengths[-1] == last.answer.completion_tokens == 12
