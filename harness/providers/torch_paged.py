"""The reference kernel on any device, as strict as the Capability it is given."""

from __future__ import annotations

from harness.capability import Capability
from harness.providers import ops
from harness.providers.checked import CheckedProvider

KERNELS = {
    "decode": ops.paged_decode,
    "context": ops.paged_context,
    "mla_decode": ops.mla_decode,
    "mla_context": ops.mla_context,
}


class TorchPaged(CheckedProvider):
    """A ``Provider`` in plain PyTorch: float32 inside, rounded once to the output dtype.

    Beside what every provider refuses before launch, every index tensor is checked at each launch,
    also at each replay of a recorded one.
    """

    def __init__(self, capability: Capability) -> None:
        super().__init__(capability, KERNELS)
