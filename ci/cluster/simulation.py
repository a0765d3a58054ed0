"""``python -m ci.cluster.simulation``: our batching on simulated machines, to a thousand of them.

The driver is the real one, the cluster is a clock: nodes die and come back at a stated rate, units
take other times than were recorded. Nothing here says how fast Ray is.
"""

from __future__ import annotations

import heapq
import itertools
import math
import pickle
import random
import sys
from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from ci.cluster.driver import Drive
from ci.cluster.work import Answer, Ended, LaneWork, Node, NodeLost, Plan, UnitEnd
from harness.core.argument_types import CommandLine

SLOTS = 4
"""Of a node with one GPU."""
START_S = 15.0
"""A slot's first batch: imports, collection, kernels of the cache."""
BATCH_S = 0.02
"""Of a batch beside its units."""
NOTICED_S = 30.0
"""Until a lost node is known to be lost."""
REPLACED_S = 300.0
"""Until another takes its place."""
NOISE = 0.2
"""Standard deviation of the logarithm of a unit's time over what was recorded."""
DAY_S = 86400.0
LONGEST_S = 60.0
"""Of a unit."""
NAME = "suites/differential/test_cases.py::test_case-of-a-row-on-a-subject-as-a-graph"
"""As long as a test's: its length is what the head holds."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What is simulated.

    Args:
        nodes: kind -> nodes.
        units: kind -> units; their recorded seconds are drawn from 0.05 to 60, most of them short.
        losses_a_day: of a node.
        seed: of everything drawn.
    """

    nodes: Mapping[str, int]
    units: Mapping[str, int]
    losses_a_day: float
    seed: int = 0


