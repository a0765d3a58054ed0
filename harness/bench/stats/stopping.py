"""The stopping rule: a decision after every block; vectorised over sessions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.bench.stats.bench_verdict import BenchVerdict
from harness.bench.stats.e_process import DEFAULT_SCALE, Array, log_e, scales
from harness.bench.stats.margin import Bounds, checked


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Least e-values of a decision.

    Args:
        reject_null: for REGRESSED or IMPROVED; a false one has probability at most its inverse.
        accept_equivalence: for OK; a false one has probability at most its inverse.
    """

    reject_null: float = 100.0
    accept_equivalence: float = 20.0

    def __post_init__(self) -> None:
        checked("reject_null", self.reject_null, above=1.0)
        checked("accept_equivalence", self.accept_equivalence, above=1.0)


@dataclass(frozen=True, kw_only=True)
class EvidencePaths:
    """Log e-processes after each block, [..., n].

    Args:
        regressed: against "the effect is at most delta0".
        accept_equivalence: against "the effect is at least delta1".
        improved: against "the effect is at least -delta0".
    """

    regressed: Array
    accept_equivalence: Array
    improved: Array


def paths(effects: Array, bounds: Bounds, calibrated: float = DEFAULT_SCALE) -> EvidencePaths:
    """The three e-processes of sessions of cost effects (positive is worse), [..., n]."""
    return scaled_paths(effects, bounds, scales(effects, calibrated))


def scaled_paths(effects: Array, bounds: Bounds, scale: Array) -> EvidencePaths:
    """The same with a scale per block, [..., n], from ``scales``."""
    return EvidencePaths(
        regressed=log_e(effects - bounds.delta0, scale),
        accept_equivalence=log_e(bounds.delta1 - effects, scale),
        improved=log_e(-bounds.delta0 - effects, scale),
    )


VERDICT_CODES = (
    BenchVerdict.INCONCLUSIVE,
    BenchVerdict.OK,
    BenchVerdict.IMPROVED,
    BenchVerdict.REGRESSED,
)
"""By the code that ``decide`` returns; of two decisions in one block the higher code is taken."""


def decide(
    found: EvidencePaths, thresholds: Thresholds
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(index into ``VERDICT_CODES``, blocks used) of each session, [...] each.

    REGRESSED and IMPROVED stop at once. OK waits while the e-process for an improvement is above
    1: evidence for OK always comes first, and would hide every IMPROVED otherwise. A session
    without a decision uses all its blocks.
    """
    regressed = found.regressed >= math.log(thresholds.reject_null)
    improved = found.improved >= math.log(thresholds.reject_null)
    enough = found.accept_equivalence >= math.log(thresholds.accept_equivalence)
    equivalent = np.logical_or.accumulate(enough, axis=-1)
    code = np.select([regressed, improved, equivalent], [3, 2, 1], 0)
    stop = regressed | improved | (equivalent & (found.improved <= 0.0))
    stop[..., -1] = True
    last = stop.argmax(axis=-1)
    return np.take_along_axis(code, last[..., None], axis=-1)[..., 0], last + 1
