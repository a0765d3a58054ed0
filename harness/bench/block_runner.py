"""Measurement of a benchmark: blocks of every session, launched and measured side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
Launched = tuple[str, Server]
"""A launch's name in the records, and its server."""


@dataclass(frozen=True, kw_only=True)
class BlockTask:
    """A block to measure.

    Args:
        session, index: its plan, and its place there.
        workloads: that are measured.
        turn: which of the session's next blocks it is, from 0.
    """

    session: Session
    index: int
    workloads: Sequence[Workload]
    turn: int

    def launch(self, place: int, letter: str) -> str:
        """The server that a trial needs, such as "candidate-3-A"."""
        own = letter if self.session.design.shares_launches else f"{place}{letter}"
        return f"{self.session.role.name.lower()}-{self.index}-{own}"

    def shared(self, place: int, letter: str) -> str:
        """The same, but one for the reference of all blocks of a turn: sessions have one arm A."""
        is_shared = letter == "A" and self.session.design.shares_launches
        return f"reference-{self.turn}" if is_shared else self.launch(place, letter)

    @property
    def order(self) -> str:
        """Of the arms, as drawn."""
        return draw_order(self.session.seed, self.index, self.session.design)


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
            a block is always measured as a whole. Blocks that are measured together share the
            launches of the reference where the design has one of each arm.
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
            for wave in self._waves(self._tasks(still_open)):
                self._measure_side_by_side(wave)
            longest = max(longest, time.monotonic() - start)
            found = findings(self.lines, detectable_too=False)
            self.observer.blocks_done(found)
        return findings(self.lines)

    def _tasks(self, still_open: Sequence[OpenSession]) -> list[BlockTask]:
        """The next blocks: every session's next one, then every session's second next."""
        servers = still_open[0].session.design.servers(len(still_open))
        ahead = max(1, self.side_by_side // servers)
        by_session = [self._next(one, min(ahead, one.left)) for one in still_open]
        return [task for tasks in zip_longest(*by_session) for task in tasks if task]

    def _waves(self, tasks: Sequence[BlockTask]) -> Iterator[list[BlockTask]]:
        """Blocks that are measured together: as many as there may be servers, one at least."""
        wave: list[BlockTask] = []
        for task in tasks:
            if wave and len(_servers([*wave, task])) > self.side_by_side:
                yield wave
                wave = []
            wave.append(task)
        yield wave

    def _measure_side_by_side(self, tasks: Sequence[BlockTask]) -> None:
        """Measure blocks together, one workload after the other.

        A GPU shows the power cap of a load for some tenths of a second after it, so that blocks
        whose first trial follows another workload's may have to be dropped.
        """
        with stopped_together() as started:
            launched: dict[str, Launched] = {}
            servers = [self._launch(task, started, launched) for task in tasks]
            wait_together(started)
            for workload in tasks[0].session.workloads:
                for task, by_place in zip(tasks, servers, strict=True):
                    for slot, arm, server in by_place if workload in task.workloads else ():
                        self._add(self.measure(slot, arm, server, workload))

    def _launch(
        self, task: BlockTask, started: Started, launched: dict[str, Launched]
    ) -> list[tuple[TrialSlot, Arm, Server]]:
        """Start the servers of a block that are not yet; slot, arm and server by place."""
        session, by_place = task.session, []
        for place, letter in enumerate(task.order):
            arm, shared = self.arms[session.role][letter], task.shared(place, letter)
            if shared not in launched:
                launch = task.launch(place, letter)
                launched[shared] = launch, arm.start(self.logs / f"{launch}.log")
                started[arm.spec].append(launched[shared][1])
            launch, server = launched[shared]
            slot = TrialSlot(
                session=session.id, block=task.index, place=place, arm=letter, launch=launch
            )
            by_place.append((slot, arm, server))
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
                session=session,
                index=first + turn,
                workloads=[w for w in one.workloads if done[w] <= first + turn],
                turn=turn,
            )
            for turn in range(ahead)
        ]

    def _add(self, trial: Trial) -> None:
        append(self.out, trial)
        self.lines.append(trial)
        self.observer.trial_done(trial)


def _servers(tasks: Sequence[BlockTask]) -> set[str]:
    return {task.shared(n, letter) for task in tasks for n, letter in enumerate(task.order)}
