"""The reference kernel on any device, as strict as the Capability it is given."""

from __future__ import annotations

from harness.core.capability import Capability
from harness.kernels import torch_ops
from harness.kernels.checked import CheckedKernel

FUNCTIONS = {
    "decode": torch_ops.paged_decode,
    "context": torch_ops.paged_context,
    "mla_decode": torch_ops.mla_decode,
    "mla_context": torch_ops.mla_context,
}


class TorchPaged(CheckedKernel):
    """A ``Provider`` in plain PyTorch: float32 inside, rounded once to the output dtype.

    Beside what every provider refuses before launch, every index tensor is checked at each launch,
    also at each replay of a recorded one.
    """

    def __init__(self, capability: Capability) -> None:
        super().__init__(capability, FUNCTIONS)
