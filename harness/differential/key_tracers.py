"""Exact probes: dense histories whose attention output names the keys that were read.

Random rows cannot show one key too many among thousands; these can, at any length and dtype.

* ``watch``: Q = 0, so every key weighs the same. Each value column belongs to one watched position
  and holds a power of two there and zero elsewhere: a column is exactly zero where its position
  was not read, and the power of two over the number of keys where it was.
* ``point``: every query head asks for one position by its binary code and gets that code back as
  the value, so that a swapped page or a wrong slot answers with another position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from harness.errors import UsageError, rejected

LOUD = 256.0
DECISIVE = 40.0


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
    """What one query read, as its output tells.

    Args:
        keys: number of keys, 0 where no watched position was read. A sink of logit s counts e**s.
        positions: watched positions that were read.
    """

    keys: float
    positions: tuple[int, ...]

    def __str__(self) -> str:
        return f"read {self.keys:.6g} keys, among them positions {list(self.positions)}"


def watch(
    positions: Sequence[int],
    *,
    total: int,
    q_len: int,
    heads: int,
    kv_heads: int,
    dim: int,
    v_dim: int,
    latent: bool = False,
) -> KeyTracer:
    """Uniform attention over ``total`` keys that tells which of ``positions`` were read.

    Args:
        positions: at most kv_heads * v_dim of them, any of 0 … total - 1.
        total: keys in the history, those beyond the causal edge of early queries included.
        q_len: queries.
        heads: query heads.
        kv_heads: KV heads.
        dim: key size.
        v_dim: value size.
        latent: whether values are the first columns of the keys (MLA).

    Raises:
        UsageError: there are more positions than value columns.
    """
    if len(positions) > kv_heads * v_dim:
        raise UsageError(rejected("positions", len(positions), f"at most {kv_heads * v_dim}"))
    v = torch.zeros(total, kv_heads, v_dim)
    for i, position in enumerate(positions):
        v[position, i // v_dim, i % v_dim] = LOUD
    k = torch.zeros(total, kv_heads, dim)
    if latent:
        k[..., :v_dim] = v
    return KeyTracer(q=torch.zeros(q_len, heads, dim), k=k, v=v)


def read_watch(row: torch.Tensor, positions: Sequence[int], kv_heads: int) -> TracerReading:
    """Decode the output [heads, v_dim] of one query over a ``watch`` probe.

    A position counts as read if any query head that can see its column read it.
    """
    v_dim = row.shape[-1]
    by_kv_head = row.double().reshape(kv_heads, -1, v_dim).amax(1).flatten()
    levels = by_kv_head[: len(positions)]
    read = levels != 0
    keys = LOUD / float(levels[read].mean()) if bool(read.any()) else 0.0
    seen = (p for p, hit in zip(positions, read.tolist(), strict=True) if hit)
    return TracerReading(keys=keys, positions=tuple(sorted(seen)))


def point(
    targets: Sequence[Sequence[int]],
    *,
    total: int,
    kv_heads: int,
    dim: int,
    v_dim: int,
    scale: float,
    latent: bool = False,
) -> KeyTracer:
    """Attention of query j, head h, to position ``targets[j][h]`` alone.

    Args:
        targets: [n][heads] positions that their queries may see.
        total: keys in the history.
        kv_heads: KV heads.
        dim: key size.
        v_dim: value size.
        scale: factor of the scores, by which the queries are made decisive.
        latent: whether values are the first columns of the keys (MLA).

    Raises:
        UsageError: the binary code of a position does not fit into keys and values.
    """
    code = _codes(torch.arange(total), total)
    if code.shape[-1] > min(dim, v_dim):
        accepted = f"at most {2 ** min(dim, v_dim)} with rows of {min(dim, v_dim)}"
        raise UsageError(rejected("total", total, accepted))
    sharpness = 2.0 ** math.ceil(math.log2(DECISIVE / 2 / scale))
    q = torch.zeros(len(targets), len(targets[0]), dim)
    q[..., : code.shape[-1]] = sharpness * _codes(torch.tensor(targets), total)
    k, v = torch.zeros(total, kv_heads, dim), torch.zeros(total, kv_heads, v_dim)
    k[..., : code.shape[-1]] = v[..., : code.shape[-1]] = code[:, None]
    return KeyTracer(q=q, k=k, v=k[..., :v_dim].clone() if latent else v)


def read_point(row: torch.Tensor, total: int) -> tuple[int | None, ...]:
    """Decode the output [heads, v_dim] of one query over a ``point`` probe.

    Returns:
        The position each head read, None where its output is no position at all.
    """
    bits = row.double()[:, : _width(total)]
    whole = ((bits.abs() - 1).abs() < 2.0**-6).all(-1).tolist()
    powers = 2 ** torch.arange(bits.shape[-1], device=bits.device)
    positions = ((bits > 0) * powers).sum(-1).tolist()
    return tuple(p if is_whole else None for p, is_whole in zip(positions, whole, strict=True))


def _width(total: int) -> int:
    return max(1, (total - 1).bit_length())


def _codes(positions: torch.Tensor, total: int) -> torch.Tensor:
    """Binary digits of positions [...] as -1 and 1: [..., width], float32."""
    return (positions[..., None] >> torch.arange(_width(total)) & 1) * 2.0 - 1.0
