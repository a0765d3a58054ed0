"""The backends that a server can be started with, and the kernel of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from harness.attention.multi_step_draft import PagedMultiStepDraftBackend
from harness.attention.paged_backend import PagedBackend
from harness.core.capability import CAPABILITIES, Capability
from harness.core.case import Family
from harness.core.environment import compute_capability
from harness.errors import UsageError, rejected
from harness.graphs.draft_extend_runner import BaselineDraftExtendRunner
from harness.kernels.interface import Kernel
from harness.kernels.registry import new_kernel
from harness.subjects import BASELINES, MHA_BACKENDS, MLA_BACKENDS, Kind

KERNELS: dict[Family, tuple[str, ...]] = {
    Family.MHA: ("trtllm_gen", "xqa"),
    Family.MLA: ("trtllm_gen", "flash_mla"),
}
"""By family, the kernels to choose from; the first that the GPU can run is taken."""


@dataclass(frozen=True, kw_only=True)
class ServedBackend:
    """One value of ``--attention-backend``.

    Args:
        name: "specgate_mha", or "specgate_mha-context_kernel" with one optimization undone.
        family: the attention family.
        backend: serves every mode but the multi-step draft.
        draft_backend: serves the multi-step draft.
        has_dead_topk: whether graphs of draft extend choose tokens that nobody reads.
    """

    name: str
    family: Family
    backend: type[PagedBackend]
    draft_backend: type[PagedMultiStepDraftBackend]
    has_dead_topk: bool = False

    def capability(self, device: torch.device | str) -> Capability:
        """Of the kernel that serves this device; on a CPU the first's.

        Raises:
            UsageError: none does.
        """
        found = compute_capability(device)
        for kernel in KERNELS[self.family]:
            capability = CAPABILITIES[self.family, kernel]
            if found is None or found in capability.compute_capabilities:
                return capability
        accepted = ", ".join(
            f"{major}.{minor} ({kernel})"
            for kernel in KERNELS[self.family]
            for major, minor in CAPABILITIES[self.family, kernel].compute_capabilities
        )
        raise UsageError(rejected(f"compute capability for {self.name}", found, accepted))


def _served() -> dict[str, ServedBackend]:
    def add(name: str, kind: Kind, changes: dict[str, object]) -> ServedBackend:
        family, backend, draft_backend = kind
        chosen: dict[str, Any] = {"backend": backend, "draft_backend": draft_backend} | {
            field: value for field, value in changes.items() if field.endswith("backend")
        }
        has_dead_topk = changes.get("draft_extend_runner") is BaselineDraftExtendRunner
        return ServedBackend(
            name=f"specgate_{family}{name}", family=family, has_dead_topk=has_dead_topk, **chosen
        )

    every = [add("", kind, {}) for kind in (MHA_BACKENDS, MLA_BACKENDS)]
    every += [add(f"-{name}", kind, changes) for name, kind, _, changes in BASELINES]
    return {served.name: served for served in every}


SERVED = _served()
_kernels: dict[tuple[Family, str, str], Kernel] = {}


def served_kernel(served: ServedBackend, device: str) -> Kernel:
    """The kernel of a backend, one for all of its family: they share its workspace and its plans.

    A draft need not be of its target's family, and trtllm-gen is the name of a kernel of both.
    """
    capability = served.capability(device)
    key = served.family, capability.name, device
    if key not in _kernels:
        _kernels[key] = new_kernel(served.family, capability, device)
    return _kernels[key]


def device_of(runner: Any) -> str:
    """The device of a server's ``ModelRunner`` with its index, by which a kernel is kept."""
    return f"cuda:{runner.gpu_id}" if str(runner.device) == "cuda" else str(runner.device)
