"""Side effects of a region of code: host syncs, operations, bytes allocated, moved addresses."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._autograd import DeviceType

from harness.core.dispatch_mode import DispatchMode, tensors_in
from harness.errors import UsageError, rejected
from harness.graphs.gpu_profile import Activity, ProfileRow, tally
from harness.graphs.host_syncs import (
    INTERNAL_FILES,
    HostSyncCalls,
    Kwargs,
    caller_line,
    dispatched_read,
    storage_key,
)
from harness.graphs.triton_launches import Launch, launches_seen

INTERNAL_FILES.add(__file__)
SYNCHRONISED = "called a synchronizing CUDA operation"


@dataclass
class Effects:
    """Counts of a region, filled while it runs.

    Attributes:
        host_syncs: ``operation at file:line`` of each, in order.
        operations: how often each operation was dispatched (CPU) or kernel launched (CUDA).
        bytes_allocated: of the storages that the region's operations created.
        activity: what the GPU was asked to do and did; empty on the CPU.
    """

    host_syncs: list[str] = field(default_factory=list)
    operations: Counter[str] = field(default_factory=Counter)
    bytes_allocated: int = 0
    activity: Activity = field(default_factory=Activity)

    def count(self, word: str) -> int:
        """Operations whose name contains ``word``."""
        return sum(times for name, times in self.operations.items() if word in name)


class AddressLedger:
    """Addresses of tensors at the time they were entered, by name; it keeps them alive."""

    def __init__(self) -> None:
        self._entries: list[tuple[str, torch.Tensor, int]] = []

    def enter(self, name: str, tensor: torch.Tensor) -> None:
        """Note the present address of ``tensor``."""
        self._entries.append((name, tensor, tensor.data_ptr()))

    def moved(self) -> list[str]:
        """Names of the tensors whose memory is no longer where it was, freed ones included."""
        return [name for name, tensor, address in self._entries if tensor.data_ptr() != address]


class HostTensors:
    """Tensors of the host that a CPU cannot tell from the device's, and what follows from them.

    Args:
        given: the tensors to begin with.
    """

    def __init__(self, given: Sequence[torch.Tensor] = ()) -> None:
        # Kept alive: a storage's key is another's once it is freed.
        self._kept = {storage_key(tensor): tensor for tensor in given}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return storage_key(tensor) in self._kept

    def follow(self, given: Sequence[torch.Tensor], result: object) -> bool:
        """Whether an operation ran on the host; then its results belong there, too."""
        here = bool(given) and all(tensor in self for tensor in given)
        if here:
            self._kept.update((storage_key(tensor), tensor) for tensor in tensors_in(result))
        return here


@dataclass
class Watched:
    """What a region asked of the device.

    Attributes:
        waits: ``operation at file:line`` of each wait of the host.
        operations: that were dispatched.
    """

    waits: list[str] = field(default_factory=list)
    operations: int = 0


class _Watch(DispatchMode):
    """Counts operations and finds those that make the host wait, and nothing else."""

    def __init__(self, seen: Watched, calls: HostSyncCalls, host: HostTensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen, self._calls, self._host = seen, calls, host

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs = tensors_in([*args, *kwargs.values()])
        if self._host.follow(inputs, result):
            return result
        self._seen.operations += 1
        if not self._calls.reporting and dispatched_read(func, args, kwargs):
            self._seen.waits.append(f"{func} at {caller_line()}")
        return result


@contextmanager
def watched(host: Sequence[torch.Tensor] = ()) -> Iterator[Watched]:
    """Waits of the host and operations inside the ``with``; on the CPU alone.

    Args:
        host: tensors of the host; work on these, and what follows from them, is not counted.
    """
    known, seen = HostTensors(host), Watched()
    calls = HostSyncCalls(
        lambda name: seen.waits.append(f"{name} at {caller_line()}"), known.__contains__
    )
    with calls, _Watch(seen, calls, known):
        yield seen


class _Observer(DispatchMode):
    def __init__(self, effects: Effects, calls: HostSyncCalls, host: HostTensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._effects, self._calls, self._host = effects, calls, host

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        where = caller_line()
        result = func(*args, **kwargs)
        inputs = tensors_in([*args, *kwargs.values()])
        if self._host.follow(inputs, result):
            return result
        if not self._calls.reporting and dispatched_read(func, args, kwargs):
            self._effects.host_syncs.append(f"{func} at {where}")
        self._effects.operations[str(func)] += 1
        given = {storage_key(tensor) for tensor in inputs}
        fresh = {storage_key(t): t for t in tensors_in(result) if storage_key(t) not in given}
        self._effects.bytes_allocated += sum(t.untyped_storage().nbytes() for t in fresh.values())
        return result


@contextmanager
def observe(
    device: torch.device | str = "cpu", host: Sequence[torch.Tensor] = ()
) -> Iterator[Effects]:
    """Watch what the calling thread does inside the ``with``; other threads are not seen.

    Args:
        device: whose reads count.
        host: tensors of the host, for the CPU, which cannot tell them; work on these alone is not
            counted.

    On the CPU host reads are recognised as the tape recognises them, and a replayed tape counts as
    the operations it recorded. On CUDA host reads are torch's synchronisation warnings with their
    lines and, without one, copies to the host; operations are executed kernels, wherever they were
    launched, and bytes are the allocator's.

    Raises:
        UsageError: a device that is neither.
    """
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        raise UsageError(rejected("device", device, "a cpu or a cuda device"))
    effects = Effects()
    with _on_cpu(effects, host) if kind == "cpu" else _on_cuda(effects, device):
        yield effects


@contextmanager
def _on_cpu(effects: Effects, host: Sequence[torch.Tensor]) -> Iterator[None]:
    known = HostTensors(host)
    calls = HostSyncCalls(
        lambda name: effects.host_syncs.append(f"{name} at {caller_line()}"), known.__contains__
    )

    def launched(launch: Launch) -> None:
        effects.operations[f"triton::{launch.name}"] += 1

    with calls, _Observer(effects, calls, known), launches_seen(launched):
        yield


@contextmanager
def _on_cuda(effects: Effects, device: torch.device | str) -> Iterator[None]:  # pragma: no cover
    from torch.profiler import ProfilerActivity, profile

    stats = "allocated_bytes.all.allocated"
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_stats(device)[stats]
    mode = torch.cuda.get_sync_debug_mode()
    trace = profile(activities=[ProfilerActivity.CUDA], acc_events=True)
    with trace, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            effects.bytes_allocated = torch.cuda.memory_stats(device)[stats] - before
            torch.cuda.synchronize(device)
    effects.activity = tally(
        ProfileRow(event.name, event.device_type == DeviceType.CUDA, event.id)
        for event in trace.events()
    )
    effects.operations.update(effects.activity.kernels)
    effects.host_syncs += reported_waits(told, effects.activity)


@contextmanager
def waits_refused() -> Iterator[None]:  # pragma: no cover
    """Let every wait for a CUDA device that torch knows of raise, where it happens."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # Torch calls this a prototype, once.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def reported_waits(told: Sequence[warnings.WarningMessage], activity: Activity) -> list[str]:
    """Host reads: what torch warned of, and copies to the host that it did not warn of."""
    lines = [
        f"synchronisation at {warning.filename}:{warning.lineno}"
        for warning in told
        if SYNCHRONISED in str(warning.message)
    ]
    unseen = max(activity.copies["DtoH"], activity.waits.total()) - len(lines)
    return lines + ["a copy to the host or a wait that torch does not warn of"] * unseen
