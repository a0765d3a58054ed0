"""A wait on the GPU for as long as a tensor says when it runs, so also in a graph's replay."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from harness.plugin.gpu_clock import globaltimer

if TYPE_CHECKING:
    import torch


@triton.jit
def spin(nanoseconds):  # type: ignore[no-untyped-def]
    """One program that ends as many nanoseconds after its start as ``nanoseconds`` points to."""
    start = globaltimer()
    duration = tl.load(nanoseconds)
    while globaltimer() - start < duration:
        pass


def wait(nanoseconds: torch.Tensor) -> None:
    """Keep the current stream waiting; by 0 only for a launch.

    Args:
        nanoseconds: [1] int64 on the GPU, read when the wait runs and not when it is launched.
    """
    spin[(1,)](nanoseconds, num_warps=1)
