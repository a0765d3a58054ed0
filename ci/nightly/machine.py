"""The machine of a night: its GPUs and the kernels that they run, from the driver without torch."""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pynvml  # type: ignore[import-untyped]

from harness.core.capability import CAPABILITIES, device_refusal
from harness.errors import UsageError, rejected

CONFIGURATION = Path(__file__).with_name("nightly.toml")
Sm = tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """The machine of a night.

    Args:
        gpus: names of its GPUs.
        sm: their compute capability, the assumed one where there are none.
        row: of ``[[machine]]``.
    """

    gpus: tuple[str, ...]
    sm: Sm
    row: dict[str, Any]

    @property
    def kernels(self) -> list[str]:
        """Names of the real kernels that it runs."""
        return [name for name, reason in refusals(self.sm).items() if reason is None]

    def serving(self, attention_backend: str | None) -> Machine:
        """The same machine, its servers with this attention backend where one is named."""
        changes = {"attention_backend": attention_backend} if attention_backend else {}
        return replace(self, row=self.row | changes)

    def __str__(self) -> str:
        here = f"{len(self.gpus)} × {self.gpus[0]}" if self.gpus else "no GPU here"
        reasons = "; ".join(reason for reason in refusals(self.sm).values() if reason)
        runs = f"runs {', '.join(self.kernels)}" + (f"; {reasons}" if reasons else "")
        planned = "" if self.gpus else "planned for "
        return f"{here}, {planned}{self.row['name']} {shown(self.sm)}: {runs}"


def configuration() -> dict[str, Any]:
    """``nightly.toml``."""
    with CONFIGURATION.open("rb") as file:
        return tomllib.load(file)


def refusals(sm: Sm) -> dict[str, str | None]:
    """Real kernel -> why a GPU of this compute capability cannot run it, or None."""
    real = {c.name: c for c in CAPABILITIES.values() if c.compute_capabilities}
    return {name: device_refusal(kernel, sm) for name, kernel in sorted(real.items())}


def shown(sm: Sm) -> str:
    """Such as 10.0."""
    return "{}.{}".format(*sm)


def parsed(text: str) -> Sm:
    """The inverse of ``shown``.

    Raises:
        UsageError: it is not MAJOR.MINOR.
    """
    major, _, minor = text.partition(".")
    if not (major.isdecimal() and minor.isdecimal()):
        raise UsageError(rejected("compute capability", text, "MAJOR.MINOR, such as 10.0"))
    return int(major), int(minor)


def detect(config: dict[str, Any], assumed: str | None = None) -> Machine:
    """This machine, or one without GPUs of the assumed compute capability.

    Raises:
        UsageError: the GPUs differ, or no row is for them.
    """
    found = installed_gpus()
    if len({sm for _, sm in found}) > 1:
        raise UsageError(rejected("GPUs", found, "one compute capability"))
    sm = found[0][1] if found else parsed(assumed or config["target_gpu"])
    return Machine(tuple(name for name, _ in found), sm, row_of(config, sm))


def row_of(config: dict[str, Any], sm: Sm) -> dict[str, Any]:
    """The row of ``[[machine]]`` for a compute capability.

    Raises:
        UsageError: there is none.
    """
    for row in config["machine"]:
        if shown(sm) in row["gpus"]:
            return dict(row)
    known = ", ".join(gpu for row in config["machine"] for gpu in row["gpus"])
    raise UsageError(rejected("compute capability", shown(sm), known))


def installed_gpus() -> list[tuple[str, Sm]]:
    """(name, compute capability) of every GPU that ``CUDA_VISIBLE_DEVICES`` leaves.

    None where there is no driver.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [
            (pynvml.nvmlDeviceGetName(gpu), tuple(pynvml.nvmlDeviceGetCudaComputeCapability(gpu)))
            for index, gpu in enumerate(handles)
            if is_visible(index, pynvml.nvmlDeviceGetUUID(gpu))
        ]
    finally:
        pynvml.nvmlShutdown()


def is_visible(index: int, uuid: str) -> bool:
    """Whether ``CUDA_VISIBLE_DEVICES`` names this GPU, by its index or by how its UUID begins."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return True
    named = [word.strip() for word in listed.split(",") if word.strip()]
    return any(word == str(index) or uuid.startswith(word) for word in named)
