"""Change points of a series: suspicions without a stated error rate, to be looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

WINDOW = 40
"""Last nights of an epoch in which a change is looked for."""
LEAST_NIGHTS, LEAST_SIDE = 8, 2
SUSPICION = 0.002
"""Largest p value of a suspicion: the share of shuffled series that split as well."""
LEAST_CHANGE = 0.01
"""Log units under which a change is ignored."""
SHUFFLES = 1999


@dataclass(frozen=True)
class Change:
    """A split of an epoch: the first night after it, its size in log units, its p value."""

    night: str
    size: float
    p: float


def changed(nights: Sequence[str], costs: Sequence[float]) -> Change | None:
    """The best split of the last nights, if few shuffled series split as well.

    Args:
        nights: their names, in order.
        costs: of each, log units.
    """
    recent = np.array(costs[-WINDOW:])
    if len(recent) < LEAST_NIGHTS:
        return None
    place, best = best_split(recent[None])
    shuffled = np.random.default_rng(0).permuted(np.tile(recent, (SHUFFLES, 1)), axis=1)
    as_good = int((best_split(shuffled)[1] >= best[0] - 1e-12).sum())
    p = (1 + as_good) / (1 + SHUFFLES)
    first = int(place[0])
    size = float(np.median(recent[first:]) - np.median(recent[:first]))
    if p > SUSPICION or abs(size) < LEAST_CHANGE:
        return None
    return Change(nights[-len(recent) :][first], size, p)


def best_split(costs: Any) -> tuple[Any, Any]:
    """(place, |difference of means| in units of its error) of the best split of rows [m, n]."""
    n = costs.shape[1]
    left = np.arange(LEAST_SIDE, n - LEAST_SIDE + 1)
    sums = np.cumsum(costs, axis=1)
    means = sums[:, left - 1] / left
    rest = (sums[:, -1:] - sums[:, left - 1]) / (n - left)
    gaps = np.abs(means - rest) / np.sqrt(1 / left + 1 / (n - left))
    return left[gaps.argmax(axis=1)], gaps.max(axis=1)
