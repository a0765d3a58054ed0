"""The reference kernel on any device, as strict as the Capability it is given."""

from __future__ import annotations

import torch

from harness.core.capability import Capability
from harness.kernels import torch_ops
from harness.kernels.checked import CheckedKernel, KernelFunction
from harness.kernels.interface import ContextCall, DecodeCall


def decode(call: DecodeCall) -> torch.Tensor:
    """Launch a checked decode call of either family."""
    return torch_ops.paged_decode(**call.arguments)


def context(call: ContextCall) -> torch.Tensor:
    """Launch a checked context call of either family."""
    return torch_ops.paged_context(**call.arguments)


FUNCTIONS: dict[str, KernelFunction] = {
    "decode": decode,
    "context": context,
    "mla_decode": decode,
    "mla_context": context,
}


class TorchPaged(CheckedKernel):
    """A ``Kernel`` in plain PyTorch: float32 inside, rounded once to the output dtype.

    Besides what every kernel refuses before launch, every index tensor is checked at each launch,
    also at each replay of a recorded one.
    """

    def __init__(self, capability: Capability) -> None:
        super().__init__(capability, FUNCTIONS)
