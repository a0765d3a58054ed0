"""Attention of new tokens over cached slots and each other, as SGLang's Triton backend asks."""

from __future__ import annotations

import torch

from harness.kernels.csr_attention import attend_request, check_indptr, check_slots
from harness.kernels.shape_checks import refuse_unless
from harness.kernels.torch_ops import operation

OPERATION = "extend_attention"


def _shapes(
    *, q: torch.Tensor, new_values: torch.Tensor, **_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    out = q.new_empty(*q.shape[:2], new_values.shape[-1], dtype=torch.float32)
    return out, q.new_empty(q.shape[:2], dtype=torch.float32)


@operation(_shapes)
def extend_attention(
    *,
    q: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    mask_starts: torch.Tensor | None,
    window_left: int,
    scale: float,
    k_scale: float,
    v_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every request, and the base-2 logarithm of its softmax's sum.

    Args:
        q: [T, heads, head_dim].
        new_keys: [T, kv_heads, head_dim], not scaled.
        new_values: [T, kv_heads, value dim], not scaled.
        keys: [slots, kv_heads, head_dim].
        values: [slots, kv_heads, value dim].
        qo_indptr: [bs + 1] integers.
        kv_indptr: [bs + 1] integers, of ``kv_indices``.
        kv_indices: slots of the tokens in front of the new ones.
        mask: entry ``i * keys + j`` of a request says whether its query i sees key j; of cached
            keys every one is seen.
        mask_indptr: [bs + 1] integers, where each request's mask begins.
        mask_starts: [bs] integers, the key that ``kv_indices`` begin with; 0 if None.
        window_left: keys seen to the left besides the query's own, -1 for all.
        scale: of the softmax argument.
        k_scale: of cached keys.
        v_scale: of cached values.

    Returns:
        [T, heads, value dim] and [T, heads], float32.

    Raises:
        KernelRefusal: an index tensor does not cut the queries or the slots.
    """
    check_indptr(OPERATION, "qo_indptr", qo_indptr, q.shape[0])
    check_indptr(OPERATION, "kv_indptr", kv_indptr, kv_indices.shape[0])
    q_starts, k_starts = qo_indptr.tolist(), kv_indptr.tolist()
    out = q.new_zeros(*q.shape[:2], new_values.shape[-1], dtype=torch.float32)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    for r, start in enumerate(k_starts[:-1]):
        rows = slice(q_starts[r], q_starts[r + 1])
        own = kv_indices[start : k_starts[r + 1]].long()
        check_slots(OPERATION, own, len(own), keys.shape[0])
        prefix, queries = len(own), rows.stop - rows.start
        position = prefix + torch.arange(queries)[:, None]
        key = torch.arange(prefix + queries)
        seen = key <= position
        if mask is not None and mask_indptr is not None:
            first = 0 if mask_starts is None else int(mask_starts[r])
            own_mask = _mask(mask, int(mask_indptr[r]), queries, first + prefix + queries)
            seen = seen.clone()
            seen[:, prefix:] = own_mask[:, first + prefix :]
        if window_left >= 0:
            seen = seen & (key >= position - window_left)
        all_keys = torch.cat((keys[own].float() * k_scale, new_keys[rows].float()))
        all_values = torch.cat((values[own].float() * v_scale, new_values[rows].float()))
        out[rows], lse[rows] = attend_request(q[rows], all_keys, all_values, seen, scale)
    return out, lse


def _mask(mask: torch.Tensor, start: int, queries: int, keys: int) -> torch.Tensor:
    own = mask[start : start + queries * keys]
    accepted = f"{queries * keys}, queries x keys"
    refuse_unless(
        OPERATION, [(len(own) == queries * keys, "custom_mask of a request", len(own), accepted)]
    )
    return own.view(queries, keys).bool()
