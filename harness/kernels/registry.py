"""The kernel registry: per device the real kernel, or the strict reference in its place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from harness.core.capability import Capability
from harness.core.case import Family
from harness.kernels.flash_mla import FlashMLA
from harness.kernels.flashinfer_xqa import FlashInferXQA
from harness.kernels.interface import Kernel
from harness.kernels.reference import TorchPaged
from harness.kernels.trtllm_gen import TRTLLMGen

Maker = Callable[[torch.device | str], Kernel]

KERNELS: dict[tuple[Family, str], Maker] = {
    (Family.MHA, "xqa"): FlashInferXQA,
    (Family.MHA, "trtllm_gen"): partial(TRTLLMGen, Family.MHA),
    (Family.MLA, "flash_mla"): FlashMLA,
    (Family.MLA, "trtllm_gen"): partial(TRTLLMGen, Family.MLA),
}
"""Every other kernel, and every one on a CPU, is the strict reference."""


def real_kernel(family: Family, name: str, device: torch.device | str) -> Maker | None:
    """The constructor of this kernel on this device; None where the reference stands in."""
    return None if torch.device(device).type == "cpu" else KERNELS.get((family, name))


def new_kernel(family: Family, capability: Capability, device: torch.device | str) -> Kernel:
    """The kernel of a capability; on a CPU the reference kernel, as strict as that one.

    Raises:
        UsageError: the kernel's package is missing, or the device cannot run it.
    """
    maker = real_kernel(family, capability.name, device)
    return TorchPaged(capability) if maker is None else maker(device)
