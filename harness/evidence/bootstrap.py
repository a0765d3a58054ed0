"""BCa bootstrap, the familiar second view beside the time-uniform interval (Efron 1987)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np

from harness.errors import UsageError, rejected
from harness.evidence.martingale import Array

RESAMPLES = 9_999


def ratio_of_medians(a: Array, b: Array) -> Array:
    """Median of b over median of a, along the last axis."""
    return np.asarray(np.median(b, axis=-1) / np.median(a, axis=-1))


def ratio_of_accept_lengths(
    tokens_a: Array, verifies_a: Array, tokens_b: Array, verifies_b: Array
) -> Array:
    """Pooled accept length of b over that of a, along the last axis (prompts)."""
    pooled = [c.sum(-1) / v.sum(-1) for c, v in ((tokens_b, verifies_b), (tokens_a, verifies_a))]
    return np.asarray(pooled[0] / pooled[1])


def bca(
    statistic: Callable[..., Array],
    *columns: Sequence[float],
    alpha: float = 0.05,
    seed: int = 0,
) -> tuple[float, float]:
    """Interval of a statistic of paired columns, resampled by rows (blocks or prompts).

    Args:
        statistic: of as many arrays [..., n] as there are columns, to [...].
        columns: of one length n >= 2.
        alpha: of both sides together.
        seed: of the resampling.

    Raises:
        UsageError: columns of different lengths, shorter than two or not finite.
    """
    lengths = {len(column) for column in columns}
    if len(lengths) != 1 or min(lengths) < 2:
        raise UsageError(rejected("lengths of columns", lengths, "one length of at least 2"))
    table = np.array(columns, dtype=np.float64)
    if not np.isfinite(table).all():
        raise UsageError(rejected("columns", columns, "finite numbers"))
    n = table.shape[1]
    picks = np.random.default_rng(seed).integers(0, n, size=(RESAMPLES, n))
    drawn = statistic(*(column[picks] for column in table))
    left_out = ~np.eye(n, dtype=bool)
    jackknife = statistic(*(np.tile(c, (n, 1))[left_out].reshape(n, n - 1) for c in table))
    levels = _levels(drawn, float(statistic(*table)), jackknife, alpha)
    low, high = np.quantile(drawn, levels)
    return float(low), float(high)


def _levels(drawn: Array, point: float, jackknife: Array, alpha: float) -> list[float]:
    normal = NormalDist()
    below = float(((drawn < point).mean() + (drawn <= point).mean()) / 2)
    bias = normal.inv_cdf(min(max(below, 1 / RESAMPLES), 1 - 1 / RESAMPLES))
    away = jackknife.mean() - jackknife
    square = float((away**2).sum())
    acceleration = float((away**3).sum()) / (6 * square**1.5) if square else 0.0

    def level(tail: float) -> float:
        shifted = bias + normal.inv_cdf(tail)
        return normal.cdf(bias + shifted / (1 - acceleration * shifted))

    return [level(alpha / 2), level(1 - alpha / 2)]
