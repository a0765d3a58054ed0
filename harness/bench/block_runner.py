"""Waves: the next blocks of every session, launched side by side, measured one after the other."""

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
"""Servers that are up at a time."""
Measure = Callable[[TrialSlot, Arm, Server, Workload], Trial]


@dataclass(frozen=True, kw_only=True)
class BlockTask:
    """A block that is to be measured, and what is measured in it."""

    session: Session
    index: int
    workloads: Sequence[Workload]


@dataclass(frozen=True, kw_only=True)
class OpenSession:
    """A session of which something is undecided: on which workloads, within how many blocks."""

    session: Session
    workloads: Sequence[Workload]
    left: int


class RunObserver(Protocol):
    """Who is told how it goes."""

    def trial(self, trial: Trial) -> None:
        """A trial ended."""

    def wave(self, found: Sequence[Finding]) -> None:
        """A wave ended; this is what is known."""


@dataclass(kw_only=True)
class BlockRunner:
    """A benchmark under way.

    Args:
        sessions: their plans.
        arms: of every role, by letter.
        out: file that lines are added to; the plans are in it.
        logs: folder of the servers' logs.
        measure: makes a trial.
        watch: who is told.
        lines: what the file holds.
        seconds: no wave is begun that would end later, judged by the longest before it.
        side_by_side: servers up at a time, as many blocks of every session as that holds; the block
            of a session is never torn apart.
    """

    sessions: Sequence[Session]
    arms: Mapping[Role, Mapping[str, Arm]]
    out: Path
    logs: Path
    measure: Measure
    watch: RunObserver
    lines: list[Line] = field(default_factory=list)
    seconds: float = float("inf")
    side_by_side: int = SIDE_BY_SIDE

    def run(self) -> list[Finding]:
        """Measure until everything is decided, or the time is up.

        Returns:
            What is known then.
        """
        began, longest = time.monotonic(), 0.0
        found = findings(self.lines, detectable_too=False)
        while open_session := self._due(found):
            start = time.monotonic()
            if start - began + longest > self.seconds:
                break
            turns, at_once = self._turns(open_session), self._at_once(open_session)
            for first in range(0, len(turns), at_once):
                self._wave(turns[first : first + at_once])
            longest = max(longest, time.monotonic() - start)
            found = findings(self.lines, detectable_too=False)
            self.watch.wave(found)
        return findings(self.lines)

    def _due(self, found: Sequence[Finding]) -> list[OpenSession]:
        """Sessions with workloads of which something is undecided.

        A planted slowdown that was shown by one metric need not be shown by another.
        """
        open_session = []
        for session in self.sessions:
            mine = [f for f in found if f.session.id == session.id]
            shown = {f.workload.id for f in mine if f.verdict is BenchVerdict.REGRESSED}
            enough = shown if session.role is Role.INJECTED else set()
            open_ = [f for f in mine if not f.evidence.over and f.workload.id not in enough]
            undecided = {f.workload.id for f in open_}
            if open_:
                open_session.append(
                    OpenSession(
                        session=session,
                        workloads=[w for w in session.workloads if w.id in undecided],
                        left=max(f.case.bounds.n_max - f.evidence.blocks for f in open_),
                    )
                )
        return open_session

    def _at_once(self, open_session: Sequence[OpenSession]) -> int:
        return max(1, self.side_by_side // open_session[0].session.design.launches)

    def _turns(self, open_session: Sequence[OpenSession]) -> list[BlockTask]:
        """The blocks of a round: every session's next one, then every session's second next."""
        ahead = max(1, self._at_once(open_session) // len(open_session))
        by_session = [self._next(one, min(ahead, one.left)) for one in open_session]
        return [turn for turns in zip_longest(*by_session) for turn in turns if turn]

    def _wave(self, turns: Sequence[BlockTask]) -> None:
        with stopped_together() as started:
            servers = [self._launch(turn, started) for turn in turns]
            wait_together(started)
            for turn, by_place in zip(turns, servers, strict=True):
                for workload in turn.workloads:
                    for slot, arm, server in by_place:
                        self._add(self.measure(slot, arm, server, workload))

    def _launch(self, turn: BlockTask, started: Started) -> list[tuple[TrialSlot, Arm, Server]]:
        """Start what a block needs; who measures where, in run order."""
        session, by_place = turn.session, []
        launched: dict[str, Server] = {}
        order = draw_order(session.seed, turn.index, session.design)
        for place, letter in enumerate(order):
            arm = self.arms[session.role][letter]
            name = letter if session.design.launches < len(order) else f"{place}{letter}"
            if name not in launched:
                log = f"{session.role.name.lower()}-{turn.index}-{name}.log"
                launched[name] = arm.start(self.logs / log)
                started[arm.spec].append(launched[name])
            slot = TrialSlot(session=session.id, block=turn.index, place=place, arm=letter)
            by_place.append((slot, arm, launched[name]))
        return by_place

    def _next(self, open_session: OpenSession, ahead: int) -> list[BlockTask]:
        """The next blocks; an interruption may have split a block's workloads."""
        session, workloads = open_session.session, open_session.workloads
        mine = [t for t in self.lines if isinstance(t, Trial) and t.session == session.id]
        done = {
            workload: len(complete(session, [t for t in mine if t.workload == workload.id]))
            for workload in workloads
        }
        first = min(done.values())
        return [
            BlockTask(session=session, index=i, workloads=[w for w in workloads if done[w] <= i])
            for i in range(first, first + ahead)
        ]

    def _add(self, trial: Trial) -> None:
        append(self.out, trial)
        self.lines.append(trial)
        self.watch.trial(trial)
