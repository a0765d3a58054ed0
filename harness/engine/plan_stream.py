"""The overlap plan stream: metadata of the next forward is planned while this one runs.

Operations are issued to one of two queues by name, with the resources that they read and write.
Waits are explicit. On the CPU the plan queue defers its operations until the main queue waits, so
an order that is only possible on a GPU does happen, and every access is recorded for ``hazards``.
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
        """Run on the main queue and return the result."""
        ...

    def plan(
        self, name: str, work: Callable[[], None], *, reads: Names = (), writes: Names = ()
    ) -> None:
        """Run on the plan queue."""
        ...

    def plan_waits(self) -> None:
        """Later operations of the plan queue run after all that the main queue has now."""
        ...

    def main_waits(self) -> None:
        """Later operations of the main queue run after all that the plan queue has now."""
        ...


class SameStream:
    """No overlap: planning is part of the main queue and runs where it is waited for."""

    def __init__(self) -> None:
        self._pending: list[Callable[[], None]] = []

    def main(self, name: str, work: Callable[[], T], *, reads: Names = (), writes: Names = ()) -> T:
        """Run now."""
        return work()

    def plan(
        self, name: str, work: Callable[[], None], *, reads: Names = (), writes: Names = ()
    ) -> None:
        """Defer until the main queue waits."""
        self._pending.append(work)

    def plan_waits(self) -> None:
        """Nothing to wait for."""

    def main_waits(self) -> None:
        """Run the deferred operations."""
        for work in self._pending:
            work()
        self._pending.clear()


class OperationLog:
    """The operations of both queues and the waits between them.

    Attributes:
        issued: every operation, in the order of issue.
    """

    def __init__(self) -> None:
        self.issued: list[Operation] = []
        self._waited = dict.fromkeys(Queue, 0)

    def enter(self, queue: Queue, name: str, reads: Names, writes: Names) -> None:
        """Record an operation."""
        after = self._waited[queue]
        self.issued.append(Operation(queue, name, frozenset(reads), frozenset(writes), after))

    def wait(self, queue: Queue) -> None:
        """Record that a queue waits for all that the other one has."""
        self._waited[queue] = sum(operation.queue is not queue for operation in self.issued)

    def hazards(self) -> list[Hazard]:
        """Every pair of operations with a race, in the order of issue."""
        return find_hazards(self.issued)


class RecordedStreams(OperationLog):
    """Both queues on the host: main runs at once, plan as late or as early as allowed.

    Attributes:
        ran: names of the operations, in the order in which they ran.
    """

    def __init__(self, *, late: bool = True) -> None:
        super().__init__()
        self.ran: list[str] = []
        self._late = late
        self._pending: list[tuple[str, Callable[[], None]]] = []

    def main(self, name: str, work: Callable[[], T], *, reads: Names = (), writes: Names = ()) -> T:
        """Run now, before what the plan queue has deferred."""
        self.enter(Queue.MAIN, name, reads, writes)
        self.ran.append(name)
        return work()

    def plan(
        self, name: str, work: Callable[[], None], *, reads: Names = (), writes: Names = ()
    ) -> None:
        """Defer, or run now unless the plan queue is late."""
        self.enter(Queue.PLAN, name, reads, writes)
        self._pending.append((name, work))
        if not self._late:
            self._drain()

    def plan_waits(self) -> None:
        """Order the plan queue after the main one."""
        self.wait(Queue.PLAN)

    def main_waits(self) -> None:
        """Run the deferred operations and order the main queue after them."""
        self._drain()
        self.wait(Queue.MAIN)

    def _drain(self) -> None:
        for name, work in self._pending:
            self.ran.append(name)
            work()
        self._pending.clear()


class CudaStreams(OperationLog):
    """Both queues on a GPU: the current CUDA stream and a second one.

    Waits order operations, and nothing else prevents early reuse of memory. The allocator gives a
    freed block only to the stream that it was allocated on. A block of the main stream that
    the plan reads must therefore live until the main stream has waited, as the worker's batch
    does; a block that a plan allocated is reused by plans alone, each of which first waits for what
    the main stream read. So ``record_stream`` is not needed.

    Args:
        device: the CUDA device.
    """

    def __init__(self, device: torch.device | str) -> None:
        super().__init__()
        self._stream = torch.cuda.Stream(device)

    def main(self, name: str, work: Callable[[], T], *, reads: Names = (), writes: Names = ()) -> T:
        """Launch on the current stream."""
        self.enter(Queue.MAIN, name, reads, writes)
        return work()

    def plan(
        self, name: str, work: Callable[[], None], *, reads: Names = (), writes: Names = ()
    ) -> None:
        """Launch on the second stream."""
        self.enter(Queue.PLAN, name, reads, writes)
        with torch.cuda.stream(self._stream):
            work()

    def plan_waits(self) -> None:
        """The second stream waits for the current one."""
        self.wait(Queue.PLAN)
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def main_waits(self) -> None:
        """The current stream waits for the second one."""
        self.wait(Queue.MAIN)
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
