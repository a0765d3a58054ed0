"""The tape, a CUDA graph without a GPU: operations recorded once, replayed on the same memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from harness.core.dispatch_mode import DispatchMode, tensors_in
from harness.core.opaque_operations import SHAPES
from harness.errors import CaptureViolation, ContractError
from harness.graphs.effects import AddressLedger
from harness.graphs.graph import T
from harness.graphs.host_syncs import (
    INTERNAL_FILES,
    HostSyncCalls,
    Kwargs,
    aten,
    caller_line,
    dispatched_read,
    storage_key,
)
from harness.graphs.triton_launches import Launch, launches_seen

TapeStep = tuple[Any, tuple[Any, ...], dict[str, Any], tuple[torch.Tensor | None, ...]]
INTERNAL_FILES.add(__file__)
ALLOCATIONS = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_strided.default,
        aten.empty_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)
REBINDING = frozenset({"aten::resize_", "aten::resize_as_", "aten::set_"})


class Tape:
    """A graph on the CPU.

    Recorded operations run again, in order, on the very tensors of the capture; what they return
    is copied to where the capture's result lies. Python scalars and control flow are therefore
    frozen, and so are addresses. What ``empty`` gave is garbage again at every replay.

    Attributes:
        operations: how often each operation was recorded, views and allocations left out.
    """

    def __init__(self) -> None:
        self.operations: Counter[str] = Counter()
        self._steps: list[TapeStep] = []
        self._uninitialised: list[torch.Tensor] = []
        self._inputs = AddressLedger()
        self._captured = False

    def warm_up(self, run: Callable[[], object]) -> None:
        """Run once, unrecorded."""
        with torch.no_grad():
            run()

    def capture(self, run: Callable[[], T]) -> T:
        """Record ``run`` and return what it returned; replays write to the same memory.

        Raises:
            CaptureViolation: ``run`` read the device, brought host data or moved storage; the
                message names the operation and the line that asked. The tape stays empty.
            ContractError: this tape holds a recording already.
        """
        if self._captured:
            raise ContractError("a graph is captured once; make another one")
        recorder = _Recorder()
        with torch.no_grad(), recorder.calls, recorder, launches_seen(recorder.launch):
            result = run()
        self.operations, self._steps = recorder.operations, recorder.steps
        self._uninitialised, self._inputs = recorder.uninitialised, recorder.inputs
        self._captured = True
        return result

    def replay(self) -> None:
        """Run the recording on whatever its inputs hold now.

        Raises:
            ContractError: nothing was captured, or an input was freed or moved since.
        """
        if not self._captured:
            raise ContractError("a graph is replayed after its capture; this one holds nothing")
        moved = self._inputs.moved()
        if moved:
            raise ContractError(f"memory moved or freed since capture: {'; '.join(moved)}")
        # An observer sees the recorded operations and nothing of the emulation around them.
        observed = torch._C._len_torch_dispatch_stack() > 0
        unseen = torch._C._DisableTorchDispatch if observed else nullcontext
        with torch.no_grad():
            with unseen():
                for tensor in self._uninitialised:
                    _poison(tensor)
            for func, args, kwargs, kept in self._steps:
                result = func(*args, **kwargs)
                if kept:
                    with unseen():
                        _copy_results(kept, result)


class _Recorder(DispatchMode):
    """The record of one capture."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = HostSyncCalls(_refuse)
        self.operations: Counter[str] = Counter()
        self.steps: list[TapeStep] = []
        self.uninitialised: list[torch.Tensor] = []
        self.inputs = AddressLedger()
        self._seen: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name
        if name in REBINDING or dispatched_read(func, args, kwargs):
            _refuse(str(func))
        given = tensors_in([*args, *kwargs.values()])
        for tensor in given:
            self._enter(func, tensor)
        # In-place views change the tensor itself, so the recording keeps its shape of this moment.
        frozen = tuple(_frozen(arg) for arg in args), {k: _frozen(v) for k, v in kwargs.items()}
        shapes = SHAPES.get(func)
        result = (shapes or func)(*args, **kwargs)
        results = tensors_in(result)
        if shapes is not None:
            for tensor in results:
                tensor.zero_()
        self._seen.update((id(tensor), tensor) for tensor in results)
        if func in ALLOCATIONS:
            self.uninitialised += [_poison(tensor.detach()) for tensor in results]
            return result
        owned = {storage_key(tensor) for tensor in given}
        kept = tuple(None if storage_key(t) in owned else t.detach() for t in results)
        is_view = results and not any(t is not None for t in kept) and not func._schema.is_mutable
        if not is_view and torch.Tag.inplace_view not in func.tags:
            self.operations[str(func)] += 1
            self.steps.append((func, *frozen, kept if any(t is not None for t in kept) else ()))
        return result

    def launch(self, launch: Launch) -> None:
        """Record a launch of Triton's interpreter."""
        for tensor in launch.tensors:
            self._enter(launch.name, tensor)
        self.operations[f"triton::{launch.name}"] += 1
        self.steps.append((launch.run, (), {}, ()))

    def _enter(self, func: Any, tensor: torch.Tensor) -> None:
        if id(tensor) not in self._seen:
            self._seen[id(tensor)] = tensor
            kind = str(tensor.dtype).removeprefix("torch.")
            name = f"{kind}{list(tensor.shape)} that {func} reads at {caller_line()}"
            self.inputs.enter(name, tensor)


def _refuse(operation: str) -> None:
    raise CaptureViolation(f"{operation} cannot be recorded; asked at {caller_line()}")


def _copy_results(kept: tuple[torch.Tensor | None, ...], result: Any) -> None:
    if isinstance(result, torch.Tensor):
        aten.copy_.default(kept[0], result)
        return
    for target, fresh in zip(kept, tensors_in(result), strict=True):
        if target is not None:
            aten.copy_.default(target, fresh)


def _frozen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, list | tuple):
        return type(value)(_frozen(item) for item in value)
    return value


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.fill_(float("nan"))
    return tensor.fill_(True if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).min)
