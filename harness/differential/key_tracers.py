"""Key tracers: keys and values whose attention output names the keys that were read.

Random rows cannot show one key too many among thousands; these can, at any length and dtype.
Queries are zero, so every key weighs the same. Each value column belongs to one traced position
and holds a power of two there and zero elsewhere: a column is exactly zero where its position was
not read, and the power of two over the number of keys where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from harness.errors import UsageError, rejected

TRACER_VALUE = 256.0


@dataclass(frozen=True, kw_only=True)
class KeyTracer:
    """One request, float32, every element exact in each supported dtype and in FP8.

    Args:
        q: [n, heads, dim].
        k: [total, kv_heads, dim].
        v: [total, kv_heads, v_dim]; for MLA the first v_dim columns of ``k``.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class TracerReading:
    """Keys that one query read, decoded from its output.

    Args:
        keys: number of keys, 0 where no traced position was read. A sink of logit s counts e**s.
        positions: traced positions that were read.
    """

    keys: float
    positions: tuple[int, ...]

    def __str__(self) -> str:
        return f"read {self.keys:.6g} keys, among them positions {list(self.positions)}"


def make_tracer(
    positions: Sequence[int],
    *,
    total: int,
    q_len: int,
    heads: int,
    kv_heads: int,
    dim: int,
    v_dim: int,
) -> KeyTracer:
    """A tracer of ``positions`` among ``total`` keys.

    Args:
        positions: at most kv_heads * v_dim of them, any of 0 … total - 1.
        total: keys in the history, those beyond the causal edge of early queries included.
        q_len: queries.
        heads: query heads.
        kv_heads: KV heads.
        dim: key size.
        v_dim: value size.

    Raises:
        UsageError: there are more positions than value columns.
    """
    if len(positions) > kv_heads * v_dim:
        raise UsageError(rejected("positions", len(positions), f"at most {kv_heads * v_dim}"))
    v = torch.zeros(total, kv_heads, v_dim)
    for i, position in enumerate(positions):
        v[position, i // v_dim, i % v_dim] = TRACER_VALUE
    k = torch.zeros(total, kv_heads, dim)
    return KeyTracer(q=torch.zeros(q_len, heads, dim), k=k, v=v)


def read_tracer(row: torch.Tensor, positions: Sequence[int], kv_heads: int) -> TracerReading:
    """Decode the output [heads, v_dim] of one query over a tracer.

    A position counts as read if any query head that can see its column read it.
    """
    v_dim = row.shape[-1]
    by_kv_head = row.double().reshape(kv_heads, -1, v_dim).amax(1).flatten()
    levels = by_kv_head[: len(positions)]
    read = levels != 0
    keys = TRACER_VALUE / float(levels[read].mean()) if bool(read.any()) else 0.0
    seen = (p for p, hit in zip(positions, read.tolist(), strict=True) if hit)
    return TracerReading(keys=keys, positions=tuple(sorted(seen)))
