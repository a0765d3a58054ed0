"""Our backends behind the plugin, in the batches and on the pools of a release of sglang."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from harness.core.capability import CAPABILITIES, Capability
from harness.core.case import Family
from harness.core.conventions import OURS
from harness.core.numerics import Numerics
from harness.kernels.interface import Kernel
from harness.plugin.served import SERVED, ServedBackend
from harness.sglang.backend import Classes
from harness.sglang.releases import Release
from harness.sglang_subjects import SGLangSubject
from harness.subjects import Subject

GENERATED = "trtllm_gen"
HOPPER = {Family.MHA: "xqa", Family.MLA: "flash_mla"}
PREFIX = "specgate"
"""Names of our backends in a server begin with it."""
CONVENTIONS = replace(OURS, waits=True, context_modes=None, more=None)
"""What sglang itself does around a forward is not ours to watch."""


@dataclass(frozen=True)
class PluginClasses(Classes):
    """A backend of ours as the plugin makes it; sglang has to be active when it does."""

    @property
    def served(self) -> ServedBackend:
        """Its row."""
        return SERVED[self.name]

    def load(self) -> None:
        """See ``Classes``."""
        import harness.plugin.backend  # noqa: F401

    def make(self, runner: Any, kernel: Kernel) -> Any:
        """See ``Classes``."""
        from harness.plugin.backend import new_plugin_backend

        return new_plugin_backend(self.served, runner, kernel)

    def make_draft(self, runner: Any, kernel: Kernel, num_steps: int) -> Any:
        """See ``Classes``."""
        from harness.plugin.backend import PluginMultiStepDraftBackend

        return PluginMultiStepDraftBackend(self.served, runner, num_steps, kernel)


class PluginSubject(SGLangSubject):
    """A backend of ours on one kernel, called by sglang's conventions."""

    def new_kernel(self, device: torch.device | str) -> Kernel:
        """Ours, not what FlashInfer's entry points would run on."""
        return Subject.new_kernel(self, device)

    @property
    def capability(self) -> Capability:
        """Of the kernel, not of an entry point."""
        return CAPABILITIES[self.family, self.kernel]

    def numerics(self, device: torch.device | str) -> Numerics:
        """Of the kernel."""
        return Subject.numerics(self, device)


def plugin_subjects(
    release: Release, source: Path | None = None, device: torch.device | str = "cpu"
) -> tuple[PluginSubject, ...]:
    """Both backends on a kernel of the device; none in a release without plugins."""
    on_gpu = torch.device(device).type == "cuda"
    label = "source" if source else release.version
    return tuple(
        PluginSubject(
            name=f"sglang-{label}/{PREFIX}_{family}/{kernel}",
            family=family,
            kernel=kernel,
            conventions=CONVENTIONS,
            release=release,
            source=source,
            classes=PluginClasses(f"{PREFIX}_{family}", "", "", "", takes_rope=takes_rope),
        )
        for family, takes_rope in ((Family.MHA, True), (Family.MLA, False))
        for kernel in (HOPPER[family] if on_gpu else GENERATED,)
        if release.has_plugins
    )
