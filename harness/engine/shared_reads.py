"""What reads the memory that the scheduler writes, observed operation by operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from harness.core.dispatch_mode import DispatchMode, tensors_in

T = TypeVar("T")


class SharedReads(DispatchMode):
    """Notes which of some tensors any operation inside the ``with`` reads; a view reads nothing.

    Replays of a tape are seen too, those of a CUDA graph are not.

    Args:
        shared: the tensors by name.

    Attributes:
        names: of those that were read.
    """

    def __init__(self, shared: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()
        self._names = {_memory(tensor): name for name, tensor in shared.items()}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = self._shared([*args, *(kwargs or {}).values()])
        if given and (func._schema.is_mutable or not given & self._shared([result])):
            self.names |= given
        return result

    def _shared(self, values: Sequence[object]) -> set[str]:
        """Names of the shared tensors in an operation's arguments or results."""
        found, names = tensors_in(values), self._names
        return {names[key] for tensor in found if (key := _memory(tensor)) in names}


def observed(shared: Mapping[str, torch.Tensor], work: Callable[[], T]) -> tuple[T, set[str]]:
    """The result of work, and the names of the shared tensors that it read."""
    reads = SharedReads(shared)
    with reads:
        result = work()
    return result, reads.names


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
