"""Waves: the next block of every session, launched side by side, measured one after the other."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from harness.bench.arms import Arm, Server
from harness.bench.blocks import complete
from harness.bench.findings import Finding, findings
from harness.bench.record import Line, Role, Session, Trial, Workload, append
from harness.bench.trial import Seat
from harness.errors import SpecgateError
from harness.evidence.blocks import toss
from harness.evidence.ruling import Ruling

SIDE_BY_SIDE = 12
"""Servers that are up at a time."""
Measure = Callable[[Seat, Arm, Server, Workload], Trial]


class Watch(Protocol):
    """Who is told how it goes."""

    def trial(self, trial: Trial) -> None:
        """A trial ended."""

    def wave(self, found: Sequence[Finding]) -> None:
        """A wave ended; this is what is known."""


@dataclass(kw_only=True)
class Waves:
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
        side_by_side: servers up at a time; the block of a session is never torn apart.
    """

    sessions: Sequence[Session]
    arms: Mapping[Role, Mapping[str, Arm]]
    out: Path
    logs: Path
    measure: Measure
    watch: Watch
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
        while due := self._due(found):
            start = time.monotonic()
            if start - began + longest > self.seconds:
                break
            for group in self._groups(due):
                self._wave(group)
            longest = max(longest, time.monotonic() - start)
            found = findings(self.lines, detectable_too=False)
            self.watch.wave(found)
        return findings(self.lines)

    def _due(self, found: Sequence[Finding]) -> list[tuple[Session, list[Workload]]]:
        """Sessions with workloads of which something is undecided.

        A planted slowdown that was shown by one metric need not be shown by another.
        """
        due = []
        for session in self.sessions:
            here = [f for f in found if f.session.id == session.id]
            undecided = {f.workload.id for f in here if not f.evidence.over}
            if session.role is Role.PLANTED:
                undecided -= {f.workload.id for f in here if f.ruling is Ruling.REGRESSED}
            workloads = [w for w in session.workloads if w.id in undecided]
            if workloads:
                due.append((session, workloads))
        return due

    def _groups(
        self, due: Sequence[tuple[Session, list[Workload]]]
    ) -> Iterator[Sequence[tuple[Session, list[Workload]]]]:
        places = len(due[0][0].design.orders[0])
        at_once = max(1, self.side_by_side // places)
        return (due[start : start + at_once] for start in range(0, len(due), at_once))

    def _wave(self, group: Sequence[tuple[Session, list[Workload]]]) -> None:
        """One launch a place: two trials of an arm in one block share no luck of a launch."""
        with contextlib.ExitStack() as stack:
            ready = []
            for session, workloads in group:
                index, workloads = self._next(session, workloads)
                for place, letter in enumerate(toss(session.seed, index, session.design)):
                    arm = self.arms[session.role][letter]
                    name = f"{session.role.name.lower()}-{index}-{place}{letter}.log"
                    server = arm.start(self.logs / name)
                    stack.callback(server.stop)
                    seat = Seat(session=session.id, block=index, place=place, arm=letter)
                    ready.append((seat, arm, server, workloads))
            for _, _, server, _ in ready:
                # Whoever fails says so again in its own trials.
                with contextlib.suppress(SpecgateError):
                    server.wait_ready()
            for seat, arm, server, workloads in ready:
                for workload in workloads:
                    self._add(self.measure(seat, arm, server, workload))

    def _next(self, session: Session, workloads: Sequence[Workload]) -> tuple[int, list[Workload]]:
        """The next block, and the workloads it is next for: an interruption may have split them."""
        mine = [t for t in self.lines if isinstance(t, Trial) and t.session == session.id]
        done = {
            workload: len(complete(session, [t for t in mine if t.workload == workload.id]))
            for workload in workloads
        }
        index = min(done.values())
        return index, [workload for workload in workloads if done[workload] == index]

    def _add(self, trial: Trial) -> None:
        append(self.out, trial)
        self.lines.append(trial)
        self.watch.trial(trial)
