"""CUDA graphs: ``torch.cuda.CUDAGraph`` with the three methods of ``Graph``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch

from harness.core.collector import collector_off
from harness.core.dispatch_mode import DispatchMode, tensors_in
from harness.errors import CaptureViolation, ContractError, UsageError, rejected
from harness.graphs.cuda_nodes import kernel_names, node_counts
from harness.graphs.graph import T
from harness.graphs.host_syncs import (
    INTERNAL_FILES,
    Kwargs,
    caller_line,
    dispatched_read,
)

INTERNAL_FILES.add(__file__)


class CudaGraph:
    """A captured CUDA graph, which lives as long as what its capture returned.

    By default its intermediates lie in a memory pool of its own, so that graphs may be replayed
    in any order, on any streams. With ``sharing_a_pool`` the graphs of one runner reuse each
    other's intermediates. That is safe there: outputs of every graph stay alive and are therefore
    never reused, a runner copies them out before its next replay, and its replays follow each
    other on one stream.

    Args:
        device: the CUDA device.
        pool: a memory pool shared with other graphs (``torch.cuda.graph_pool_handle()``), or None
            for a private one.
        capture_error_mode: whose unsafe calls break a capture: "global" for any thread's,
            "thread_local" or "relaxed".

    Raises:
        UsageError: the device is no CUDA device, or there is none.
    """

    def __init__(
        self,
        device: torch.device | str = "cuda",
        pool: Any = None,
        capture_error_mode: str = "global",
    ) -> None:
        self._device = torch.device(device)
        if self._device.type != "cuda" or not torch.cuda.is_available():
            raise UsageError(rejected("device", str(device), "an available CUDA device"))
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        self._pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self._error_mode = capture_error_mode
        self._outputs: object = None
        self._captured = False

    @classmethod
    def sharing_a_pool(cls, device: torch.device | str = "cuda") -> Callable[[], CudaGraph]:
        """Makes graphs for one runner, in one pool."""
        return partial(cls, device, torch.cuda.graph_pool_handle())

    def warm_up(self, run: Callable[[], object]) -> None:
        """Run once, unrecorded, on the stream of captures: libraries set themselves up there."""
        stream = capture_stream(self._device)
        current = torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.no_grad(), torch.cuda.stream(stream):
            run()
        current.wait_stream(stream)

    def capture(self, run: Callable[[], T]) -> T:
        """Record ``run`` and return what it returned; replays write to the same memory.

        Raises:
            CaptureViolation: ``run`` made the host wait for the device, or did something else that
                CUDA does not record; the message names it and the line that asked. The streams can
                be used on, the graph holds nothing.
            ContractError: this graph holds a recording already.
        """
        if self._captured:
            raise ContractError("a graph is captured once; make another one")
        torch.cuda.synchronize(self._device)
        stream = torch.cuda.stream(capture_stream(self._device))
        # A graph that is destroyed meanwhile would break off the capture.
        with torch.no_grad(), stream, collector_off():
            try:
                result = self._recorded(run)
            except RuntimeError as error:
                said = str(error).strip().partition("\n")[0]
                raise CaptureViolation(f"CUDA cannot record this: {said}") from error
        self._outputs, self._captured = result, True
        return result

    def replay(self) -> None:
        """Launch the recording on the current stream.

        Raises:
            ContractError: nothing was captured.
        """
        if not self._captured:
            raise ContractError("a graph is replayed after its capture; this one holds nothing")
        self._graph.replay()

    def node_counts(self) -> Counter[str]:
        """Recorded nodes by kind: kernel, memcpy, memset and so on.

        Raises:
            UsageError: cuda-bindings is missing.
        """
        return node_counts(self._graph.raw_cuda_graph())

    def kernel_names(self) -> list[str]:
        """Mangled names of the recorded kernels.

        Raises:
            UsageError: cuda-bindings is missing.
        """
        return kernel_names(self._graph.raw_cuda_graph())

    def _recorded(self, run: Callable[[], T]) -> T:
        self._graph.capture_begin(pool=self._pool, capture_error_mode=self._error_mode)
        try:
            with _Refusals():  # type: ignore[no-untyped-call]
                result = run()
        except BaseException:
            self._abandon()
            raise
        self._graph.capture_end()
        self._graph.instantiate()
        return result

    def _abandon(self) -> None:
        """End a capture that failed; one that CUDA has broken off leaves the allocator in it."""
        index = self._device.index
        index = torch.cuda.current_device() if index is None else index
        with suppress(RuntimeError):
            self._graph.capture_end()
            return
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(index, self._pool)
            torch._C._cuda_releasePool(index, self._pool)


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream on which a device's graphs are captured: a shared pool belongs to a stream."""
    return torch.cuda.Stream(device)


class _Refusals(DispatchMode):
    """Refuses what would wait for the device before CUDA breaks the capture off."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = tensors_in((tuple(args), tuple(kwargs.values())))
        if dispatched_read(func, args, kwargs) and on_cuda(given):
            raise CaptureViolation(f"{func} cannot be recorded; asked at {caller_line()}")
        return func(*args, **kwargs)


def on_cuda(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether a GPU holds any of them: reading the others makes nobody wait."""
    return any(tensor.is_cuda for tensor in tensors)
