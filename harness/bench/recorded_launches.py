"""Recorded launches of equal arms, by kind of machine, host and workload."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from statistics import median

import numpy as np

from harness.bench.analysis_blocks import blocks_of, complete, split
from harness.bench.session_records import ArmFacts, CasePlan, Line, Role, Session, Trial
from harness.bench.sizing import METRIC
from harness.bench.stats.e_process import Array
from harness.bench.stats.margin import Bounds, Margin
from harness.bench.stats.multiple_testing import family_thresholds
from harness.bench.stats.stopping import Thresholds
from harness.errors import UsageError, rejected

LEAST_LAUNCHES = 8
"""Of a host and workload: fewer say too little about the next one."""
WAVE_S = 1.0
"""Shortest gap between two blocks in which servers were started."""


@dataclass(frozen=True, kw_only=True)
class WorkloadLaunches:
    """Launches of one host that ran a workload.

    Args:
        logs: log step times, [launches, trials].
        seconds: of the trials, likewise; of a first one with its warm-up.
    """

    logs: Array
    seconds: Array


@dataclass(frozen=True, kw_only=True)
class HostLaunches:
    """Launches of one host.

    Args:
        workloads: in the plan's order.
        start_s: seconds that the servers of a block take to start.
    """

    workloads: Sequence[WorkloadLaunches]
    start_s: float


@dataclass(frozen=True, kw_only=True)
class RecordedLaunches:
    """Launches of equal arms on machines of one kind.

    Args:
        device: that kind.
        arm: their name.
        plan: one of the sessions; all have its design, passes and workloads.
        cases: of the step time, by workload in order.
        hosts: by name.
    """

    device: str
    arm: str
    plan: Session
    cases: Sequence[CasePlan]
    hosts: Mapping[str, HostLaunches]

    @property
    def thresholds(self) -> Thresholds:
        """Of a candidate's session with these cases; parts of a step count in no family."""
        return family_thresholds(sum(not case.margin.is_part for case in self.plan.cases))

    def launches(self, workload: int) -> int:
        """Of all hosts."""
        return sum(len(host.workloads[workload].logs) for host in self.hosts.values())

    def bounds(self, margin: Margin) -> list[Bounds]:
        """Of every workload, at its level."""
        made = []
        for place in range(len(self.cases)):
            logs = [host.workloads[place].logs.ravel() for host in self.hosts.values()]
            level = math.exp(float(np.median(np.concatenate(logs))))
            made.append(margin.bounds(level, margin.n_max))
        return made


def recorded_launches(
    files: Iterable[tuple[str, Sequence[Line]]], arm: str | None = None
) -> list[RecordedLaunches]:
    """The launches of one arm, by kind of machine.

    Args:
        files: host and lines of each; a host may have several.
        arm: its name; the reference of the first session if None. Launches with an injected
            slowdown never count.

    Raises:
        UsageError: sessions of one kind differ in design, passes or workloads, no step time was
            recorded, or a host has fewer than ``LEAST_LAUNCHES``.
    """
    by_device: dict[str, dict[str, list[Sequence[Line]]]] = defaultdict(lambda: defaultdict(list))
    for host, lines in files:
        sessions = split(lines)[0]
        if not sessions:
            raise UsageError(rejected(f"records of {host}", "no session", "one or more"))
        by_device[sessions[0].environment.device][host].append(lines)
    return [_of_a_device(device, hosts, arm) for device, hosts in by_device.items()]


