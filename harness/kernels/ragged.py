"""Ragged queries on kernels that take the same number of queries for each request.

All index arithmetic runs on the device, without a read by the host, so that a recorded call follows
lengths that change between replays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch

from harness.kernels.interface import AttentionCall, ContextCall, DecodeCall


def request_and_index(cu_seqlens_q: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The request and the index in it of each query row, [tokens] int64 each.

    Rows after the last request count on in it.
    """
    cumulative = cu_seqlens_q.long()
    token = torch.arange(tokens, device=cumulative.device)
    last = cumulative.shape[0] - 2
    request = torch.searchsorted(cumulative[1:], token, right=True).clamp_max(last)
    return request, token - cumulative[request]


def padding_rows(cu_seqlens_q: torch.Tensor, tokens: int) -> torch.Tensor:
    """[tokens, 1, 1] bool: rows after the last request's."""
    token = torch.arange(tokens, device=cu_seqlens_q.device)
    return (token >= cu_seqlens_q[-1])[:, None, None]


def zero_padding(out: torch.Tensor, cu_seqlens_q: torch.Tensor) -> torch.Tensor:
    """``out`` [T, heads, dim] with rows after the last request's made zero, in place."""
    return out.masked_fill_(padding_rows(cu_seqlens_q, out.shape[0]), 0)


def context_by_decode(
    decode: Callable[[DecodeCall], torch.Tensor], widest: int, call: ContextCall
) -> torch.Tensor:
    """A context call on a decode kernel, [T, heads, value dim].

    The kernel aligns its queries to the end of the keys, so the queries of a request go to the
    last rows of its block, whose causal limits are theirs without a key more; rows in front of them
    see too little and are dropped. A request of more queries than the kernel takes runs in several
    calls, from its last queries to its first, each ending where the one before began.

    Args:
        decode: launches a decode call.
        widest: most queries per request in one decode call.
        call: rows of ``q`` after ``cu_seqlens_q[-1]`` come out zero.
    """
    q, cu_seqlens_q, tokens = call.q, call.cu_seqlens_q, call.q.shape[0]
    width = min(call.max_q_len, widest)
    common = {field.name: getattr(call, field.name) for field in fields(AttentionCall)}
    ends = cu_seqlens_q[1:].long()
    column = torch.arange(width, device=q.device) - width
    parts = []
    for dropped in range(0, call.max_q_len, width):
        rows = (ends[:, None] - dropped + column).clamp(0, tokens - 1)
        part = {"q": q[rows.flatten()], "seq_lens": (call.seq_lens - dropped).clamp_min(1)}
        parts.append(decode(DecodeCall(**common | part, q_len_per_req=width)))
    request, index = request_and_index(cu_seqlens_q, tokens)
    from_end = (ends[request] - cu_seqlens_q[request] - 1 - index).clamp(0, call.max_q_len - 1)
    block, row = from_end // width, request * width + width - 1 - from_end % width
    flat = torch.cat(parts)
    out = flat[(block * parts[0].shape[0] + row).clamp_max(flat.shape[0] - 1)]
    return zero_padding(out, cu_seqlens_q)
