"""The overlap plan stream: metadata of the next forward is planned while this one runs.

Work is issued to one of two queues by name, with what it reads and writes. Waits are explicit.
On the CPU the second queue keeps its operations until somebody waits for them, so an order that a
GPU merely *might* take is really taken, and every access is recorded for ``hazards``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import torch

from harness.engine.hazards import Hazard, Operation, Queue, find_hazards

T = TypeVar("T")
Names = Iterable[str]


class PlanStream(Protocol):
    """Two queues. Each runs its operations in order; between them only waits order anything."""

    def main(self, name: str, work: Callable[[], T], *, reads: Names = (), writes: Names = ()) -> T:
        """Run on the main queue and hand back the result."""
        ...

    def plan(
        self, name: str, work: Callable[[], None], *, reads: Names = (), writes: Names = ()
    ) -> None:
        """Run on the plan queue."""
        ...

    def plan_waits(self) -> None:
        """What the plan queue is given from here on runs after all the main queue has now."""
        ...

    def main_waits(self) -> None:
        """What the main queue is given from here on runs after all the plan queue has now."""
        ...


class SameStream:
    """No overlap: planning is part of the main queue and happens where it is waited for."""

    def __init__(self) -> None:
        self._pending: list[Callable[[], None]] = []

    def main(self, name: str, work: Callable[[], T], *, reads: Names = (), writes: Names = ()) -> T:
        """Run now."""
        return work()

    def plan(
        self, name: str, work: Callable[[], None], *, reads: Names = (), writes: Names = ()
    ) -> None:
        """Keep until the main queue waits."""
        self._pending.append(work)

    def plan_waits(self) -> None:
        """Nothing to wait for."""

    def main_waits(self) -> None:
        """Run what was kept."""
        for work in self._pending:
            work()
        self._pending.clear()


class RecordedStreams:
    """Both queues on the host: the main one runs at once, the plan one as late or early as allowed.

    Attributes:
        issued: every operation, in the order of issue.
        ran: their names, in the order in which they ran.
    """

    def __init__(self, *, late: bool = True) -> None:
        self.issued: list[Operation] = []
        self.ran: list[str] = []
        self._late = late
        self._pending: list[tuple[str, Callable[[], None]]] = []
        self._waited = dict.fromkeys(Queue, 0)

    def main(self, name: str, work: Callable[[], T], *, reads: Names = (), writes: Names = ()) -> T:
        """Run now, whatever the plan queue still has to do."""
        self._record(Queue.MAIN, name, reads, writes)
        self.ran.append(name)
        return work()

    def plan(
        self, name: str, work: Callable[[], None], *, reads: Names = (), writes: Names = ()
    ) -> None:
        """Keep for later, or run now where the plan queue is early."""
        self._record(Queue.PLAN, name, reads, writes)
        self._pending.append((name, work))
        if not self._late:
            self._drain()

    def plan_waits(self) -> None:
        """Order the plan queue behind the main one."""
        self._waited[Queue.PLAN] = self._count(Queue.MAIN)

    def main_waits(self) -> None:
        """Run what the plan queue kept and order the main one behind it."""
        self._drain()
        self._waited[Queue.MAIN] = self._count(Queue.PLAN)

    def hazards(self) -> list[Hazard]:
        """Every pair of operations that races, in the order of issue."""
        return find_hazards(self.issued)

    def _record(self, queue: Queue, name: str, reads: Names, writes: Names) -> None:
        after = self._waited[queue]
        self.issued.append(Operation(queue, name, frozenset(reads), frozenset(writes), after))

    def _drain(self) -> None:
        for name, work in self._pending:
            self.ran.append(name)
            work()
        self._pending.clear()

    def _count(self, queue: Queue) -> int:
        return sum(operation.queue is queue for operation in self.issued)


class CudaStreams:
    """The same on a GPU: a second CUDA stream beside the current one.

    Args:
        device: the CUDA device.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._stream = torch.cuda.Stream(device)

    def main(self, name: str, work: Callable[[], T], *, reads: Names = (), writes: Names = ()) -> T:
        """Launch on the current stream."""
        return work()

    def plan(
        self, name: str, work: Callable[[], None], *, reads: Names = (), writes: Names = ()
    ) -> None:
        """Launch on the second stream."""
        with torch.cuda.stream(self._stream):
            work()

    def plan_waits(self) -> None:
        """The second stream waits for the current one."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def main_waits(self) -> None:
        """The current stream waits for the second one."""
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
