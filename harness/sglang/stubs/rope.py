"""FlashInfer's fused rotation and FP8 cast of an MLA query and key."""

from __future__ import annotations

import torch

from harness.errors import KernelRefusal, rejected

FP8 = torch.float8_e4m3fn


def mla_rope_quantize_fp8(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor,
    k_nope: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype = FP8,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: torch.Tensor | None = None,
    k_rope_out: torch.Tensor | None = None,
    q_nope_out: torch.Tensor | None = None,
    k_nope_out: torch.Tensor | None = None,
    enable_pdl: bool = False,
) -> None:
    """Fill the given outputs, saturating.

    Args:
        q_rope: [T, heads, rope].
        k_rope: [T, rope].
        q_nope: [T, heads, rank].
        k_nope: [T, rank].
        cos_sin_cache: float32 [positions, rope]: half cosines, half sines.
        pos_ids: [T].
        is_neox: whether the two parts of a pair are half the width apart, or neighbours.
        quantize_dtype: FP8.
        quant_scale_q: multiplies the query.
        quant_scale_kv: multiplies the key.
        q_rope_out: like ``q_rope``, in FP8; likewise the others.
        k_rope_out: see above.
        q_nope_out: see above.
        k_nope_out: see above.
        enable_pdl: whether launches overlap.

    Raises:
        KernelRefusal: rows and positions differ in number, or an output is missing.
    """
    if len(pos_ids) != len(q_rope):
        told = rejected("pos_ids", list(pos_ids.shape), f"[{len(q_rope)}], a row each")
        raise KernelRefusal(f"mla_rope_quantize_fp8: {told}")
    cos, sin = cos_sin_cache[pos_ids].float().chunk(2, -1)
    for x, out, scale, turns in (
        (q_rope, q_rope_out, quant_scale_q, True),
        (k_rope, k_rope_out, quant_scale_kv, True),
        (q_nope, q_nope_out, quant_scale_q, False),
        (k_nope, k_nope_out, quant_scale_kv, False),
    ):
        if out is None:
            raise KernelRefusal("mla_rope_quantize_fp8: every output is the caller's here")
        value = rotated(x, cos, sin, is_neox) if turns else x.float()
        limit = torch.finfo(quantize_dtype).max
        out.copy_((value * scale).clamp(-limit, limit))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """Rotary embedding of x [T, …, rope] by cos and sin [T, rope / 2], float32."""
    while cos.dim() < x.dim():
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if is_neox:
        first, second = x.float().chunk(2, -1)
    else:
        first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    pair = first * cos - second * sin, second * cos + first * sin
    return torch.cat(pair, -1) if is_neox else torch.stack(pair, -1).flatten(-2)


def no_rotation(positions: int, rope: int) -> torch.Tensor:
    """A cache [positions, rope] for queries and keys that have been rotated already."""
    half = torch.zeros(positions, rope // 2)
    return torch.cat((half + 1, half), -1)
