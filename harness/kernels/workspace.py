"""Scratch memory that the calls on a device share, and the counters in it that must be zero.

A kernel that splits keys over blocks counts the blocks that have finished in semaphores at the
start of its workspace. It expects zeros and leaves zeros; anything else written there makes the
next call return early, hang or add up the wrong parts. So every kernel family has a workspace of
its own, the semaphores are outside of what anybody else is handed, and they are zeroed once, when
the workspace is allocated, never by a recorded operation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harness.errors import CaptureViolation, UsageError, rejected
from harness.kernels.paged_kv import is_readable

MIB = 1 << 20
SIZES = {"xqa": 128 * MIB, "trtllm_gen": 512 * MIB, "prefill": MIB}
"""Kernel family -> bytes of its workspace; prefill never splits keys and writes nothing there."""
SEMAPHORES = {"xqa": 8 * MIB, "trtllm_gen": 8 * MIB, "prefill": 0}
"""Kernel family -> bytes at the start of its workspace that are zero between launches."""


@dataclass(frozen=True)
class Workspace:
    """One kernel family's scratch on one device.

    Args:
        name: of the kernel family and the device, for messages.
        buffer: [bytes] uint8, handed to the kernel whole.
        semaphores: the leading bytes that are zero between launches; a view of ``buffer``.
    """

    name: str
    buffer: torch.Tensor
    semaphores: torch.Tensor

    @property
    def scratch(self) -> torch.Tensor:
        """[bytes] uint8 after the semaphores, for a kernel that has none."""
        return self.buffer[self.semaphores.numel() :]


_SHARED: dict[tuple[str, torch.device], Workspace] = {}


def workspace(family: str, device: torch.device) -> Workspace:
    """The workspace of a kernel family on a device, allocated and zeroed at the first asking.

    Args:
        family: a key of ``SIZES``.
        device: with its index.

    Raises:
        UsageError: there is no such family.
        CaptureViolation: the first asking is while a CUDA graph is captured, which would zero the
            semaphores again at every replay.
    """
    if family not in SIZES:
        raise UsageError(rejected("family", family, sorted(SIZES)))
    found = _SHARED.get((family, device))
    if found is None:
        buffer = torch.zeros(0, dtype=torch.uint8, device=device)
        if not is_readable(buffer):
            raise CaptureViolation(f"the workspace of {family} on {device} is made during capture")
        buffer = torch.zeros(SIZES[family], dtype=torch.uint8, device=device)
        found = Workspace(f"{family} on {device}", buffer, buffer[: SEMAPHORES[family]])
        _SHARED[family, device] = found
    return found


def shared_workspaces() -> tuple[Workspace, ...]:
    """Every workspace that has been asked for."""
    return tuple(_SHARED.values())
