"""Passes and blocks that an effect takes, from the noise that a rehearsal measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, median

import numpy as np

from harness.bench.plan import Levels
from harness.bench.session_records import CasePlan, Session, Trial
from harness.bench.stats.design import Design
from harness.bench.stats.e_process import Array
from harness.bench.stats.estimates import POWER, REGRESSED, centre, detectable
from harness.bench.stats.stopping import Thresholds, decide, paths
from harness.bench.wording import size
from harness.errors import UsageError, rejected

METRIC = "step_time"
PASSES = (1, 2, 4)
"""Per trial, to choose from."""
MOST_BLOCKS = 100
"""More are not counted."""
SIMULATED = 500
"""Sessions of normal noise, from which the blocks are counted."""
SHAMOS = 1.0483
"""Standard deviation of normal noise over the median of the differences of all pairs."""
HODGES_LEHMANN = math.pi / 3
"""Variance of the Hodges-Lehmann estimate of normal noise, in units of the mean's."""
QUANTILES = np.array([NormalDist().inv_cdf((n + 0.5) / 400) for n in range(400)])
"""Of normal noise."""


@dataclass(frozen=True, kw_only=True)
class LaunchNoise:
    """Noise of log step times.

    Args:
        within: standard deviation of the passes of a launch.
        between: that of launches, besides what their passes contribute.
    """

    within: float
    between: float

    def of_effect(self, design: Design, passes: int) -> float:
        """Standard deviation of a block's effect, with so many passes per trial."""
        trials, launches = len(design.orders[0]) / 2, design.launches / 2
        # A trial is the median of its passes.
        trial = self.within**2 * math.pi / 2 / (passes + math.pi / 2 - 1)
        return math.sqrt(2 * (self.between**2 / launches + HODGES_LEHMANN * trial / trials))


def launch_noise(arms: Sequence[Array]) -> LaunchNoise:
    """The noise of recorded launches.

    Args:
        arms: log step times of each arm, [launches, trials]; arms may differ.

    Raises:
        UsageError: no arm has two launches, or no launch two trials.
    """
    if max(arm.shape[0] for arm in arms) < 2 or max(arm.shape[1] for arm in arms) < 2:
        shapes = [arm.shape for arm in arms]
        raise UsageError(rejected("launches, trials", shapes, "two launches of an arm, two trials"))
    within = _spread([launch for arm in arms for launch in arm])
    seen = _spread([centre(arm) for arm in arms])
    contributed = HODGES_LEHMANN * within**2 / min(arm.shape[1] for arm in arms)
    return LaunchNoise(within=within, between=math.sqrt(max(0.0, seen**2 - contributed)))


def _spread(groups: Sequence[Array]) -> float:
    """Standard deviation within groups, which differences of pairs tell without their centres."""
    pairs = [np.triu_indices(len(group), 1) for group in groups]
    apart = [np.abs(group[i] - group[j]) for group, (i, j) in zip(groups, pairs, strict=True)]
    return SHAMOS * float(np.median(np.concatenate(apart)))


@dataclass(frozen=True, kw_only=True)
class RehearsedLaunch:
    """A server of the rehearsal: its arm, and its trials of every workload in order."""

    spec: str
    trials: Mapping[str, Sequence[Trial]]


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What a rehearsal measured.

    Args:
        launches: in the order of their starts, the first of arm A.
        launch_s: of a server whose caches are filled, in seconds, beside others.
    """

    launches: Sequence[RehearsedLaunch]
    launch_s: float

    @property
    def levels(self) -> Levels:
        """Medians of arm A, of the metrics that every trial has."""
        alike = [one.trials for one in self.launches if one.spec == self.launches[0].spec]
        return {
            (workload, metric): median(t.metrics[metric] for row in alike for t in row[workload])
            for workload, trials in alike[0].items()
            for metric in trials[0].metrics
            if all(metric in t.metrics for one in self.launches for t in one.trials[workload])
        }

    def noise(self, workload: str) -> LaunchNoise:
        """Of a workload's step time.

        Raises:
            UsageError: too little was measured to tell.
        """
        logs: dict[str, list[list[float]]] = {}
        for one in self.launches:
            row = [math.log(trial.metrics[METRIC]) for trial in one.trials[workload]]
            logs.setdefault(one.spec, []).append(row)
        return launch_noise([np.array(rows) for rows in logs.values()])

    def seconds(self, workload: str, design: Design, passes: int, sessions: int) -> float:
        """Of a workload's part of a block of every session: warm-ups, then the trials."""
        rows = [[trial.seconds for trial in one.trials[workload]] for one in self.launches]
        # The first trial of a launch has the warm-up in it; the first of all compiled kernels, too.
        trial = median(seconds for row in rows for seconds in row[1:])
        warm_up = max(0.0, min(row[0] for row in rows) - trial)
        trials = sessions * len(design.orders[0]) * passes
        return design.servers(sessions) * warm_up + trials * trial


