"""The queues of an overlapping worker: planning and scheduling go on while a forward runs.

Operations are issued to a queue by name, with the resources that they read and write. Waits are
explicit, but for the scheduler's, which are the same for each of its operations: it writes what
forwards read, so it waits until they have read it, and forwards wait for it. On the CPU the plan
queue defers its operations until the main queue waits, so an order that is only possible on a GPU
does happen, and every access is recorded for ``hazards``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch

from harness.engine.hazards import Hazard, Operation, Queue, find_hazards
from harness.engine.shared_reads import observed

T = TypeVar("T")
Names = Iterable[str]
Shared = Mapping[str, torch.Tensor]


class PlanStream(Protocol):
    """Three queues. Each runs its operations in order; between them only waits order anything."""

    def main(
        self,
        name: str,
        work: Callable[[], T],
        *,
        reads: Names = (),
        writes: Names = (),
        reads_ended: bool = False,
    ) -> T:
        """Run on the main queue and return the result.

        Args:
            name: of the operation.
            work: the operation.
            reads: resources it reads.
            writes: resources it writes.
            reads_ended: whether it and what follows read nothing that the scheduler writes, up to
                the next operation that is told otherwise; then the scheduler does not wait for it.
        """
        ...

    def plan(
        self, name: str, work: Callable[[], None], *, reads: Names = (), writes: Names = ()
    ) -> None:
        """Run on the plan queue."""
        ...

    def schedule(self, name: str, work: Callable[[], None], *, writes: Shared) -> None:
        """Run on the scheduler's queue, behind the main queue's shared reads.

        Later operations of the main queue run after it.

        Args:
            name: of the operation.
            work: the operation.
            writes: the memory it writes, by name.
        """
        ...

    def plan_waits(self) -> None:
        """Later operations of the plan queue run after all that the main queue has now."""
        ...

    def main_waits(self) -> None:
        """Later operations of the main queue run after all that the plan queue has now."""
        ...


@contextmanager
def _emptied_on_failure(pending: list[Any]) -> Iterator[None]:
    """Work that raises ends its round, whose deferred operations run in no later one."""
    try:
        yield
    except BaseException:
        pending.clear()
        raise


class SameStream:
    """No overlap: planning is part of the main queue and runs where it is waited for."""

    def __init__(self) -> None:
        self._pending: list[Callable[[], None]] = []

    def main(
        self,
        name: str,
        work: Callable[[], T],
        *,
        reads: Names = (),
        writes: Names = (),
        reads_ended: bool = False,
    ) -> T:
        """Run now."""
        with _emptied_on_failure(self._pending):
            return work()

    def plan(
        self, name: str, work: Callable[[], None], *, reads: Names = (), writes: Names = ()
    ) -> None:
        """Defer until the main queue waits."""
        self._pending.append(work)

    def schedule(self, name: str, work: Callable[[], None], *, writes: Shared) -> None:
        """Run now."""
        work()

    def plan_waits(self) -> None:
        """Nothing to wait for."""

    def main_waits(self) -> None:
        """Run the deferred operations."""
        # One that raises ends its round; none of that round runs in the next.
        pending, self._pending = self._pending, []
        for work in pending:
            work()


class OperationLog:
    """The operations of all queues and the waits between them.

    Attributes:
        issued: every operation, in the order of issue.
    """

    def __init__(self) -> None:
        self.issued: list[Operation] = []
        self._waited: dict[Queue, dict[Queue, int]] = {queue: {} for queue in Queue}
        self._shared_reads: dict[Queue, int] = {}

    def enter(
        self, queue: Queue, name: str, reads: Names, writes: Names, *, reads_ended: bool = False
    ) -> None:
        """Record an operation."""
        after = dict(self._waited[queue])
        self.issued.append(Operation(queue, name, frozenset(reads), frozenset(writes), after))
        if queue is Queue.MAIN and not reads_ended:
            self._shared_reads = {**after, Queue.MAIN: self._count(Queue.MAIN)}

    def wait(self, queue: Queue, other: Queue) -> None:
        """Record that a queue waits for all that another one has, and for what that waited for."""
        self._order(queue, {**self._waited[other], other: self._count(other)})

    def wait_for_shared_reads(self) -> None:
        """Record that the scheduler waits for the last main operation that may read its memory."""
        self._order(Queue.SCHEDULE, self._shared_reads)

    def _count(self, queue: Queue) -> int:
        return sum(operation.queue is queue for operation in self.issued)

    def _order(self, queue: Queue, after: Mapping[Queue, int]) -> None:
        held = self._waited[queue]
        for other, count in after.items():
            held[other] = max(count, held.get(other, 0))

    def hazards(self) -> list[Hazard]:
        """Every pair of operations with a race, in the order of issue."""
        return find_hazards(self.issued)


class RecordedStreams(OperationLog):
    """All queues on the host: main runs at once, plan as late or as early as allowed.

    What an operation reads of the memory that the scheduler writes is observed, not only declared.

    Attributes:
        ran: names of the operations, in the order in which they ran.
    """

    def __init__(self, *, late: bool = True) -> None:
        super().__init__()
        self.ran: list[str] = []
        self._late = late
        self._pending: list[tuple[int, Callable[[], None]]] = []
        self._shared: dict[str, torch.Tensor] = {}

    def main(
        self,
        name: str,
        work: Callable[[], T],
        *,
        reads: Names = (),
        writes: Names = (),
        reads_ended: bool = False,
    ) -> T:
        """Run now, before what the plan queue has deferred."""
        self.enter(Queue.MAIN, name, reads, writes, reads_ended=reads_ended)
        with _emptied_on_failure(self._pending):
            return self._run(len(self.issued) - 1, work)

    def plan(
        self, name: str, work: Callable[[], None], *, reads: Names = (), writes: Names = ()
    ) -> None:
        """Defer, or run now unless the plan queue is late."""
        self.enter(Queue.PLAN, name, reads, writes)
        self._pending.append((len(self.issued) - 1, work))
        if not self._late:
            self._drain()

    def schedule(self, name: str, work: Callable[[], None], *, writes: Shared) -> None:
        """Run now; from here on, reads of what it writes are observed."""
        self._shared |= writes
        self.wait_for_shared_reads()
        self.enter(Queue.SCHEDULE, name, (), writes)
        self.ran.append(name)
        work()
        self.wait(Queue.MAIN, Queue.SCHEDULE)

    def plan_waits(self) -> None:
        """Order the plan queue after the main one."""
        self.wait(Queue.PLAN, Queue.MAIN)

    def main_waits(self) -> None:
        """Run the deferred operations and order the main queue after them."""
        self._drain()
        self.wait(Queue.MAIN, Queue.PLAN)

    def _drain(self) -> None:
        pending, self._pending = self._pending, []
        for place, work in pending:
            self._run(place, work)

    def _run(self, place: int, work: Callable[[], T]) -> T:
        operation = self.issued[place]
        self.ran.append(operation.name)
        result, reads = observed(self._shared, work)
        self.issued[place] = replace(operation, reads=operation.reads | reads)
        return result


class CudaStreams(OperationLog):
    """The queues on a GPU: the current CUDA stream, one of plans and one of the scheduler.

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
        self._scheduler = torch.cuda.Stream(device)
        self._reads_done: torch.cuda.Event | None = None

    def main(
        self,
        name: str,
        work: Callable[[], T],
        *,
        reads: Names = (),
        writes: Names = (),
        reads_ended: bool = False,
    ) -> T:
        """Launch on the current stream."""
        self.enter(Queue.MAIN, name, reads, writes, reads_ended=reads_ended)
        if not reads_ended:
            self._reads_done = None
        elif self._reads_done is None:
            self._reads_done = self._main.record_event()
        return work()

    def plan(
        self, name: str, work: Callable[[], None], *, reads: Names = (), writes: Names = ()
    ) -> None:
        """Launch on the second stream."""
        self.enter(Queue.PLAN, name, reads, writes)
        with torch.cuda.stream(self._stream):
            work()

    def schedule(self, name: str, work: Callable[[], None], *, writes: Shared) -> None:
        """Launch on the scheduler's stream, between two waits."""
        self.wait_for_shared_reads()
        if self._reads_done is None:
            self._scheduler.wait_stream(self._main)
        else:
            self._scheduler.wait_event(self._reads_done)
        self.enter(Queue.SCHEDULE, name, (), writes)
        with torch.cuda.stream(self._scheduler):
            work()
        self.wait(Queue.MAIN, Queue.SCHEDULE)
        self._main.wait_stream(self._scheduler)

    def plan_waits(self) -> None:
        """The second stream waits for the current one."""
        self.wait(Queue.PLAN, Queue.MAIN)
        self._stream.wait_stream(self._main)

    def main_waits(self) -> None:
        """The current stream waits for the second one."""
        self.wait(Queue.MAIN, Queue.PLAN)
        self._main.wait_stream(self._stream)

    @property
    def _main(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._stream.device)
