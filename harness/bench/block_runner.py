"""Measurement of a benchmark: blocks of every session, launched and measured side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Protocol

from harness.bench.analysis import Finding, findings
from harness.bench.analysis_blocks import complete
from harness.bench.arms import Arm
from harness.bench.jsonl import append
from harness.bench.measure import TrialSlot
from harness.bench.server_pool import Server, Started, stopped_together, wait_together
from harness.bench.session_records import Line, Role, Session, Trial, Workload
from harness.bench.stats.bench_verdict import BenchVerdict
from harness.bench.stats.design import draw_order

SIDE_BY_SIDE = 12
"""Servers that run at a time."""
Measure = Callable[[TrialSlot, Arm, Server, Workload], Trial]


@dataclass(frozen=True, kw_only=True)
class BlockTask:
    """A block to measure, and on which workloads."""

    session: Session
    index: int
    workloads: Sequence[Workload]


@dataclass(frozen=True, kw_only=True)
class OpenSession:
    """A session with undecided cases: their workloads, and the most blocks still to measure."""

    session: Session
    workloads: Sequence[Workload]
    left: int


def open_sessions(sessions: Sequence[Session], found: Sequence[Finding]) -> list[OpenSession]:
    """Sessions with undecided cases, and the workloads of these.

    An injected slowdown that one metric of a workload shows need not be shown by another, and
    nobody waits for a part of a step.
    """
    still_open = []
    for session in sessions:
        mine = [f for f in found if f.session.id == session.id and not f.is_part]
        shown = {f.workload.id for f in mine if f.verdict is BenchVerdict.REGRESSED}
        enough = shown if session.role is Role.INJECTED else set()
        undecided = [f for f in mine if not f.evidence.over and f.workload.id not in enough]
        ids = {f.workload.id for f in undecided}
        if undecided:
            still_open.append(
                OpenSession(
                    session=session,
                    workloads=[w for w in session.workloads if w.id in ids],
                    left=max(f.case.bounds.n_max - f.evidence.blocks for f in undecided),
                )
            )
    return still_open


class RunObserver(Protocol):
    """Receiver of the progress of a run."""

    def trial_done(self, trial: Trial) -> None:
        """A trial ended."""

    def blocks_done(self, found: Sequence[Finding]) -> None:
        """Blocks of every open session ended; these are the findings so far."""


@dataclass(kw_only=True)
class BlockRunner:
    """A benchmark under way.

    Args:
        sessions: their plans.
        arms: of every role, by letter.
        out: file that lines are added to; it holds the plans.
        logs: folder of the servers' logs.
        measure: makes a trial.
        observer: is told of trials and findings.
        lines: those of the file.
        seconds: no blocks are begun that would end later, judged by the longest round before.
        side_by_side: servers that run at a time, as many blocks of every session as that allows;
            a block is always measured as a whole.
    """

    sessions: Sequence[Session]
    arms: Mapping[Role, Mapping[str, Arm]]
    out: Path
    logs: Path
    measure: Measure
    observer: RunObserver
    lines: list[Line] = field(default_factory=list)
    seconds: float = float("inf")
    side_by_side: int = SIDE_BY_SIDE

    def run(self) -> list[Finding]:
        """Measure until every case is decided, or the time is up; the findings then."""
        began, longest = time.monotonic(), 0.0
        found = findings(self.lines, detectable_too=False)
        while still_open := open_sessions(self.sessions, found):
            start = time.monotonic()
            if start - began + longest > self.seconds:
                break
            tasks, at_once = self._tasks(still_open), self._blocks_at_once(still_open)
            for first in range(0, len(tasks), at_once):
                self._measure_side_by_side(tasks[first : first + at_once])
            longest = max(longest, time.monotonic() - start)
            found = findings(self.lines, detectable_too=False)
            self.observer.blocks_done(found)
        return findings(self.lines)

    def _blocks_at_once(self, still_open: Sequence[OpenSession]) -> int:
        return max(1, self.side_by_side // still_open[0].session.design.launches)

    def _tasks(self, still_open: Sequence[OpenSession]) -> list[BlockTask]:
        """The next blocks: every session's next one, then every session's second next."""
        ahead = max(1, self._blocks_at_once(still_open) // len(still_open))
        by_session = [self._next(one, min(ahead, one.left)) for one in still_open]
        return [task for tasks in zip_longest(*by_session) for task in tasks if task]

    def _measure_side_by_side(self, tasks: Sequence[BlockTask]) -> None:
        with stopped_together() as started:
            servers = [self._launch(task, started) for task in tasks]
            wait_together(started)
            for task, by_place in zip(tasks, servers, strict=True):
                for workload in task.workloads:
                    for slot, arm, server in by_place:
                        self._add(self.measure(slot, arm, server, workload))

    def _launch(self, task: BlockTask, started: Started) -> list[tuple[TrialSlot, Arm, Server]]:
        """Start the servers of a block; slot, arm and server of each trial, in run order."""
        session, by_place = task.session, []
        launched: dict[str, Server] = {}
        order = draw_order(session.seed, task.index, session.design)
        for place, letter in enumerate(order):
            arm = self.arms[session.role][letter]
            name = letter if session.design.launches < len(order) else f"{place}{letter}"
            if name not in launched:
                log = f"{session.role.name.lower()}-{task.index}-{name}.log"
                launched[name] = arm.start(self.logs / log)
                started[arm.spec].append(launched[name])
            slot = TrialSlot(session=session.id, block=task.index, place=place, arm=letter)
            by_place.append((slot, arm, launched[name]))
        return by_place

    def _next(self, one: OpenSession, ahead: int) -> list[BlockTask]:
        """The next blocks; an interruption may have ended between a block's workloads."""
        session = one.session
        mine = [t for t in self.lines if isinstance(t, Trial) and t.session == session.id]
        done = {
            workload: len(complete(session, [t for t in mine if t.workload == workload.id]))
            for workload in one.workloads
        }
        first = min(done.values())
        return [
            BlockTask(
                session=session, index=i, workloads=[w for w in one.workloads if done[w] <= i]
            )
            for i in range(first, first + ahead)
        ]

    def _add(self, trial: Trial) -> None:
        append(self.out, trial)
        self.lines.append(trial)
        self.observer.trial_done(trial)
