"""Data races between the operations of queues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Queue(StrEnum):
    """The queue of an operation."""

    MAIN = "main"
    PLAN = "plan"
    SCHEDULE = "schedule"


@dataclass(frozen=True)
class Operation:
    """One recorded operation.

    Args:
        queue: that it was issued to.
        name: its name.
        reads: resources it reads.
        writes: resources it writes.
        after: how many operations of each other queue had to be finished before it.
    """

    queue: Queue
    name: str
    reads: frozenset[str]
    writes: frozenset[str]
    after: Mapping[Queue, int]


@dataclass(frozen=True)
class Hazard:
    """Two accesses to a resource in no certain order, or in the wrong one.

    Args:
        kind: RAW, WAR or WAW: read after write, write after read, write after write.
        first: the operation that must come first.
        second: the operation that must come second.
        resource: that both access.
    """

    kind: str
    first: str
    second: str
    resource: str

    def __str__(self) -> str:
        return (
            f"{self.kind} on {self.resource}: {self.second!r} is not ordered after {self.first!r}"
        )


def find_hazards(issued: Sequence[Operation]) -> list[Hazard]:
    """Races between queues, and reads of a resource before its first write."""
    hazards = []
    places = _places(issued)
    for later, second in enumerate(issued):
        for resource in sorted(second.reads):
            writers = [op for op in issued if resource in op.writes]
            if writers and not any(resource in op.writes for op in issued[:later]):
                hazards.append(Hazard("RAW", writers[0].name, second.name, resource))
        for earlier, first in enumerate(issued[:later]):
            waited = second.after.get(first.queue, 0)
            if first.queue is second.queue or places[earlier] <= waited:
                continue
            hazards += [
                Hazard(kind, first.name, second.name, resource)
                for kind, shared in (
                    ("RAW", first.writes & second.reads),
                    ("WAR", first.reads & second.writes),
                    ("WAW", first.writes & second.writes),
                )
                for resource in sorted(shared)
            ]
    return hazards


def _places(issued: Sequence[Operation]) -> list[int]:
    """Each operation's place in its own queue, from 1."""
    counts = dict.fromkeys(Queue, 0)
    places = []
    for operation in issued:
        counts[operation.queue] += 1
        places.append(counts[operation.queue])
    return places
