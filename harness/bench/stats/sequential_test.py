"""The sequential test: from the blocks of a case to its evidence and verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from harness.bench.stats.bench_verdict import BenchVerdict
from harness.bench.stats.design import Block, Design, check_session
from harness.bench.stats.e_process import DEFAULT_SCALE, Array
from harness.bench.stats.estimates import hodges_lehmann, interval
from harness.bench.stats.margin import Bounds, Margin
from harness.bench.stats.stopping import VERDICT_CODES, Thresholds, decide, paths

INVALID_SHARE = Fraction(1, 3)
"""Largest part of the blocks that may be invalid."""


@dataclass(frozen=True, kw_only=True)
class SequentialPlan:
    """Everything about a session that is fixed before its first block.

    Args:
        margin: row of the margins table.
        bounds: its bounds, from ``margin.bounds``.
        seed, design: of the randomised orders.
        thresholds: of the family the case belongs to.
        calibrated: scale of A/A effects of this case, log units.
    """

    margin: Margin
    bounds: Bounds
    seed: str
    design: Design
    thresholds: Thresholds = field(default_factory=Thresholds)
    calibrated: float = DEFAULT_SCALE


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the blocks show.

    Args:
        metric: name of the margin's row.
        verdict: INCONCLUSIVE until the session is over.
        over: whether no more blocks are to be measured.
        blocks: valid blocks used, without those after the decision.
        dropped: invalid blocks.
        ratio, low, high: B / A in the metric's own direction, with its 95 % time-uniform interval.
        e_regressed, e_equivalence, e_improved: e-values after the last used block.
        path: (e_regressed, e_equivalence, e_improved) after each used block.
        reasons: why it is INVALID, or what the dropped blocks had.
    """

    metric: str
    verdict: BenchVerdict
    over: bool
    blocks: int
    dropped: int
    ratio: float
    low: float
    high: float
    path: tuple[tuple[float, float, float], ...]
    reasons: tuple[str, ...] = ()

    @property
    def e_regressed(self) -> float:
        """E-value against "at most delta0 slower"; 1 before the first block."""
        return self.path[-1][0] if self.path else 1.0

    @property
    def e_equivalence(self) -> float:
        """E-value against "at least delta1 slower"."""
        return self.path[-1][1] if self.path else 1.0

    @property
    def e_improved(self) -> float:
        """E-value against "at most delta0 faster"."""
        return self.path[-1][2] if self.path else 1.0

    @property
    def e_value(self) -> float:
        """Of the verdict: of an improvement, of equivalence, else of a regression."""
        others = {BenchVerdict.IMPROVED: self.e_improved, BenchVerdict.OK: self.e_equivalence}
        return others.get(self.verdict, self.e_regressed)


def judge(blocks: Sequence[Block], plan: SequentialPlan) -> Evidence:
    """The evidence of the blocks measured so far; called after each until it is ``over``.

    Invalid blocks are dropped whole. Blocks after the decision change nothing.

    Raises:
        ContractError: the blocks are not those of the seed.
        UsageError: a measurement is missing, not finite or not above zero.
    """
    check_session(blocks, plan.seed, plan.design)
    valid = [block for block in blocks if not block.invalid]
    sign = -1.0 if plan.margin.higher_is_better else 1.0
    effects = sign * np.array([block.effect for block in valid], dtype=np.float64)
    verdict, used, path = _look(effects, plan)
    over = verdict is not BenchVerdict.INCONCLUSIVE or used >= plan.bounds.n_max
    if over and used:
        blocks = blocks[: valid[used - 1].index + 1]
    dropped = sum(bool(block.invalid) for block in blocks)
    reasons = tuple(dict.fromkeys(reason for block in blocks for reason in block.invalid))
    # Twice as many valid blocks as invalid ones are needed, and there will be no more than n_max.
    hopeless = dropped > plan.bounds.n_max * INVALID_SHARE / (1 - INVALID_SHARE)
    if hopeless or (over and dropped > INVALID_SHARE * len(blocks)):
        share = f"{dropped} of {len(blocks)} blocks are invalid, more than a third"
        verdict, over, reasons = BenchVerdict.INVALID, True, (share, *reasons)
    elif _clocks_disagree(valid[:used], effects[:used], verdict, sign):
        verdict, reasons = BenchVerdict.INVALID, ("time and cycles disagree on the sign", *reasons)
    centre, low, high = _estimate(effects[:used], plan.calibrated)
    low, high = sorted((plan.margin.ratio(low), plan.margin.ratio(high)))
    return Evidence(
        metric=plan.margin.metric,
        verdict=verdict,
        over=over,
        blocks=used,
        dropped=dropped,
        ratio=plan.margin.ratio(centre),
        low=low,
        high=high,
        path=path,
        reasons=reasons,
    )


def _look(
    effects: Array, plan: SequentialPlan
) -> tuple[BenchVerdict, int, tuple[tuple[float, float, float], ...]]:
    effects = effects[: plan.bounds.n_max]
    if not effects.size:
        return BenchVerdict.INCONCLUSIVE, 0, ()
    found = paths(effects, plan.bounds, plan.calibrated)
    code, used = decide(found, plan.thresholds)
    n = int(used)
    waiting = found.improved[n - 1] > 0.0 and n < plan.bounds.n_max
    verdict = VERDICT_CODES[int(code)]
    if verdict is BenchVerdict.OK and waiting:
        verdict = BenchVerdict.INCONCLUSIVE
    logs = zip(found.regressed[:n], found.accept_equivalence[:n], found.improved[:n], strict=True)
    return verdict, n, tuple((math.exp(r), math.exp(c), math.exp(i)) for r, c, i in logs)


def _estimate(effects: Array, calibrated: float) -> tuple[float, float, float]:
    if not effects.size:
        return 0.0, -math.inf, math.inf
    low, high = interval(list(effects), calibrated)
    return hodges_lehmann(list(effects)), low, high


def _clocks_disagree(
    blocks: Sequence[Block], effects: Array, verdict: BenchVerdict, sign: float
) -> bool:
    """Whether the arms' clocks differ and the effect in time is zero or turned in cycles.

    Asked of the whole session and only to withdraw REGRESSED or IMPROVED: dropping single blocks
    for it would keep those whose drawn order enlarged a small effect. A difference of clocks must
    be shown as an effect is, by six blocks at least: jitter explains nothing.
    """
    clocked = [block for block in blocks if block.mhz]
    if verdict not in (BenchVerdict.REGRESSED, BenchVerdict.IMPROVED) or not clocked:
        return False
    low, high = interval([block.effect_of_clock for block in clocked])
    cycles = sign * hodges_lehmann([block.effect_in_cycles for block in clocked])
    return not low <= 0.0 <= high and cycles * hodges_lehmann(list(effects)) <= 0.0
