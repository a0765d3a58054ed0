"""Host syncs, which make the host wait for its device: refused by the tape, counted by effects.

Most reads dispatch an operation; those that only a CUDA tensor would dispatch (``tolist``,
``cpu``, …) are recognised by the Python call instead. Both kinds are found on the CPU, where
nothing waits. Kernels behind ``torch.library`` are opaque: what they do inside is not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from harness.core.dispatch_mode import tensors_in

aten = torch.ops.aten
Kwargs = Mapping[str, Any]
MASKS = (torch.bool, torch.uint8)
TORCH_FOLDER = str(Path(torch.__file__).parent)
INTERNAL_FILES = {__file__}


def caller_line() -> str:
    """``file:line`` of the innermost frame outside torch and the recording machinery."""
    frame = sys._getframe(1)
    while frame.f_back and (
        frame.f_code.co_filename in INTERNAL_FILES
        or frame.f_code.co_filename.startswith(TORCH_FOLDER)
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for two tensors that share memory, as long as one of them lives."""
    return int(tensor.untyped_storage()._cdata)


def _indexes_by_mask(args: Sequence[Any], kwargs: Kwargs) -> bool:
    return any(index.dtype in MASKS for index in tensors_in(args[1]))


def _puts_by_mask(args: Sequence[Any], kwargs: Kwargs) -> bool:
    # One value under one mask becomes masked_fill, which reads nothing.
    indices = tensors_in(args[1])
    fills = args[2].numel() == 1 and len(indices) == 1 and not any(args[3:])
    return not fills and _indexes_by_mask(args, kwargs)


def _has_no_size(args: Sequence[Any], kwargs: Kwargs) -> bool:
    return kwargs.get("output_size") is None


def _brings_data(args: Sequence[Any], kwargs: Kwargs) -> bool:
    # A scalar that is written (x[0] = 1) is an argument of the kernel, a list is a copy.
    return bool(args[0].dim())


def _changes_device(args: Sequence[Any], kwargs: Kwargs) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type != args[0].device.type


def _copies_between_devices(args: Sequence[Any], kwargs: Kwargs) -> bool:
    return bool(args[0].device.type != args[1].device.type)


Rule = Callable[[Sequence[Any], Kwargs], bool]
DATA_DEPENDENT = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
CONDITIONAL: dict[object, Rule] = {
    aten.index.Tensor: _indexes_by_mask,
    aten.index_put.default: _puts_by_mask,
    aten.index_put_.default: _puts_by_mask,
    aten._index_put_impl_.default: _puts_by_mask,
    aten.repeat_interleave.Tensor: _has_no_size,
    aten.lift_fresh.default: _brings_data,
    aten._to_copy.default: _changes_device,
    aten.copy_.default: _copies_between_devices,
}
ALWAYS = frozenset({aten.equal.default, aten._pin_memory.default})


def dispatched_read(func: Any, args: Sequence[Any], kwargs: Kwargs) -> bool:
    """Whether this dispatched operation makes the host wait."""
    rule = CONDITIONAL.get(func)
    if rule is not None:
        return rule(args, kwargs)
    return _always_waits(func)


@cache
def _always_waits(func: Any) -> bool:
    return func in ALWAYS or not DATA_DEPENDENT.isdisjoint(func.tags)


def _given(args: Sequence[Any], kwargs: Kwargs) -> bool:
    return True


def _names_the_host(args: Sequence[Any], kwargs: Kwargs) -> bool:
    given = (*args[1:], *kwargs.values())
    return any(torch.device(x).type == "cpu" for x in given if isinstance(x, str | torch.device))


def _from_python(args: Sequence[Any], kwargs: Kwargs) -> bool:
    return not isinstance(args[0] if args else kwargs.get("data"), torch.Tensor)


def _new_from_python(args: Sequence[Any], kwargs: Kwargs) -> bool:
    return _from_python(args[1:], kwargs)


CALLS: dict[object, tuple[str, Rule]] = {
    torch.Tensor.tolist: ("Tensor.tolist", _given),
    torch.Tensor.numpy: ("Tensor.numpy", _given),
    torch.Tensor.__array__: ("Tensor.__array__", _given),
    torch.Tensor.__dlpack__: ("Tensor.__dlpack__", _given),
    torch.Tensor.__repr__: ("Tensor.__repr__", _given),
    torch.Tensor.cpu: ("Tensor.cpu", _given),
    torch.Tensor.to: ("Tensor.to", _names_the_host),
    torch.Tensor.new_tensor: ("Tensor.new_tensor", _new_from_python),
    torch.Tensor.pin_memory: ("Tensor.pin_memory", _given),
    torch.tensor: ("torch.tensor", _from_python),
    torch.as_tensor: ("torch.as_tensor", _from_python),
    torch.asarray: ("torch.asarray", _from_python),
}


class HostSyncCalls(TorchFunctionMode):
    """Reports the host syncs that never dispatch.

    Attributes:
        reporting: true while a reported call runs, whose operations are not reported again.
    """

    def __init__(
        self,
        report: Callable[[str], None],
        on_host: Callable[[torch.Tensor], bool] = lambda tensor: False,
    ) -> None:
        super().__init__()
        self._report, self._on_host = report, on_host
        self.reporting = False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Kwargs | None = None
    ) -> Any:
        """Run ``func``, reported first if it reads."""
        kwargs = kwargs or {}
        name, rule = CALLS.get(func, ("", None))
        if rule is None or not rule(args, kwargs) or any(map(self._on_host, tensors_in(args[:1]))):
            return func(*args, **kwargs)
        self._report(name)
        self.reporting = True
        try:
            return func(*args, **kwargs)
        finally:
            self.reporting = False
