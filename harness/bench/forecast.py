"""Upper bounds on the cost of a benchmark before it starts: launches, trials, minutes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from harness.bench.analysis import findings
from harness.bench.arms import Arm
from harness.bench.block_runner import open_sessions
from harness.bench.plan import Setup, has_metric
from harness.bench.session_records import Line, Role, Session, Workload
from harness.bench.sizing import PASSES

LAUNCH_S = 5.0
"""Per launch of a small model, where several are launched side by side."""
TRIAL_S = 0.2
"""Flush and monitoring of a trial."""
PROGRAM_S = 10.0
"""Start of ``sglang.bench_serving``; nobody knows before how long its requests take."""
TOKEN_S = {"embedded": 0.01, "sglang": 0.002, "url": 0.002}
"""TPOT of a shipped pair by the kind of an arm: on two cores and on an H200."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Costs where no case is decided early and no block is dropped.

    Args:
        launches: of servers, those of the rehearsal too.
        trials: likewise.
        seconds: of all, as far as ``LAUNCH_S``, ``TRIAL_S`` and ``TOKEN_S`` hold.
    """

    launches: int
    trials: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"at most {self.launches} launches and {self.trials} trials, about "
            f"{duration(self.seconds)}"
        )


def forecast(setup: Setup, begun: Sequence[Line] = ()) -> Forecast:
    """The most that a setup can take; an attached server is not launched.

    Args:
        setup: the options.
        begun: lines of the run that is resumed: its plan needs no rehearsal, and of its sessions
            what is left counts.
    """
    launches, trials, seconds = 0, 0, 0.0
    places, servers = len(setup.design.orders[0]) // 2, setup.design.launches // 2
    shares: list[tuple[Arm, Sequence[Workload], int, int, int]] = []
    left: list[tuple[Role, Sequence[Workload], int]]
    plans = [line for line in begun if isinstance(line, Session)]
    passes = plans[0].passes if plans else setup.passes or max(PASSES)
    if plans:
        open_ = open_sessions(plans, findings(begun, detectable_too=False))
        left = [(one.session.role, one.workloads, one.left) for one in open_]
    else:
        left = [(role, setup.workloads, blocks(setup, role)) for role in setup.roles]
        trials_passes = setup.rehearsed_trials, setup.rehearsed_passes
        shares = [(arm, setup.workloads, 1, *trials_passes) for arm in setup.rehearsed]
    shared = 0
    for role, workloads, most in left:
        for letter, arm in setup.arms(role).items():
            started = most * servers
            if letter == "A" and setup.design.shares_launches:
                started, shared = max(0, started - shared), max(started, shared)
            shares.append((arm, workloads, started, most * places, passes))
    for arm, workloads, started, slots, of_each in shares:
        own = [w for w in workloads if w.bench_serving is None]
        tokens = sum(w.requests // w.batch_size * w.output_len for w in own)
        programs = (len(workloads) - len(own)) * PROGRAM_S
        sent = started * setup.warm_ups + slots * of_each
        launched = 0 if arm.kind == "url" else started
        measured = slots * len(workloads)
        launches += launched
        trials += measured
        one_pass = programs + tokens * TOKEN_S[arm.kind]
        seconds += launched * LAUNCH_S + measured * TRIAL_S + sent * one_pass
    return Forecast(launches=launches, trials=trials, seconds=seconds)


def blocks(setup: Setup, role: Role) -> int:
    """The most valid blocks of a session: those of the case that may take the most."""
    allowed = [m.n_max for m in setup.margins if has_metric(role, m)]
    return setup.blocks_at_most or max(allowed, default=0)


def duration(seconds: float) -> str:
    """Such as "40 s", "25 min" or "3 h 20 min"."""
    minutes = ceil(seconds / 60)
    if seconds < 60:
        return f"{ceil(seconds)} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
