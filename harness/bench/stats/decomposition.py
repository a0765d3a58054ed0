"""Decomposition of an effect on TPOT: ln TPOT = ln step time - ln accept length."""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.bench.stats.bench_verdict import BenchVerdict
from harness.bench.stats.sequential_test import Evidence

MOVED = (BenchVerdict.REGRESSED, BenchVerdict.IMPROVED)


@dataclass(frozen=True, kw_only=True)
class Decomposition:
    """Log effects on TPOT, positive is slower.

    Args:
        step: through the step time: the kernels.
        accept: through the accept length: the drafts.
        rest: of the effect on TPOT, through neither.
        cause: one sentence; empty where nothing was shown to move.
    """

    step: float
    accept: float
    rest: float
    cause: str


def decompose(tpot: Evidence, step: Evidence, accept: Evidence) -> Decomposition:
    """Split the effect on TPOT, and name the half whose own verdict says that it moved."""
    through_step, through_accept = math.log(step.ratio), -math.log(accept.ratio)
    halves = (("the step time (kernels)", step), ("the accept length (drafts)", accept))
    moved = [f"{half} {found.verdict}" for half, found in halves if found.verdict in MOVED]
    if not moved and tpot.verdict in MOVED:
        moved = [f"TPOT {tpot.verdict}, neither half did: the scheduler or the host"]
    return Decomposition(
        step=through_step,
        accept=through_accept,
        rest=math.log(tpot.ratio) - through_step - through_accept,
        cause="; ".join(moved),
    )
