"""Size of an effect: an estimate, a time-uniform interval, the least detectable slowdown."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from harness.bench.stats.e_process import DEFAULT_SCALE, Array, log_e, scales
from harness.bench.stats.margin import Bounds
from harness.bench.stats.stopping import Thresholds, decide, scaled_paths
from harness.errors import UsageError, rejected

STEP = 0.001
"""To which a detectable slowdown is known, in log units."""
GRID = 0.0005
"""Step of the interval's bounds in log units, 0.05 %."""
REGRESSED = 3
POWER = 0.9
"""Share of sessions in which the effect that a run could have seen is found."""


def checked_effects(effects: Sequence[float]) -> Array:
    """The effects as an array [n].

    Raises:
        UsageError: there is none, or one is not finite.
    """
    array = np.asarray(effects, dtype=np.float64)
    if array.ndim != 1 or not array.size or not np.isfinite(array).all():
        raise UsageError(rejected("effects", list(effects), "one or more finite numbers"))
    return array


def hodges_lehmann(effects: Sequence[float]) -> float:
    """Median of the means of all pairs, each effect with itself included; log units."""
    return float(centre(checked_effects(effects)))


def centre(effects: Array) -> Array:
    """The same over the last axis, [...] of [..., n]."""
    first, second = np.triu_indices(effects.shape[-1])
    return np.asarray(np.median((effects[..., first] + effects[..., second]) / 2.0, axis=-1))


def interval(
    effects: Sequence[float], calibrated: float = DEFAULT_SCALE, alpha: float = 0.05
) -> tuple[float, float]:
    """Bounds on the effect that hold after every block at once with probability 1 - alpha.

    A value is left out as soon as one of its two e-processes ever reached 2 / alpha, so that fewer
    than six blocks (1.85 ** 6 = 40.1) bound nothing at 95 %. Bounds lie on the grid, outwards.

    Returns:
        (low, high) in log units; infinite where nothing was shown.
    """
    array = checked_effects(effects)
    scale = scales(array, calibrated)
    low = _most_refuted(array, scale, alpha)
    return low, -_most_refuted(-array, scale, alpha)


def _most_refuted(array: Array, scale: Array, alpha: float) -> float:
    """Largest grid value m for which "the effect is at most m" is refuted."""

    def holds(step: int) -> bool:
        return float(log_e(array - step * GRID, scale).max()) < math.log(2.0 / alpha)

    # From 20 scales under the smallest effect the slowest bet gains its whole stake.
    reach = 20.0 * float(scale.max())
    steps = range(math.floor((array.min() - reach) / GRID), math.ceil(array.max() / GRID) + 1)
    place = bisect_left(steps, True, key=holds)
    return steps[place - 1] * GRID if place else -math.inf


def detectable(
    effects: Sequence[float],
    bounds: Bounds,
    thresholds: Thresholds | None = None,
    *,
    power: float = POWER,
    seed: int = 0,
    sessions: int = 400,
) -> float:
    """Least slowdown (log units, to ``STEP``) that ``power`` of sessions show in this A/A noise.

    Sessions of ``n_max`` blocks are drawn from the A/A effects with random signs, as the randomised
    order gives them to real blocks. Infinite where 100 % is not enough.
    """
    return _detectable(tuple(effects), bounds, thresholds or Thresholds(), power, seed, sessions)


@lru_cache(maxsize=1024)
def _detectable(
    effects: tuple[float, ...],
    bounds: Bounds,
    thresholds: Thresholds,
    power: float,
    seed: int,
    sessions: int,
) -> float:
    """A case of every session of a run asks the same."""
    noise = checked_effects(effects)
    random = np.random.default_rng(seed)
    size = (sessions, bounds.n_max)
    drawn = random.choice(noise, size=size) * random.choice([-1.0, 1.0], size=size)
    scale = scales(drawn, spread(effects))  # a shift of every effect leaves it as it is

    def shown(step: int) -> bool:
        found = scaled_paths(drawn + step * STEP, bounds, scale)
        codes, _ = decide(found, thresholds)
        return bool((codes == REGRESSED).mean() >= power)

    steps = range(math.ceil(math.log(2.0) / STEP) + 1)
    place = bisect_left(steps, True, key=shown)
    return steps[place] * STEP if place < len(steps) else math.inf


def spread(effects: Sequence[float]) -> float:
    """Calibrated scale of A/A effects: 1.4826 · median |effect|, at least 0.01 %.

    About zero and not about their median, because an A/A effect is zero.
    """
    return max(1.4826 * float(np.median(np.abs(checked_effects(effects)))), 1e-4)
