"""Ragged queries go to a uniform kernel in as few and as narrow calls as their bound allows."""

from __future__ import annotations

import pytest
import torch

from harness.kernels.interface import ContextCall, DecodeCall
from harness.kernels.ragged import context_by_decode, request_and_index


@pytest.mark.parametrize(
    ("lens", "bound", "widest", "widths"),
    [
        pytest.param((3, 1), 3, 8, [3], id="no-wider-than-the-bound"),
        pytest.param((3, 1), 3, 2, [2, 2], id="no-wider-than-the-kernel"),
        pytest.param((2, 3, 1), 6, 4, [4, 4], id="a-graphs-bound-above-every-request"),
        pytest.param((1, 1), 1, 8, [1], id="one-query-each"),
        pytest.param((5, 8), 8, 4, [4, 4], id="a-whole-number-of-calls"),
    ],
)
def test_calls_of_a_ragged_batch(
    lens: tuple[int, ...], bound: int, widest: int, widths: list[int]
) -> None:
    counts = torch.tensor(lens, dtype=torch.int32)
    ends = torch.cat((counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)))
    tokens, history = sum(lens), 10
    cache = torch.zeros(4, 16, 1, 8)
    asked: list[DecodeCall] = []
    request, _ = request_and_index(ends, tokens)
    told = "a token is of the request whose part of cu_seqlens_q it lies in, from its first on"
    assert request.tolist() == [i for i, count in enumerate(lens) for _ in range(count)], told

    def decode(call: DecodeCall) -> torch.Tensor:
        """Each query's own number, and how many keys it sees."""
        asked.append(call)
        width = call.q_len_per_req
        sees = call.seq_lens[:, None] - width + torch.arange(width) + 1
        return torch.cat((call.q, sees.flatten()[:, None, None].float()), -1)

    out = context_by_decode(
        decode,
        widest,
        ContextCall(
            q=torch.arange(1.0, tokens + 2)[:, None, None],
            caches=(cache, cache),
            block_tables=torch.zeros(len(lens), 4, dtype=torch.int32),
            seq_lens=counts + history,
            max_seq_len=64,
            bmm1_scale=1.0,
            bmm2_scale=1.0,
            out_dtype=torch.float32,
            cu_seqlens_q=ends,
            cu_seqlens_k=ends,
            max_q_len=bound,
            forward=object(),
        ),
    )
    told = "a kernel keeps its schedule for the keys of one call: no two calls share a forward"
    shared = [call.forward for call in asked if call.forward is not None]
    assert len({*map(id, shared)}) == len(shared) <= len(asked), told
    found = [call.q_len_per_req for call in asked]
    assert sum(found) >= bound, "calls compute every query that max_q_len allows, the last ones too"
    assert len(found) == len(widths), "calls are as few as the bound allows"
    assert found == widths, "a call is as wide as max_q_len or as the kernel, whichever is less"
    assert all(int(call.seq_lens.min()) > 0 for call in asked), (
        "a request without queries has a key"
    )
    own, sees = out[:tokens, 0].T.tolist()
    assert own == [*range(1, tokens + 1)], "each query's result lies in its own row"
    due = [history + i + 1 for queries in lens for i in range(queries)]
    assert sees == due, "a query sees the keys of its request up to its own"
    assert not out[tokens:].any(), "rows after the last query are zero"
