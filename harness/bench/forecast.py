"""What a setup costs at most, before anything is started: launches, trials, minutes."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from harness.bench.analysis import SLOWED
from harness.bench.metrics import NAMES
from harness.bench.plan import Setup
from harness.bench.session_records import Role

LAUNCH_S = 5.0
"""Side by side, of a small model: what a wave of launches takes, divided by its launches."""
TRIAL_S = 0.2
"""Flush and probe of a trial."""
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


def forecast(setup: Setup) -> Forecast:
    """The most that a setup can take; an attached server is not launched."""
    launches, trials, seconds = 0, 0, 0.0
    places, servers = len(setup.design.orders[0]) // 2, setup.design.launches // 2
    # Arm by arm: of the rehearsal one launch and one trial a workload, then of every block.
    shares = [(arm, 1, 1) for arm in setup.arms(setup.roles[0]).values()]
    for role in setup.roles:
        most = blocks(setup, role)
        shares += [(arm, most * servers, most * places) for arm in setup.arms(role).values()]
    for arm, started, turns in shares:
        tokens = sum(w.requests // w.batch_size * w.output_len for w in setup.workloads)
        passes = started * setup.warm_ups + turns * setup.passes
        launched = 0 if arm.kind == "url" else started
        measured = turns * len(setup.workloads)
        launches += launched
        trials += measured
        seconds += launched * LAUNCH_S + measured * TRIAL_S + passes * tokens * TOKEN_S[arm.kind]
    return Forecast(launches=launches, trials=trials, seconds=seconds)


def blocks(setup: Setup, role: Role) -> int:
    """The most valid blocks of a session: those of the case that may take the most."""
    asked = SLOWED if role is Role.INJECTED else NAMES
    allowed = [m.n_max_nightly or 0 for m in setup.margins if m.gates and m.metric in asked]
    return setup.blocks_at_most or max(allowed, default=0)


def duration(seconds: float) -> str:
    """Such as "40 s", "25 min" or "3 h 20 min"."""
    minutes = ceil(seconds / 60)
    if seconds < 60:
        return f"{ceil(seconds)} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
