"""What is sent to a node and what comes back: plain data, known to both sides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class LaneWork:
    """A lane on one kind of device; its units are tests, or items of a command.

    Args:
        lane: its name.
        kind: "cpu", "sm90", …: the resource that its batches ask for.
        argv: after ``python``: pytest's words, or a command with "{item}" and "{report}".
        items: after ``python``: a command that prints a command's items, a line each; empty for a
            lane of tests.
        item: the only one, where no command prints them.
        first: what a node does before its first unit, for people.
        is_declared: the CPU stands in for the kind's GPU, in a dry run.
        share: of a GPU, or of a CPU's core, that a batch takes.
        is_alone: it shares neither its GPU nor its host.
        versions: distribution -> the version that a node must have.
        tree: digest of the sources that a node must have.
        limit_s: of one unit.
    """

    lane: str
    kind: str
    argv: tuple[str, ...]
    items: tuple[str, ...] = ()
    item: str = ""
    first: str = ""
    is_declared: bool = False
    share: float = 1.0
    is_alone: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    tree: str = ""
    limit_s: float = 1800.0

    @property
    def is_of_tests(self) -> bool:
        """Whether its units are tests, which leave records."""
        return not (self.items or self.item)

    @property
    def has_gpu(self) -> bool:
        """Whether its batches hold a part of a GPU."""
        return self.kind != "cpu"

    def __str__(self) -> str:
        return f"{self.lane} on {self.kind}"


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine of the cluster, as messages name it."""

    id: str
    name: str

    def __str__(self) -> str:
        return f"{self.name} ({self.id[:8]})"


@dataclass(frozen=True, kw_only=True)
class UnitEnd:
    """How a test or an item ended.

    Args:
        unit: node id or item.
        outcome: "passed", "skipped" or "failed".
        message: the reason, one line.
        seconds: wall time.
        place: the node and the GPU that ran it; empty where it did not end there.
        record: JSON; empty where it left none.
        files: what a command wrote, path -> content.
    """

    unit: str
    outcome: str
    message: str = ""
    seconds: float = 0.0
    place: str = ""
    record: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a node of a kind would run.

    Args:
        units: in their order, neighbours share what a process keeps.
        node: that was asked.
    """

    units: tuple[str, ...]
    node: Node


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A batch that a node gave an answer about.

    Args:
        units: those that ended.
        killer: the unit that ended its process, empty where none did.
        reason: how.
        blank: the killer's record from before it ran, JSON; empty where it left none.
        left: units that did not begin.
        began: when the first began, seconds since the epoch; 0 where none did.
        node: that ran it.
    """

    units: tuple[UnitEnd, ...]
    killer: str = ""
    reason: str = ""
    blank: str = ""
    left: tuple[str, ...] = ()
    began: float = 0.0
    node: Node


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A node that must run nothing: it has other versions, or its device does not answer."""

    node: Node
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class NodeLost:
    """The batch's node died, or the result with it."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class WorkerLost:
    """The process around the batch's process died, and its node did not."""

    reason: str


Answer = Plan | Ended | Refused | NodeLost | WorkerLost
