"""The dense problem behind a case: query, key and value of every token, no page in sight."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harness.core.case import Case
from harness.differential.inputs import ROPE_THETA, ProbeWeights


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

    Args:
        weights: of the probe model.
        case: the row; its dtype is what rows are rounded to.
        tokens: [n] int64.
        positions: [n] int64.
        queries: how many of the last tokens have a query.
    """
    dtype = getattr(torch, case.dtype)
    asking = slice(len(tokens) - queries, None)
    q, k = weights.q[:, tokens[asking]].double(), weights.k[:, tokens].double()
    if weights.q_rope is None or weights.k_rope is None:
        assert weights.v is not None
        v = weights.v[:, tokens].double()
        return DenseRows(_rotated(q, positions[asking], dtype), _rotated(k, positions, dtype), v)
    q_rope = _rotated(weights.q_rope[:, tokens[asking]].double(), positions[asking], dtype)
    k_rope = _rotated(weights.k_rope[:, tokens].double(), positions, dtype)
    return DenseRows(torch.cat((q, q_rope), -1), torch.cat((k, k_rope), -1), k)


def _rotated(x: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Neox rotation of x [L, n, heads, dim] as a complex product."""
    half = x.shape[-1] // 2
    exponent = torch.arange(half, dtype=torch.float64) / half
    angle = positions.double()[:, None, None] * ROPE_THETA**-exponent
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.cat((turned.real, turned.imag), -1).to(dtype).double()
