"""The dense problem of a case: query, key and value of every token, without pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harness.core.case import Case
from harness.differential.input_types import ROPE_THETA, ProbeWeights


@dataclass(frozen=True)
class DenseRows:
    """Rows of n tokens in L layers, float64 holding values of the case's dtype.

    Args:
        q: [L, queries, heads, qk dim], of the last tokens alone; for MLA the absorbed part and the
            rotary part side by side.
        k: [L, n, kv heads, qk dim]; likewise.
        v: [L, n, kv heads, value dim].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def dense_rows(
    weights: ProbeWeights,
    case: Case,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    queries: int,
) -> DenseRows:
    """Rows of tokens [n] at positions [n]: looked up, rotated in float64, rounded once.

    All on the device of the weights.

    Args:
        weights: of the probe model.
        case: rows are rounded to its dtype.
        tokens: [n] int64.
        positions: [n] int64.
        queries: number of the last tokens that have a query.
    """
    dtype = getattr(torch, case.dtype)
    last = slice(len(tokens) - queries, None)
    queried, at = tokens[last], positions[last]
    if weights.q_rope is None or weights.k_rope is None:
        assert weights.v is not None
        q, k = weights.q[:, queried], weights.k[:, tokens]
        v = weights.v[:, tokens].double()
        return DenseRows(_rotated(q, at, dtype), _rotated(k, positions, dtype), v)
    q, k = weights.q[:, queried].double(), weights.k[:, tokens].double()
    q_rope = _rotated(weights.q_rope[:, queried], at, dtype)
    k_rope = _rotated(weights.k_rope[:, tokens], positions, dtype)
    return DenseRows(torch.cat((q, q_rope), -1), torch.cat((k, k_rope), -1), k)


def _rotated(x: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Neox rotation of x [L, n, heads, dim] as a complex product in float64."""
    half = x.shape[-1] // 2
    exponent = torch.arange(half, dtype=torch.float64, device=x.device) / half
    angle = positions.double()[:, None, None] * ROPE_THETA**-exponent
    pairs = torch.complex(x[..., :half], x[..., half:])
    rotated = pairs * torch.polar(torch.ones_like(angle), angle)
    # Rounded before it is copied: long rows are bound by memory.
    rounded = torch.view_as_real(rotated).to(dtype)
    return rounded.transpose(-1, -2).flatten(-2).double()
