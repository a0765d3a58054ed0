"""The dense problem of a case: query, key and value of every token, without pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from harness.core.case import Case
from harness.differential.input_types import ROPE_THETA, ProbeWeights

Cast = Callable[[torch.Tensor, Sequence[float]], torch.Tensor]
"""Of rows [L, …], given the scale of each layer."""
TOKENS_AT_ONCE = 1 << 10
"""Long rows are bound by memory: what lies between two dtypes takes eight times what is kept."""
SHARED = 1 << 12
"""Rotations are made of so many positions at once: rows of like lengths share them."""


@dataclass(frozen=True)
class DenseRows:
    """Rows of n tokens in L layers, in the case's dtype or one that holds more.

    Args:
        q: [L, queries, heads, qk dim], of the last tokens alone; for MLA the absorbed part and the
            rotary part side by side.
        k: [L, n, kv heads, qk dim]; likewise.
        v: [L, n, kv heads, value dim].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def uncast(rows: torch.Tensor, scales: Sequence[float]) -> torch.Tensor:
    """Rows as they are."""
    return rows


def dense_rows(
    weights: ProbeWeights,
    case: Case,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    queries: int,
    cast: Cast = uncast,
) -> DenseRows:
    """Rows of tokens [n] at positions [n]: looked up, rotated in float64, rounded once.

    All on the device of the weights, in the case's dtype.

    Args:
        weights: of the probe model.
        case: rows are rounded to its dtype.
        tokens: [n] int64.
        positions: [n] int64.
        queries: number of the last tokens that have a query.
        cast: of each element of keys and values [L, …], given the scale of each layer.
    """
    dtype = getattr(torch, case.dtype)
    last = slice(len(tokens) - queries, None)
    queried, at = tokens[last], positions[last]
    # Of the longest request, so that all requests and their histories share one table.
    end = 1 + max((int(positions.max()) if len(positions) else 0, *case.total_lens))
    rotated = partial(_rotated, dtype=dtype, end=end)
    k_scales, v_scales = zip(*case.kv_scales, strict=True)
    if weights.q_rope is None or weights.k_rope is None:
        assert weights.v is not None
        q = rotated(weights.q, queried, at)
        k = cast(rotated(weights.k, tokens, positions), k_scales)
        v = _looked_up(weights.v, tokens, lambda rows: cast(rows.to(dtype), v_scales))
        return DenseRows(q, k, v)
    q_rope = rotated(weights.q_rope, queried, at)
    k_rope = cast(rotated(weights.k_rope, tokens, positions), k_scales)
    q = torch.cat((_looked_up(weights.q, queried, lambda rows: rows.to(dtype)), q_rope), -1)
    k = _looked_up(weights.k, tokens, lambda rows: cast(rows.to(dtype), k_scales))
    k = torch.cat((k, k_rope), -1)
    return DenseRows(q, k, k[..., : case.kv_lora_rank])


def _looked_up(
    table: torch.Tensor, tokens: torch.Tensor, made: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """What ``made`` makes of each row [L, n, …]: a long row has each of its tokens many times."""
    table, tokens = _fewest(table, tokens)
    return made(table).index_select(1, tokens)


def _fewest(table: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A table with a row for each token, where they are fewer than its rows, and their rows."""
    if len(tokens) >= table.shape[1]:
        return table, tokens
    return table.index_select(1, tokens), torch.arange(len(tokens), device=table.device)


def _rotated(
    table: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    *,
    dtype: torch.dtype,
    end: int,
) -> torch.Tensor:
    """Neox rotation, at positions below ``end``, of rows of a table [L, V, heads, dim].

    It is a complex product in float64.
    """
    table, tokens = _fewest(table, tokens)
    half = table.shape[-1] // 2
    low, high = table.double().split(half, -1)
    plain = torch.complex(low, high)
    turns = _turns(half, -(-end // SHARED) * SHARED, table.device)
    shape = (table.shape[0], len(tokens), *table.shape[2:])
    rotated = torch.empty(shape, dtype=dtype, device=table.device)
    parts = (tokens.split(TOKENS_AT_ONCE), positions.split(TOKENS_AT_ONCE))
    for ids, at, part in zip(*parts, rotated.split(TOKENS_AT_ONCE, 1), strict=True):
        turned = plain.index_select(1, ids).mul_(turns[at][:, None])
        part[..., :half].copy_(turned.real)
        part[..., half:].copy_(turned.imag)
    return rotated


@lru_cache(maxsize=2)
def _turns(half: int, positions: int, device: torch.device) -> torch.Tensor:
    """The rotation of every position, [positions, half] complex128: as long to make as to use."""
    exponent = torch.arange(half, dtype=torch.float64, device=device) / half
    angle = torch.arange(positions, device=device).double()[:, None] * ROPE_THETA**-exponent
    return torch.polar(torch.ones((), dtype=torch.float64, device=device).expand_as(angle), angle)


def cast_by_layer(
    rows: torch.Tensor,
    scales: Sequence[float],
    dtype: torch.dtype,
    cast: Callable[[torch.Tensor, float], torch.Tensor],
) -> torch.Tensor:
    """Rows [L, n, …] at a dtype: a cast from float64 with the scale of each layer."""
    made = torch.empty(rows.shape, dtype=dtype, device=rows.device)
    for layer, scale, own in zip(rows, scales, made, strict=True):
        parts = (layer.split(TOKENS_AT_ONCE), own.split(TOKENS_AT_ONCE))
        for part, into in zip(*parts, strict=True):
            into.copy_(cast(part.double(), scale))
    return made
