"""The packages of the real kernels, and the devices they run on."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from harness.core.capability import Capability, device_refusal
from harness.core.environment import compute_capability
from harness.errors import UsageError, rejected

WANTED = {"flashinfer": "flashinfer-python 0.6.12", "sgl_kernel": "sglang-kernel 0.4.4"}
"""Top-level module -> distribution and the version that the kernels are written against."""


def load(module: str, kernel: str) -> Any:
    """A module of a kernel package.

    Args:
        module: dotted name.
        kernel: who needs it, for the message.

    Raises:
        UsageError: it cannot be imported; names package, version and how to install it.
    """
    try:
        return import_module(module)
    except (ImportError, OSError) as error:
        wanted = WANTED[module.partition(".")[0]]
        reason = str(error).strip().partition("\n")[0]
        raise UsageError(
            f"{kernel} needs {wanted}, which cannot be imported ({reason}); "
            "install it with: pip install -e '.[gpu]'"
        ) from error


def cuda_device(device: torch.device | str, capability: Capability) -> torch.device:
    """The device with its index, if the kernel runs on it.

    Raises:
        UsageError: it is no CUDA device, or its architecture is not one of the kernel's.
    """
    wanted = torch.device(device)
    if wanted.type != "cuda":
        raise UsageError(rejected("device", str(device), f"a CUDA device for {capability.name}"))
    reason = device_refusal(capability, compute_capability(wanted))
    if reason is not None:
        raise UsageError(reason)
    index = torch.cuda.current_device() if wanted.index is None else wanted.index
    return torch.device("cuda", index)