def _of_a_device(
    device: str, hosts: Mapping[str, Sequence[Sequence[Line]]], arm: str | None
) -> RecordedLaunches:
    sessions = [one for files in hosts.values() for lines in files for one in split(lines)[0]]
    # An injected session has fewer cases.
    plan = max(sessions, key=lambda one: len(one.cases))
    facts = _facts(sessions, arm)
    cases = tuple(case for case in plan.cases if case.metric == METRIC)
    if not cases:
        raise UsageError(rejected("measured metrics", [c.metric for c in plan.cases], METRIC))
    for one in sessions:
        for name in ("design", "passes", "workloads"):
            if getattr(one, name) != getattr(plan, name):
                accepted = f"{getattr(plan, name)!r}, as of session {plan.id}"
                raise UsageError(
                    rejected(f"{name} of session {one.id}", getattr(one, name), accepted)
                )
    made = {host: _of_a_host(files, cases, facts) for host, files in hosts.items()}
    for host, launches in made.items():
        for case, row in zip(cases, launches.workloads, strict=True):
            if len(row.logs) < LEAST_LAUNCHES:
                field = f"launches of {case.workload} in {host}"
                accepted = f"{LEAST_LAUNCHES} or more of {facts.name}"
                raise UsageError(rejected(field, len(row.logs), accepted))
    return RecordedLaunches(device=device, arm=facts.name, plan=plan, cases=cases, hosts=made)


def _facts(sessions: Sequence[Session], arm: str | None) -> ArmFacts:
    sides = [side for one in sessions for side in (one.a, one.b)]
    for side in sides:
        if arm in (None, side.name):
            return side
    names = ", ".join(dict.fromkeys(side.name for side in sides))
    raise UsageError(rejected("arm", arm, names))


def _of_a_host(
    files: Sequence[Sequence[Line]], cases: Sequence[CasePlan], facts: ArmFacts
) -> HostLaunches:
    found: list[list[list[Trial]]] = [[] for _ in cases]
    starts: list[float] = []
    for lines in files:
        sessions, trials = split(lines)
        seen: set[tuple[str, str]] = set()
        starts.append(_start_s([trial for row in trials.values() for trial in row]))
        for session in sessions:
            for case, mine in zip(cases, found, strict=True):
                for row in _launches(session, trials[session.id, case.workload], case, facts):
                    shared = case.workload, row[0].launch
                    if not row[0].launch or shared not in seen:  # sessions may share a launch
                        mine.append(row)
                        seen.add(shared)
    return HostLaunches(
        workloads=[
            WorkloadLaunches(
                logs=np.log([[trial.metrics[METRIC] for trial in row] for row in rows]),
                seconds=np.array([[trial.seconds for trial in row] for row in rows]),
            )
            for rows in found
        ],
        start_s=median(starts),
    )


def _launches(
    session: Session, trials: Sequence[Trial], case: CasePlan, facts: ArmFacts
) -> Iterator[list[Trial]]:
    """Trials of each launch of the arm in a valid block, in run order."""
    sides = {"A": session.a} | ({} if session.role is Role.INJECTED else {"B": session.b})
    chosen = [
        letter
        for letter, side in sides.items()
        if (side.name, side.versions) == (facts.name, facts.versions)
    ]
    rows = complete(session, trials)
    each = len(session.design.orders[0]) // session.design.launches
    for block in blocks_of(session, trials, case):
        for letter in chosen if not block.invalid else ():
            mine = [trial for trial in rows[block.index] if trial.arm == letter]
            yield from (mine[n : n + each] for n in range(0, len(mine), each))


def _start_s(trials: Sequence[Trial]) -> float:
    """Seconds before a block in which its servers started: those between the trials of two waves.

    A run that was resumed has one long gap more; each gap counts as the median one.
    """
    spans: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for trial in trials:
        began = _clock(trial)
        spans[trial.session, trial.block].append((began, began + trial.seconds))
    blocks = sorted((min(b for b, _ in row), max(e for _, e in row)) for row in spans.values())
    gaps = [begins - ended for (_, ended), (begins, _) in pairwise(blocks)]
    gaps = [gap for gap in gaps if gap > WAVE_S]
    return median(gaps) * (len(gaps) + 1) / len(blocks) if gaps else 0.0


def _clock(trial: Trial) -> float:
    try:
        return datetime.fromisoformat(trial.started).timestamp()
    except ValueError as error:
        raise UsageError(rejected("started", trial.started, "a time, ISO 8601")) from error
