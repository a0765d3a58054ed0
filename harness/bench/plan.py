"""The plan of a benchmark: sessions, and margins at the levels of the rehearsal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from harness.bench.analysis import LEAST_AA_BLOCKS, SLOWED, Finding
from harness.bench.arms import MOST_SLOWDOWN, Arm
from harness.bench.session_records import CasePlan, Role, Session, Workload
from harness.bench.stats.design import Design
from harness.bench.stats.e_process import DEFAULT_SCALE
from harness.bench.stats.estimates import spread
from harness.bench.stats.margin import Margin
from harness.bench.stats.multiple_testing import control_thresholds, family_thresholds
from harness.core.record import Environment
from harness.errors import UsageError, rejected

Levels = Mapping[tuple[str, str], float]
"""A number by (workload, metric)."""
SLOWDOWN = 0.05
"""Of the injected control."""
WARM_UPS = 2
PASSES_PER_TRIAL = 3
SIZED_LAUNCHES, SIZED_TRIALS = 2, 6
"""Of every arm, and of every workload on each, where a rehearsal measures the noise."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The options of a benchmark.

    Args:
        a, b: the arms.
        workloads: in the order of measurement.
        margins: rows of every metric.
        roles: the sessions.
        seed, design: of the randomised orders; every session draws its own.
        warm_ups, passes: see ``TrialMaker``; no passes where the rehearsal chooses them.
        sized: whether the rehearsal measures the noise, and what it would take.
        blocks_at_most: of every case, None for the maximum of its margin.
        slowdown: of the injected control.
        scales: of A/A effects by (workload, metric), from an earlier run on this machine.
    """

    a: Arm
    b: Arm
    workloads: tuple[Workload, ...]
    margins: tuple[Margin, ...]
    roles: tuple[Role, ...]
    seed: str
    design: Design
    warm_ups: int = WARM_UPS
    passes: int | None = PASSES_PER_TRIAL
    sized: bool = False
    blocks_at_most: int | None = None
    slowdown: float = SLOWDOWN
    scales: Levels = field(default_factory=dict)

    def __post_init__(self) -> None:
        for w in self.workloads:
            if w.bench_serving is not None:
                continue
            least = min(w.batch_size, w.input_len, w.requests, w.output_len - 1)
            if least < 1 or w.requests % w.batch_size:
                accepted = "at least 1, 2 output tokens, whole batches"
                raise UsageError(rejected("workload", w, accepted))
        for name, asked in (("workloads", self.workload_ids), ("sessions", self.roles)):
            if not asked or len({*asked}) < len(asked):
                raise UsageError(rejected(name, ",".join(asked), "one or more, each once"))
        if self.blocks_at_most is not None and self.blocks_at_most < 1:
            raise UsageError(rejected("blocks_at_most", self.blocks_at_most, "1 or more"))
        if not 0.0 < self.slowdown <= MOST_SLOWDOWN:
            accepted = f"above 0, at most {MOST_SLOWDOWN:g}, 0.05 is 5 %"
            raise UsageError(rejected("injected", self.slowdown, accepted))

    @property
    def workload_ids(self) -> tuple[str, ...]:
        """Of the workloads, in order."""
        return tuple(workload.id for workload in self.workloads)

    @property
    def rehearsed(self) -> tuple[Arm, ...]:
        """Arms that the rehearsal launches, A and B in turn; of equal arms one launch each."""
        other = self.b if Role.CANDIDATE in self.roles else self.a
        again = self.sized and other.spec != self.a.spec
        return (self.a, other) * (SIZED_LAUNCHES if again else 1)

    @property
    def rehearsed_trials(self) -> int:
        """Of every workload on every launch of the rehearsal."""
        return SIZED_TRIALS if self.sized else 1

    @property
    def rehearsed_passes(self) -> int:
        """Of each of these trials."""
        return 1 if self.sized or self.passes is None else self.passes

    def arms(self, role: Role) -> dict[str, Arm]:
        """The arms of a session by letter."""
        other = {
            Role.CANDIDATE: self.b,
            Role.SAME: self.a,
            Role.INJECTED: self.a.slowed(self.slowdown),
        }
        return {"A": self.a, "B": other[role]}


def sessions(setup: Setup, levels: Levels, environment: Environment) -> list[Session]:
    """The plan of every session.

    Args:
        setup: the options; without passes each trial has one, until they are chosen.
        levels: of the reference arm; a missing metric was not measured on both arms, and gets no
            verdict. Nor does one whose floor hides too much at its level.
        environment: the machine.

    Raises:
        UsageError: no measured metric has a margin.
    """
    gated = [
        (workload, margin)
        for workload in setup.workloads
        for margin in setup.margins
        if (level := levels.get((workload.id, margin.metric))) and margin.is_judged(level)
    ]
    family = sum(not margin.is_part for _, margin in gated)
    if not family:
        raise UsageError(rejected("measured metrics", sorted(levels), "one of the margins table"))
    fixed = _fixed(setup)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    return [
        Session(
            id=role.value,
            role=role,
            **fixed[role],
            thresholds=(control_thresholds if role is Role.SAME else family_thresholds)(family),
            cases=tuple(_case(setup, *row, levels) for row in gated if has_metric(role, row[1])),
            started=started,
            environment=environment,
        )
        for role in setup.roles
    ]


def _fixed(setup: Setup) -> dict[Role, dict[str, Any]]:
    """Fields of every session that follow from the setup; facts of an arm are looked up once."""
    arms = {role: setup.arms(role) for role in setup.roles}
    facts = {arm.spec: arm.facts() for sides in arms.values() for arm in sides.values()}
    return {
        role: {
            "a": facts[sides["A"].spec],
            "b": facts[sides["B"].spec],
            "seed": f"{setup.seed}/{role}",
            "design": setup.design,
            "workloads": setup.workloads,
            "warm_ups": setup.warm_ups,
            "passes": setup.passes or 1,
        }
        for role, sides in arms.items()
    }


def has_metric(role: Role, margin: Margin) -> bool:
    """Whether a session has the metric: the injected slowdown is judged where it must show."""
    return role is not Role.INJECTED or margin.metric in SLOWED


def _case(setup: Setup, workload: Workload, margin: Margin, levels: Levels) -> CasePlan:
    most = setup.blocks_at_most or margin.n_max
    return CasePlan(
        workload=workload.id,
        metric=margin.metric,
        bounds=margin.bounds(levels[workload.id, margin.metric], most),
        calibrated=setup.scales.get((workload.id, margin.metric), DEFAULT_SCALE),
        unit=margin.unit,
        higher_is_better=margin.higher_is_better,
    )


def scales(found: Sequence[Finding]) -> dict[tuple[str, str], float]:
    """Scales of A/A effects, where an earlier run has enough of them."""
    return {
        (f.workload.id, f.metric): spread(f.effects)
        for f in found
        if f.role is Role.SAME and len(f.effects) >= LEAST_AA_BLOCKS
    }


def check_resumed(found: Sequence[Session], setup: Setup) -> None:
    """Refuse to resume a plan with other options; passes that nobody asked for stay as begun.

    Levels, and so margins, stay those of the plan: they were known before its first block.

    Raises:
        UsageError: naming what differs.
    """
    if tuple(session.role for session in found) != setup.roles:
        roles = [session.role.value for session in found]
        raise UsageError(rejected("sessions", [r.value for r in setup.roles], f"{roles}, as begun"))
    begun = sorted({case.bounds.n_max for session in found for case in session.cases})
    if setup.blocks_at_most is not None and begun != [setup.blocks_at_most]:
        accepted = f"{', '.join(map(str, begun))}, as begun"
        raise UsageError(rejected("blocks_at_most", setup.blocks_at_most, accepted))
    fixed = _fixed(replace(setup, passes=setup.passes or found[0].passes))
    for session in found:
        for name, value in fixed[session.role].items():
            if value != getattr(session, name):
                accepted = f"{getattr(session, name)!r}, as begun"
                raise UsageError(rejected(f"{name} of session {session.id}", value, accepted))