@dataclass(frozen=True, kw_only=True)
class CaseSize:
    """What a case takes.

    Args:
        case: its plan.
        noise: that was measured.
        effect_sd: standard deviation of a block's effect.
        blocks: that find ``delta1`` in 9 sessions of 10; None for more than ``MOST_BLOCKS``.
        seconds: of a block of every session.
        thresholds: of its session.
    """

    case: CasePlan
    noise: LaunchNoise
    effect_sd: float
    blocks: int | None
    seconds: float
    thresholds: Thresholds

    @property
    def suffices(self) -> bool:
        """Whether the plan allows so many."""
        return self.blocks is not None and self.blocks <= self.case.bounds.n_max

    @property
    def measured(self) -> int:
        """Blocks that are measured at most, as far as the noise is known."""
        return self.blocks if self.suffices and self.blocks else self.case.bounds.n_max

    def seen(self, blocks: int) -> float:
        """Effect that so many of the allowed blocks find in 9 sessions of 10, log units."""
        if not blocks:
            return math.inf
        bounds = replace(self.case.bounds, n_max=min(blocks, self.case.bounds.n_max))
        return detectable((self.effect_sd * QUANTILES).tolist(), bounds, self.thresholds)

    @property
    def told(self) -> str:
        """One line: the noise, and what it takes or what would be seen."""
        needed = size(self.case.bounds.delta1)
        within, between = size(self.noise.within, 2), size(self.noise.between, 2)
        if self.suffices:
            found = f"{self.blocks} blocks find {needed}"
        else:
            more = self.blocks or f"more than {MOST_BLOCKS}"
            seen = size(self.seen(self.measured))
            found = f"cannot: {self.measured} blocks would find {seen}, {needed} needs {more}"
        return f"{self.case.workload}: within {within}, between {between}: {found}"


@dataclass(frozen=True, kw_only=True)
class RunSize:
    """Passes per trial, and what the run then takes.

    Args:
        passes: chosen, or those asked for.
        cases: of one session, by workload.
        sessions: how many there are.
        start_s: of the servers of a block of every session.
        left_s: seconds that are left; may be infinite.
    """

    passes: int
    cases: Sequence[CaseSize]
    sessions: int
    start_s: float
    left_s: float

    @property
    def seconds(self) -> float:
        """Of all sessions, as if each took as long as one that finds ``delta1``."""
        starts = max(one.measured for one in self.cases) * self.start_s
        return starts + sum(one.measured * one.seconds for one in self.cases)

    @property
    def blocks(self) -> int:
        """Of each session, at most: those that fit, or those that are measured."""
        each = self.start_s + sum(one.seconds for one in self.cases)
        most = max(one.measured for one in self.cases)
        return most if self.seconds <= self.left_s else int(self.left_s / each)

    @property
    def unseen(self) -> dict[str, float]:
        """Effects that are found, of cases which do not find ``delta1``; by workload."""
        return {
            one.case.workload: one.seen(self.blocks)
            for one in self.cases
            if not (one.blocks and one.suffices and one.blocks <= self.blocks)
        }

    @property
    def cost(self) -> tuple[int, float, float]:
        """Cases that see too little, what these see, seconds: the least is chosen."""
        return len(self.unseen), sum(self.unseen.values()), self.seconds

    @property
    def told(self) -> list[str]:
        """Lines for a person."""
        minutes = f"{self.seconds / 60:.0f} min"
        fits = f"{minutes} in {self.sessions} sessions"
        if self.seconds > self.left_s:
            found = [
                f"{size(effect) if math.isfinite(effect) else 'nothing'} ({workload})"
                for workload, effect in self.unseen.items()
            ]
            fits = (
                f"cannot in the {self.left_s / 60:.0f} min that are left: {self.blocks} blocks of "
                f"each session fit and would find {', '.join(found)}; all take {minutes}; "
                "--resume goes on"
            )
        return [*(one.told for one in self.cases), f"passes per trial {self.passes}: {fits}"]


def run_size(
    sessions: Sequence[Session],
    rehearsal: Rehearsal,
    passes: Sequence[int] = PASSES,
    left_s: float = math.inf,
) -> RunSize:
    """The size at which every case sees its ``delta1``, or the most do, in the least time.

    Args:
        sessions: plans; the first one's cases are asked.
        rehearsal: of these arms and workloads.
        passes: to choose from.
        left_s: seconds for all blocks.

    Raises:
        UsageError: no case is a step time, or the rehearsal has too few launches or trials.
    """
    cases = [case for case in sessions[0].cases if case.metric == METRIC]
    if not cases:
        names = [case.metric for case in sessions[0].cases]
        raise UsageError(rejected("measured metrics", names, f"{METRIC} among them"))
    design, thresholds = sessions[0].design, sessions[0].thresholds
    noise = {case.workload: rehearsal.noise(case.workload) for case in cases}

    def sized(asked: int) -> RunSize:
        sds = {name: one.of_effect(design, asked) for name, one in noise.items()}
        return RunSize(
            passes=asked,
            cases=[
                CaseSize(
                    case=case,
                    noise=noise[case.workload],
                    effect_sd=sds[case.workload],
                    blocks=blocks_needed(sds[case.workload], case, thresholds),
                    seconds=rehearsal.seconds(case.workload, design, asked, len(sessions)),
                    thresholds=thresholds,
                )
                for case in cases
            ],
            sessions=len(sessions),
            start_s=design.servers(len(sessions)) * rehearsal.launch_s,
            left_s=max(0.0, left_s),  # A rehearsal may have taken more.
        )

    return min(map(sized, passes), key=lambda one: one.cost)


def blocks_needed(effect_sd: float, case: CasePlan, thresholds: Thresholds) -> int | None:
    """Blocks after which 9 simulated sessions of 10 show ``delta1``; None of ``MOST_BLOCKS``.

    Their noise is normal, and they are judged as measured ones are.
    """
    noise = np.random.default_rng(0).normal(0.0, effect_sd, (SIMULATED, MOST_BLOCKS))
    codes, used = decide(
        paths(noise + case.bounds.delta1, case.bounds, case.calibrated), thresholds
    )
    after = np.sort(np.where(codes == REGRESSED, used, MOST_BLOCKS + 1))
    blocks = int(after[math.ceil(POWER * SIMULATED) - 1])
    return blocks if blocks <= MOST_BLOCKS else None
