"""The run: what is to be done, what is under way, what is lost and done again.

It knows a cluster by the few verbs of ``Cluster``: that of Ray, and a simulated one.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Protocol

from ci.cluster.batches import Batch, apart, batches
from ci.cluster.losses import Losses
from ci.cluster.work import (
    Answer,
    Ended,
    LaneWork,
    Node,
    NodeLost,
    Plan,
    Refused,
    UnitEnd,
    WorkerLost,
)
from harness.core.record import Record, Verdict

AHEAD = 2
"""Batches of a slot that are handed over before the first ends, so that no slot waits for us."""
TICK_S = 1.0
PLANNING = Batch(units=("",), seconds=0.0)
"""What losses count a plan as: no unit has this name."""
TOLD_EVERY_S = 10.0


class Cluster(Protocol):
    """Runs batches somewhere."""

    def slots(self, work: LaneWork) -> int:
        """Batches of this work that accepted nodes can run at a time."""
        ...

    def submit(self, work: LaneWork, units: tuple[str, ...] | None) -> Hashable:
        """Hand over a batch, or ask for the plan; the ticket that its answer will bear."""
        ...

    def answers(self, within_s: float) -> list[tuple[Hashable, Answer]]:
        """What came in, at least one answer unless the time is up."""
        ...

    def refuse(self, node: Node) -> None:
        """Run nothing on a node any more."""
        ...

    def withdraw(self, ticket: Hashable) -> None:
        """Forget what was handed over."""
        ...

    def now(self) -> float:
        """Seconds on a clock that only goes on."""
        ...


@dataclass
class Progress:
    """How far a lane is on a kind.

    Attributes:
        units: of the plan, None before there is one.
        queue: batches that were not handed over, the longest first.
        running: that were, by ticket; None is the plan.
        ended: units.
        red: those that failed.
        waits_since: when the last node of this kind was missed; None while there is one.
        given_up: whether nobody waits any more.
    """

    work: LaneWork
    units: tuple[str, ...] | None = None
    queue: deque[Batch] = field(default_factory=deque)
    running: dict[Hashable, Batch | None] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    red: int = 0
    losses: Losses = field(default_factory=Losses)
    waits_since: float | None = None
    given_up: bool = False

    @property
    def is_over(self) -> bool:
        """Whether nothing is to be done any more."""
        done = self.units is not None and len(self.ended) == len(self.units)
        return done or self.given_up

    def __str__(self) -> str:
        of = "?" if self.units is None else len(self.units)
        lost = f", {self.losses.batches} batches run again" if self.losses.batches else ""
        first = f"; {self.work.first}" if self.work.first and not self.ended else ""
        return f"{self.work}: {len(self.ended)} of {of}, {self.red} red{lost}{first}"


class Drive:
    """Hands batches over and takes answers in, until every lane is done or given up.

    Args:
        works: lanes on kinds.
        cluster: that runs them.
        recorded: of a work, unit -> seconds that it took.
        kept: of a work, units that have ended before and do not run again.
        sink: takes what ended, each unit once.
        tell: takes lines for a person.
        wait_s: for a node of a kind that there is none of.
    """

    def __init__(
        self,
        works: Sequence[LaneWork],
        cluster: Cluster,
        *,
        recorded: Callable[[LaneWork], Mapping[str, float]],
        kept: Callable[[LaneWork], Collection[str]],
        sink: Callable[[LaneWork, Sequence[UnitEnd]], None],
        tell: Callable[[str], None],
        wait_s: float,
    ) -> None:
        # What shares its host with nobody is handed over first: no host is free later.
        order = sorted(works, key=lambda work: not work.is_alone)
        self.progress = [Progress(work) for work in order]
        self._cluster = cluster
        self._recorded, self._kept, self._sink, self._tell = recorded, kept, sink, tell
        self._wait_s = wait_s
        self._told_at = cluster.now()
        self._refused: set[str] = set()
        self.began: float | None = None

    def go(self) -> None:
        """Run all of it."""
        for one in self.progress:
            self._submit(one, None)
        while not all(one.is_over for one in self.progress):
            for one in self.progress:
                self._fill(one)
                self._wait(one)
            for ticket, answer in self._cluster.answers(TICK_S):
                self._take(ticket, answer)
            self._tell_progress()

    def _submit(self, one: Progress, batch: Batch | None) -> None:
        units = None if batch is None else batch.units
        one.running[self._cluster.submit(one.work, units)] = batch

    def _fill(self, one: Progress) -> None:
        room = AHEAD * self._cluster.slots(one.work) - len(one.running)
        for _ in range(min(room, len(one.queue))):
            self._submit(one, one.queue.popleft())

    def _wait(self, one: Progress) -> None:
        """Give up what no node has come for in time."""
        if one.is_over or self._cluster.slots(one.work):
            one.waits_since = None
            return
        if one.waits_since is None:
            one.waits_since = self._cluster.now()
            self._tell(f"{one.work}: waits for a node of {one.work.kind}: none is there")
        if self._cluster.now() - one.waits_since >= self._wait_s:
            self._give_up(one, f"no node in {self._wait_s:g} s")

    def _give_up(self, one: Progress, why: str) -> None:
        one.given_up = True
        for ticket in one.running:
            self._cluster.withdraw(ticket)
        one.running.clear()
        one.queue.clear()
        what = "all of it" if one.units is None else f"{len(one.units) - len(one.ended)} units"
        self._tell(f"{one.work}: {why}; {what} stays unverified")

    def _take(self, ticket: Hashable, answer: Answer) -> None:
        for one in self.progress:
            if ticket in one.running:
                batch = one.running.pop(ticket)
                if isinstance(answer, Refused):
                    self._refuse(answer)
                if batch is None:
                    self._take_plan(one, answer)
                else:
                    self._take_batch(one, batch, answer)

    def _refuse(self, answer: Refused) -> None:
        if answer.node.id not in self._refused:
            self._refused.add(answer.node.id)
            self._tell(f"node {answer.node} is refused: {'; '.join(answer.reasons)}")
            self._cluster.refuse(answer.node)

    def _take_plan(self, one: Progress, answer: Answer) -> None:
        if isinstance(answer, NodeLost | WorkerLost):
            _, red = self._lost(one, PLANNING, answer)
            if red:
                self._give_up(one, f"planning it {red}")
                return
        if not isinstance(answer, Plan):
            self._submit(one, None)
            return
        one.units = answer.units
        one.ended = {*self._kept(one.work)} & {*answer.units}
        left = [unit for unit in answer.units if unit not in one.ended]
        slots = max(1, self._cluster.slots(one.work))
        made = batches(left, self._recorded(one.work), slots) if left else []
        if not one.work.is_of_tests:
            made = [single for batch in made for single in apart(batch)]
        one.queue.extend(made)

    def _take_batch(self, one: Progress, batch: Batch, answer: Answer) -> None:
        if isinstance(answer, Ended):
            self._take_ended(one, batch, answer)
        elif isinstance(answer, Refused | Plan):
            one.queue.appendleft(batch)
        else:
            again, red = self._lost(one, batch, answer)
            one.queue.extendleft(reversed(again))
            if red:
                self._end(one, [UnitEnd(unit=batch.units[0], outcome="failed", message=red)])

    def _lost(
        self, one: Progress, batch: Batch, answer: NodeLost | WorkerLost
    ) -> tuple[list[Batch], str]:
        lost = one.losses.lost_node if isinstance(answer, NodeLost) else one.losses.lost_worker
        return lost(batch, answer.reason)

    def _take_ended(self, one: Progress, batch: Batch, answer: Ended) -> None:
        if answer.began:
            self.began = min(self.began or answer.began, answer.began)
        ended = [*answer.units]
        own = batch.seconds / len(batch.units)
        if answer.left:
            one.queue.appendleft(Batch(units=answer.left, seconds=own * len(answer.left)))
        if answer.killer:
            one.losses.batches += 1
            red = one.losses.killed(answer.killer, answer.reason)
            if red:
                ended.append(killed_end(answer.killer, red, answer.blank))
            else:
                one.queue.append(Batch(units=(answer.killer,), seconds=own))
        self._end(one, ended)

    def _end(self, one: Progress, ended: Sequence[UnitEnd]) -> None:
        new = [end for end in ended if end.unit not in one.ended]
        one.ended.update(end.unit for end in new)
        for end in new:
            if end.outcome == "failed":
                one.red += 1
                self._tell(f"{one.work}: red: {end.unit}: {end.message}")
        self._sink(one.work, new)

    def _tell_progress(self) -> None:
        if self._cluster.now() - self._told_at >= TOLD_EVERY_S:
            self._told_at = self._cluster.now()
            for one in self.progress:
                if not one.is_over:
                    self._tell(str(one))


def killed_end(unit: str, reason: str, blank: str) -> UnitEnd:
    """The end of a unit that ended its process too often.

    Args:
        unit: test or item.
        reason: one line.
        blank: its record from before it ran, JSON or empty.
    """
    record = ""
    if blank:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        known = Record.from_json(blank)
        red = replace(known, verdict=Verdict.ERROR, message=reason, recorded=now)
        record = red.to_json()
    return UnitEnd(unit=unit, outcome="failed", message=reason, record=record)


def as_line(work: LaneWork, end: UnitEnd) -> str:
    """What is kept of a unit beside its record: JSON, one line."""
    facts = {"unit": end.unit, "outcome": end.outcome, "message": end.message, "place": end.place}
    return json.dumps({"kind": work.kind, "tree": work.tree, "seconds": end.seconds} | facts)