SCENES = tuple(
    Scene(
        nodes={"sm90": max(1, n * 6 // 10), "sm100": max(1, n * 3 // 10), "sm120": max(1, n // 10)},
        units={"sm90": 240 * n, "sm100": 120 * n, "sm120": 40 * n},
        losses_a_day=rate,
    )
    for n in (3, 10, 100, 1000)
    for rate in (0.0, 1.0, 6.0)
)
MOST = 1.25
"""Makespan ÷ bound of any scene."""


@dataclass
class SimulatedNode:
    """A machine.

    Attributes:
        free: slots without a batch.
        cold: slots that have not run one.
        running: tickets.
    """

    id: str
    kind: str
    free: int = SLOTS
    cold: int = SLOTS
    running: set[int] = field(default_factory=set)


class Event(NamedTuple):
    """Something that happens to a node, or to a batch on it."""

    at: float
    order: int
    what: str
    node: str
    ticket: int


class SimulatedCluster:
    """Nodes on a clock that jumps from event to event.

    Args:
        scene: what there is.
        seconds: unit -> what it takes here.

    Attributes:
        most_held: batches that were handed over and not answered, at most.
        most_bytes: that these took.
    """

    def __init__(self, scene: Scene, seconds: Mapping[str, float]) -> None:
        self._draw = random.Random(scene.seed)
        self._seconds, self._rate = seconds, scene.losses_a_day / DAY_S
        self._clock, self._order, self._tickets = 0.0, itertools.count(), itertools.count()
        self._events: list[Event] = []
        self._pending: defaultdict[str, deque[int]] = defaultdict(deque)
        self._held: dict[int, tuple[LaneWork, tuple[str, ...] | None, int]] = {}
        self._nodes: dict[str, SimulatedNode] = {}
        self._slots: defaultdict[str, int] = defaultdict(int)
        self._open: defaultdict[str, list[str]] = defaultdict(list)
        self._bytes = self.most_held = self.most_bytes = self.losses = 0
        self.plans = {kind: tuple(u for u in seconds if u.startswith(kind)) for kind in scene.nodes}
        for kind, number in scene.nodes.items():
            for _ in range(number):
                self._join(kind)

    def slots(self, work: LaneWork) -> int:
        """As ``driver.Cluster`` has it."""
        return self._slots[work.kind]

    def submit(self, work: LaneWork, units: tuple[str, ...] | None) -> Hashable:
        """As ``driver.Cluster`` has it."""
        ticket, size = next(self._tickets), len(pickle.dumps((work, units)))
        self._held[ticket] = work, units, size
        self._bytes += size
        self.most_held = max(self.most_held, len(self._held))
        self.most_bytes = max(self.most_bytes, self._bytes)
        self._pending[work.kind].append(ticket)
        self._place(work.kind)
        return ticket

    def answers(self, within_s: float) -> list[tuple[Hashable, Answer]]:
        """As ``driver.Cluster`` has it: the answers of the next moment that has any."""
        deadline, found = self._clock + within_s, list[tuple[Hashable, Answer]]()
        while self._events and self._events[0].at <= deadline:
            if found and self._events[0].at > self._clock:
                return found
            event = heapq.heappop(self._events)
            self._clock = event.at
            found += self._happen(event)
        if not found:
            self._clock = deadline
        return found

    def refuse(self, node: Node) -> None:
        """Nobody is refused here."""

    def withdraw(self, ticket: Hashable) -> None:
        """Nothing is withdrawn here."""

    def now(self) -> float:
        """As ``driver.Cluster`` has it."""
        return self._clock

    def _later(self, seconds: float, what: str, node: str, ticket: int = -1) -> None:
        event = Event(self._clock + seconds, next(self._order), what, node, ticket)
        heapq.heappush(self._events, event)

    def _join(self, kind: str) -> None:
        node = SimulatedNode(f"{kind}-{next(self._order)}", kind)
        self._nodes[node.id] = node
        self._slots[kind] += SLOTS
        self._open[kind] += [node.id] * SLOTS
        if self._rate:
            self._later(self._draw.expovariate(self._rate), "dies", node.id)
        self._place(kind)

    def _place(self, kind: str) -> None:
        """Batches in their order, each on any free slot of its kind."""
        while self._pending[kind] and self._open[kind]:
            node = self._nodes.get(self._open[kind].pop())
            if node is None:
                continue
            ticket = self._pending[kind].popleft()
            _, units, _ = self._held[ticket]
            node.running.add(ticket)
            cold = START_S if node.cold else 0.0
            node.cold = max(0, node.cold - 1)
            takes = cold + BATCH_S + sum(self._seconds[unit] for unit in units or ())
            self._later(takes, "ends", node.id, ticket)

    def _happen(self, event: Event) -> list[tuple[Hashable, Answer]]:
        node = self._nodes.get(event.node)
        if event.what == "joins":
            self._join(event.node)
        elif event.what == "dies" and node:
            del self._nodes[node.id]
            self._slots[node.kind] -= SLOTS
            self.losses += 1
            for ticket in node.running:
                self._later(NOTICED_S, "noticed", node.id, ticket)
            self._later(REPLACED_S, "joins", node.kind)
        elif event.what == "noticed":
            self._forget(event.ticket)
            return [(event.ticket, NodeLost(reason="simulated"))]
        elif event.what == "ends" and node:
            node.running.discard(event.ticket)
            self._open[node.kind].append(node.id)
            work, units, _ = self._held[event.ticket]
            self._forget(event.ticket)
            self._place(node.kind)
            here = Node(id=node.id, name=node.id)
            if units is None:
                return [(event.ticket, Plan(units=self.plans[work.kind], node=here))]
            ended = tuple(UnitEnd(unit=unit, outcome="passed") for unit in units)
            return [(event.ticket, Ended(units=ended, node=here, began=self._clock))]
        return []

    def _forget(self, ticket: int) -> None:
        self._bytes -= self._held.pop(ticket)[2]


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """What came out.

    Args:
        makespan_s: until the last unit ended.
        bound_s: the larger of work ÷ capacity of a kind, and the longest unit.
        losses: nodes that died.
        most_held, most_bytes: batches that the head held at a time, and their size.
    """

    scene: Scene
    makespan_s: float
    bound_s: float
    losses: int
    most_held: int
    most_bytes: int

    @property
    def ratio(self) -> float:
        """Makespan ÷ bound."""
        return self.makespan_s / self.bound_s

    @property
    def is_near(self) -> bool:
        """Whether the makespan is near its bound, and the head held two batches a slot at most."""
        slots = SLOTS * sum(self.scene.nodes.values())
        return 1.0 <= self.ratio <= MOST and self.most_held <= 2 * slots


def simulate(scene: Scene) -> Simulated:
    """One run of a scene.

    Raises:
        AssertionError: a unit was lost, or counted twice.
    """
    draw = random.Random(scene.seed)
    recorded = {
        f"{kind}-{NAME}[{number}]": min(LONGEST_S, 0.05 + draw.lognormvariate(0.0, 1.5))
        for kind, number_of in scene.units.items()
        for number in range(number_of)
    }
    real = {unit: s * math.exp(draw.gauss(0.0, NOISE)) for unit, s in recorded.items()}
    cluster = SimulatedCluster(scene, real)
    ended: list[str] = []
    drive = Drive(
        [LaneWork(lane="simulated", kind=kind, argv=(), share=1 / SLOTS) for kind in scene.nodes],
        cluster,
        recorded=lambda work: recorded,
        kept=lambda work: (),
        sink=lambda work, ends: ended.extend(end.unit for end in ends),
        tell=lambda line: None,
        wait_s=math.inf,
    )
    drive.go()
    assert len(ended) == len({*ended}) == len(recorded)
    capacity = {kind: number * SLOTS for kind, number in scene.nodes.items()}
    shares = [sum(real[u] for u in units) / capacity[k] for k, units in cluster.plans.items()]
    return Simulated(
        scene=scene,
        makespan_s=cluster.now(),
        bound_s=max(*shares, *real.values()),
        losses=cluster.losses,
        most_held=cluster.most_held,
        most_bytes=cluster.most_bytes,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 where a scene's makespan is not near its bound, else 0."""
    parser = CommandLine(prog="python -m ci.cluster.simulation", description=__doc__)
    parser.parse_args(argv)
    names = ("nodes", "losses a day and node", "nodes lost", "makespan, s", "÷ bound", "held", "MB")
    table = Table(*names)
    near = []
    for scene in SCENES:
        made = simulate(scene)
        near.append(made.is_near)
        table.add_row(
            f"{sum(scene.nodes.values())}",
            f"{scene.losses_a_day:g}",
            f"{made.losses}",
            f"{made.makespan_s:.0f}",
            f"{made.ratio:.3f}",
            f"{made.most_held}",
            f"{made.most_bytes / 1e6:.1f}",
        )
    Console(width=100).print(table)
    return int(not all(near))


if __name__ == "__main__":
    sys.exit(main())
