"""Attention over lists of token slots, as FlashInfer lays a batch out, in plain PyTorch.

Compressed sparse rows: request r has the query rows ``qo_indptr[r] … qo_indptr[r + 1]`` and the
keys in the slots ``kv_indices[kv_indptr[r] … kv_indptr[r + 1]]``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from harness.kernels.shape_checks import ShapeCheck, refuse_unless
from harness.kernels.torch_ops import operation

BITS = 8
OPERATION = "csr_attention"


def _shapes(
    *, q: torch.Tensor, values: torch.Tensor, out_dtype: torch.dtype, **_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    out = q.new_empty(*q.shape[:2], values.shape[-1], dtype=out_dtype)
    return out, q.new_empty(q.shape[:2], dtype=torch.float32)


@operation(_shapes)
def csr_attention(
    *,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor | None,
    kv_lens: torch.Tensor | None,
    planned: torch.Tensor | None,
    packed_mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    is_causal: bool,
    window_left: int,
    scale: float,
    out_scale: float,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every request, and the base-2 logarithm of its softmax's sum.

    Queries are aligned to the end of their request's keys. Index tensors are read and checked at
    each launch, also at each replay of a recorded one. A query that sees nothing yields zeros and
    minus infinity; rows after ``qo_indptr[-1]`` do, too.

    Args:
        q: [T, heads, head_dim].
        keys: [slots, kv_heads, head_dim].
        values: [slots, kv_heads, value dim].
        qo_indptr: [bs + 1] int32.
        kv_indptr: [bs + 1] int32.
        kv_indices: int32 slots; None where keys are in order already.
        kv_lens: [bs] int32, keys per request; the steps of ``kv_indptr`` if None.
        planned: [2, >= bs] int32, queries and keys per request that the host planned for.
        packed_mask: uint8, bit ``i * keys + j`` of a request is set where its query i sees its key
            j; bits of a byte from the lowest on, requests start at whole bytes.
        mask_indptr: [bs + 1] int32, the first byte of each request.
        is_causal: whether a query sees only keys up to its own position; not asked with a mask.
        window_left: keys seen to the left besides the query's own, -1 for all.
        scale: of the softmax argument.
        out_scale: of the result.
        out_dtype: of the result.

    Returns:
        [T, heads, value dim] in ``out_dtype``, and [T, heads] float32.

    Raises:
        KernelRefusal: an index tensor does not cut the queries, the slots or the plan.
    """
    slots = keys.shape[0]
    named = slots if kv_indices is None else kv_indices.shape[0]
    check_indptr(OPERATION, "qo_indptr", qo_indptr, q.shape[0])
    check_indptr(OPERATION, "kv_indptr", kv_indptr, named)
    q_starts, k_starts = qo_indptr.tolist(), kv_indptr.tolist()
    k_lens = kv_indptr.diff().tolist() if kv_lens is None else kv_lens.tolist()
    out = q.new_zeros(*q.shape[:2], values.shape[-1], dtype=torch.float32)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    for r, count in enumerate(k_lens):
        rows = slice(q_starts[r], q_starts[r + 1])
        queries = rows.stop - rows.start
        if planned is not None:
            refuse_unless(OPERATION, _plan(r, queries, count, planned[:, r].tolist()))
        own = torch.arange(k_starts[r], k_starts[r] + count)
        if kv_indices is not None:
            own = kv_indices[k_starts[r] : k_starts[r] + count].long()
        check_slots(OPERATION, own, count, slots)
        position = count - queries + torch.arange(queries)[:, None]
        key = torch.arange(count)
        seen = torch.ones(queries, count, dtype=torch.bool)
        if packed_mask is not None and mask_indptr is not None:
            bits = packed_mask[int(mask_indptr[r]) : int(mask_indptr[r + 1])]
            refuse_unless(OPERATION, _mask(bits, queries * count))
            seen = _unpacked(bits, queries * count).view(queries, count)
        elif is_causal:
            seen = key <= position
        if window_left >= 0:
            seen = seen & (key >= position - window_left)
        out[rows], lse[rows] = attend_request(q[rows], keys[own], values[own], seen, scale)
    return (out * out_scale).to(out_dtype), lse


def attend_request(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One request; a NaN among the keys or values reaches exactly the queries that see it."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.float().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->qhk", q.float(), keys) * scale
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    if not seen.shape[1]:
        return values.new_zeros(*q.shape[:2], values.shape[-1]), scores.new_full(
            q.shape[:2], -torch.inf
        )
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().masked_fill(~seen[:, None], 0)
    broken = ~values.isfinite().all(-1)
    out = torch.einsum("qhk,khd->qhd", weights, values.masked_fill(broken[..., None], 0))
    reached = (seen[:, None] & broken.T[None]).any(-1)
    out = out.masked_fill(reached[..., None], torch.nan)
    return out, lse / torch.log(torch.tensor(2.0))


def pack_mask(mask: torch.Tensor, bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A mask as bits, and where each request's bytes begin.

    Args:
        mask: bool, the requests' masks one after the other; what follows them is left out.
        bits: [bs] integers, of each request.

    Returns:
        uint8, and [bs + 1] int32.
    """
    ends = bits.cumsum(0).tolist()
    refuse_unless(
        "plan", [(mask.numel() >= ends[-1], "custom_mask size", mask.numel(), f">= {ends[-1]}")]
    )
    parts, starts = [], [0]
    for start, end in zip([0, *ends], ends, strict=False):
        own = mask[start:end].to(torch.uint8)
        own = torch.nn.functional.pad(own, (0, -(end - start) % BITS)).view(-1, BITS)
        parts.append((own << torch.arange(BITS, dtype=torch.uint8)).sum(1).to(torch.uint8))
        starts.append(starts[-1] + len(own))
    return torch.cat(parts), torch.tensor(starts, dtype=torch.int32)


def _unpacked(packed: torch.Tensor, count: int) -> torch.Tensor:
    bits = (packed[:, None] >> torch.arange(BITS, dtype=torch.uint8)) & 1
    return bits.flatten()[:count].bool()


def check_indptr(operation: str, name: str, indptr: torch.Tensor, limit: int) -> None:
    """Refuse cumulative lengths [bs + 1] that begin after 0, decrease or end after ``limit``."""
    shown, steps = indptr.tolist(), indptr.diff().tolist()
    refuse_unless(
        operation,
        [
            (shown[0] == 0, name, shown, "starting at 0"),
            (min(steps, default=0) >= 0, name, shown, "never decreasing"),
            (shown[-1] <= limit, name, shown, f"ending within {limit}"),
        ],
    )


def check_slots(operation: str, own: torch.Tensor, count: int, slots: int) -> None:
    """Refuse a request's slots that are too few, or outside of the cache."""
    extremes = (int(own.min()), int(own.max())) if len(own) else (0, 0)
    inside = extremes[0] >= 0 and extremes[1] < slots
    refuse_unless(
        operation,
        [
            (len(own) == count, "kv_indices size", len(own), f"{count} keys"),
            (inside, "kv_indices", extremes, f"0 … {slots - 1}"),
        ],
    )


def _plan(r: int, queries: int, keys: int, planned: list[int]) -> Iterator[ShapeCheck]:
    yield queries <= planned[0], f"queries of request {r}", queries, f"<= {planned[0]}, as planned"
    yield keys <= planned[1], f"keys of request {r}", keys, f"<= {planned[1]}, as planned"


def _mask(bits: torch.Tensor, count: int) -> Iterator[ShapeCheck]:
    size = bits.numel() * BITS
    yield size >= count, "custom_mask bits of a request", size, f">= {count}, queries x keys"
