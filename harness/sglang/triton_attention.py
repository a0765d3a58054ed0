"""The two attention kernels of SGLang's Triton backend: the strict reference, or interpreted.

Interpreted, one launch takes seconds; a subject of its own runs a few rows so. The kernels that
make their index tensors always run interpreted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from harness.errors import KernelRefusal, rejected
from harness.kernels.csr_attention import csr_attention
from harness.kernels.extend_attention import extend_attention

Kernel = Callable[..., None]


_interprets = False


def interpret(own: bool) -> None:
    """Run sglang's own kernels from now on, or the reference in their place."""
    global _interprets
    _interprets = own


def chosen(original: Kernel, reference: Kernel) -> Kernel:
    """A function that runs one of the two."""

    @wraps(reference)
    def serve(*args: Any, **kwargs: Any) -> None:
        return (original if _interprets else reference)(*args, **kwargs)

    return serve


def decode_attention_fwd(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    o: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    attn_logits: torch.Tensor,
    attn_lse: torch.Tensor,
    num_kv_splits: torch.Tensor,
    max_kv_splits: int,
    sm_scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    xai_temperature_len: int = -1,
    **options: object,
) -> None:
    """One query [bs, heads, head_dim] per request over slots of the cache, into ``o``."""
    _refuse(logit_cap, xai_temperature_len)
    bs = q.shape[0]
    out, lse = csr_attention(
        q=q,
        keys=k_buffer,
        values=v_buffer,
        qo_indptr=torch.arange(bs + 1, dtype=torch.int32),
        kv_indptr=kv_indptr[: bs + 1],
        kv_indices=_behind(kv_indices),
        kv_lens=None,
        planned=None,
        packed_mask=None,
        mask_indptr=None,
        is_causal=False,
        window_left=-1,
        scale=sm_scale * k_scale,
        out_scale=v_scale,
        out_dtype=torch.float32,
    )
    o.copy_(with_sinks(out, lse, sinks))


def extend_attention_fwd(
    q_extend: torch.Tensor,
    k_extend: torch.Tensor,
    v_extend: torch.Tensor,
    o_extend: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    custom_mask: torch.Tensor | None,
    is_causal: bool,
    mask_indptr: torch.Tensor | None,
    max_len_extend: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    skip_prefix_custom_mask: bool = True,
    sliding_window_size: int = -1,
    sinks: torch.Tensor | None = None,
    window_kv_offsets: torch.Tensor | None = None,
    xai_temperature_len: int = -1,
    **options: object,
) -> None:
    """Ragged queries [T, heads, head_dim] over slots of the cache and over each other, into o."""
    _refuse(logit_cap, xai_temperature_len)
    if not (is_causal and skip_prefix_custom_mask):
        raise KernelRefusal(f"extend_attention_fwd: {rejected('is_causal', is_causal, 'True')}")
    bs = qo_indptr.shape[0] - 1
    out, lse = extend_attention(
        q=q_extend,
        new_keys=k_extend,
        new_values=v_extend,
        keys=k_buffer,
        values=v_buffer,
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr[: bs + 1],
        kv_indices=_behind(kv_indices),
        mask=custom_mask,
        mask_indptr=mask_indptr,
        mask_starts=window_kv_offsets if sliding_window_size >= 0 else None,
        window_left=sliding_window_size,
        scale=sm_scale or q_extend.shape[-1] ** -0.5,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    o_extend.copy_(with_sinks(out, lse, sinks))


def with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """A result after each head's sink took its share of the softmax.

    Args:
        out: [T, heads, dim] float32.
        lse: [T, heads] float32, base-2 logarithm of the softmax's sum.
        sinks: [heads] logits.
    """
    if sinks is None:
        return out
    share = 1 / (1 + torch.exp2(sinks.float() / math.log(2) - lse))
    return out * share[..., None]


def _behind(view: torch.Tensor) -> torch.Tensor:
    """All that lies behind the pointer that a Triton kernel takes, whatever the view's length."""
    size = view.untyped_storage().nbytes() // view.element_size() - view.storage_offset()
    return view.as_strided((size,), (1,))


def _refuse(logit_cap: float, xai_temperature_len: int) -> None:
    for name, value, neutral in (
        ("logit_cap", logit_cap, 0),
        ("xai_temperature_len", xai_temperature_len, -1),
    ):
        if value != neutral:
            raise KernelRefusal(rejected(name, value, neutral))
