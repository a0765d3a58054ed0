"""Ragged query rows, and kernels that want as many of each request.

All index arithmetic runs on the device, without a read by the host, so that a recorded call follows
lengths that change between replays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import torch

from harness.kernels.checked import KernelFunction, Ragged

Decode = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""(q [bs * n, heads, dim], seq_lens [bs], n) -> [bs * n, heads, value dim]."""


def places(cu_seqlens_q: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The request and the index in it of each query row, [tokens] int64 each.

    Rows behind the last request count on in it.
    """
    cumulative = cu_seqlens_q.long()
    token = torch.arange(tokens, device=cumulative.device)
    last = cumulative.shape[0] - 2
    request = torch.searchsorted(cumulative[1:], token, right=True).clamp_max(last)
    return request, token - cumulative[request]


def zero_behind(out: torch.Tensor, cu_seqlens_q: torch.Tensor) -> torch.Tensor:
    """``out`` [T, heads, dim] with rows behind the last request's made zero, in place."""
    token = torch.arange(out.shape[0], device=out.device)
    return out.masked_fill_((token >= cu_seqlens_q[-1])[:, None, None], 0)


def by_decode(
    decode: Decode,
    q: torch.Tensor,
    *,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_q_len: int,
    widest: int,
) -> torch.Tensor:
    """Ragged queries on a kernel for uniform ones, [T, heads, value dim].

    The kernel aligns its queries to the end of the keys, so the queries of a request go to the
    last rows of its block, whose causal limits are theirs without a key more; rows in front of them
    see too little and are dropped. A request of more queries than the kernel takes runs in several
    calls, from its last queries to its first, each ending where the one before began.

    Args:
        decode: the kernel.
        q: [T, heads, dim], T at least ``cu_seqlens_q[-1]``; rows behind that come out zero.
        seq_lens: [bs] int32, keys a request.
        cu_seqlens_q: [bs + 1] int32.
        max_q_len: a bound of the query rows a request, known to the host.
        widest: most queries a request in one call.
    """
    tokens = q.shape[0]
    width = min(max_q_len, widest)
    calls = -(-max_q_len // width)
    ends = cu_seqlens_q[1:].long()
    column = torch.arange(width, device=q.device) - width
    parts = []
    for call in range(calls):
        rows = (ends[:, None] - call * width + column).clamp(0, tokens - 1)
        lengths = (seq_lens - call * width).clamp_min(1)
        parts.append(decode(q[rows.flatten()], lengths, width))
    request, index = places(cu_seqlens_q, tokens)
    from_end = (ends[request] - cu_seqlens_q[request] - 1 - index).clamp(0, max_q_len - 1)
    block, row = from_end // width, request * width + width - 1 - from_end % width
    flat = torch.cat(parts)
    out = flat[(block * parts[0].shape[0] + row).clamp_max(flat.shape[0] - 1)]
    return zero_behind(out, cu_seqlens_q)


def mla_context_by_decode(
    mla_decode: KernelFunction,
    widest: int,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_lora_rank: int,
    **call: Unpack[Ragged],
) -> torch.Tensor:
    """Absorbed MLA context on an MLA decode kernel; see ``by_decode``."""

    def decode(rows: torch.Tensor, seq_lens: torch.Tensor, q_len: int) -> torch.Tensor:
        return mla_decode(
            rows,
            kv_cache,
            kv_lora_rank,
            block_tables=call["block_tables"],
            seq_lens=seq_lens,
            q_len_per_req=q_len,
            max_seq_len=call["max_kv_len"],
            bmm1_scale=call["bmm1_scale"],
            bmm2_scale=call["bmm2_scale"],
            out_dtype=call["out_dtype"],
        )

    return by_decode(
        decode,
        q,
        seq_lens=call["seq_lens"],
        cu_seqlens_q=call["cu_seqlens_q"],
        max_q_len=call["max_q_len"],
        widest=widest,
    )
