"""Rules of a kernel call on the values of its index tensors.

These checks run inside the opaque operation: they hold at every replay of a recorded call and are
no host syncs of the region that records it. A CUDA stream that is being captured cannot be read;
there the checks are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from harness.kernels.paged_kv import PagedKeys, is_readable
from harness.kernels.shape_checks import ShapeCheck, refuse_unless


def check_lengths(kernel: str, paged: PagedKeys, query_lens: torch.Tensor) -> None:
    """Refuse lengths and page ids that the cache, the table or the limits do not hold.

    Args:
        kernel: name for the message.
        paged: the cache side of the call.
        query_lens: [bs] integers, queries per request.
    """
    if paged.seq_lens.numel() and is_readable(paged.seq_lens):
        refuse_unless(kernel, _lengths(paged, query_lens))


def _lengths(paged: PagedKeys, query_lens: torch.Tensor) -> Iterator[ShapeCheck]:
    shown, queries = paged.seq_lens.tolist(), query_lens.tolist()
    yield min(shown) >= 0, "seq_lens", shown, ">= 0 each"
    causal = all(keys >= own for keys, own in zip(shown, queries, strict=True))
    yield causal, "seq_lens", shown, f"at least the queries, {queries}"
    longest, width = max(shown), paged.block_tables.shape[1]
    capacity = width * paged.page_size
    yield longest <= capacity, "seq_lens", shown, f"<= {capacity}, the block table's width"
    yield (
        longest <= paged.max_seq_len,
        "max_seq_len",
        paged.max_seq_len,
        f">= {longest}, the longest",
    )
    live = paged.block_tables[paged.live_columns(width)].tolist()
    last = paged.caches[0].shape[0] - 1
    extremes = (min(live, default=0), max(live, default=0))
    yield extremes[0] >= 0 and extremes[1] <= last, "block_tables pages", extremes, f"0 … {last}"


def check_cumulative(
    kernel: str,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    tokens: int,
    max_q_len: int,
) -> None:
    """Refuse cumulative lengths [bs + 1] that do not cut the queries or the keys of the call."""
    if is_readable(seq_lens):
        refuse_unless(kernel, _cumulative(cu_seqlens_q, cu_seqlens_k, seq_lens, tokens, max_q_len))


def _cumulative(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    seq_lens: torch.Tensor,
    tokens: int,
    max_q_len: int,
) -> Iterator[ShapeCheck]:
    shown = cu_seqlens_q.tolist()
    steps = cu_seqlens_q.diff().tolist()
    yield shown[0] == 0, "cu_seqlens_q", shown, "starting at 0"
    yield min(steps, default=0) >= 0, "cu_seqlens_q", shown, "never decreasing"
    yield shown[-1] <= tokens, "cu_seqlens_q", shown, f"ending within {tokens} query rows"
    longest = max(steps, default=0)
    yield longest <= max_q_len, "max_q_len", max_q_len, f">= {longest}, the longest request"
    keys, expected = cu_seqlens_k.tolist(), [0, *seq_lens.cumsum(0).tolist()]
    yield keys == expected, "cu_seqlens_k", keys, f"{expected}, cumulative seq_lens"
