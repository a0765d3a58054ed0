"""Rotary position embedding, in both pairings."""

from __future__ import annotations

import torch


def rotate(
    x: torch.Tensor, positions: torch.Tensor, *, theta: float, interleaved: bool
) -> torch.Tensor:
    """Rotate every pair of x [n, heads, dim] by the angle of its position [n].

    Pair i rotates by ``position * theta ** (-2 i / dim)``. It is (i, i + dim / 2) in the neox
    pairing of Llama and (2 i, 2 i + 1) in the interleaved one of DeepSeek; the layout is kept.
    Angles are float64 and only the result has the dtype of x.
    """
    half = x.shape[-1] // 2
    exponents = torch.arange(half, dtype=torch.float64, device=x.device) / half
    angles = positions.double()[:, None, None] * theta**-exponents
    wide = x.double()
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = wide[..., :half], wide[..., half:]
    cos, sin = angles.cos(), angles.sin()
    rotated = (first * cos - second * sin, first * sin + second * cos)
    out = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
    return out.to(x.dtype)
