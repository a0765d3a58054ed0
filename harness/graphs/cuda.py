"""The real thing: ``torch.cuda.CUDAGraph`` behind the same three calls as the tape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from harness.errors import UsageError, rejected

T = TypeVar("T")


class CudaGraph:
    """A captured CUDA graph. Unverified on hardware so far.

    Args:
        device: the CUDA device.
        pool: a memory pool shared with other graphs (``torch.cuda.graph_pool_handle()``), or None
            for a private one. Graphs of one pool must not rely on each other's outputs.

    Raises:
        UsageError: the device is no CUDA device, or there is none.
    """

    def __init__(self, device: torch.device | str = "cuda", pool: Any = None) -> None:
        self._device = torch.device(device)
        if self._device.type != "cuda" or not torch.cuda.is_available():
            raise UsageError(rejected("device", str(device), "an available CUDA device"))
        self._graph = torch.cuda.CUDAGraph()  # pragma: no cover
        self._pool = pool  # pragma: no cover

    def warm_up(self, run: Callable[[], object]) -> None:  # pragma: no cover
        """Run once on a side stream, unrecorded."""
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.no_grad(), torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream(self._device).wait_stream(stream)

    def capture(self, run: Callable[[], T]) -> T:  # pragma: no cover
        """Record ``run`` and return what it returned; replays write to the same memory."""
        recording = torch.cuda.graph(self._graph, pool=self._pool)
        with torch.no_grad(), torch.cuda.device(self._device), recording:
            return run()

    def replay(self) -> None:  # pragma: no cover
        """Launch the recording on the current stream."""
        self._graph.replay()
