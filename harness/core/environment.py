"""The environment of a trial: machine, versions, commit.

Torch is imported by what asks it: a run of pytest without a device need not wait for it.
"""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from harness.core.paths import ROOT
from harness.core.record import Environment
from harness.core.tree import digest
from harness.errors import UsageError, rejected

if TYPE_CHECKING:
    import torch

DEVICES = "cpu, cuda, cuda:1, …"


@cache
def environment(device: str = "cpu") -> Environment:
    """The environment of ``device`` ("cpu", "cuda:0", …); unknown facts are empty."""
    import torch

    changes = command("git", "-C", str(ROOT), "status", "--porcelain")
    on_cuda = device.startswith("cuda")
    return Environment(
        python=platform.python_version(),
        torch=torch.__version__,
        platform=platform.platform(),
        processor=processor(),
        device=torch.cuda.get_device_name(device) if on_cuda else device,
        cuda=(torch.version.cuda or "") if on_cuda else "",
        driver=driver() if on_cuda else "",
        triton=installed("triton"),
        sglang=installed("sglang"),
        sgl_kernel=installed("sglang-kernel"),
        flashinfer=installed("flashinfer-python"),
        commit=command("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        dirty=bool(changes),
        compute_capability=shown_capability(device),
        tree=digest(),
    )


def present(name: str, field: str) -> torch.device:
    """The device of a name, which this machine has.

    Raises:
        UsageError: it has none; ``field`` is where the name was given.
    """
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(rejected(field, name, DEVICES)) from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(rejected(field, name, DEVICES))
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = f"cpu; {torch.cuda.device_count()} CUDA devices are here"
        raise UsageError(rejected(field, name, found))
    return device


def compute_capability(device: torch.device | str) -> tuple[int, int] | None:
    """(major, minor) of a GPU, None for a CPU."""
    if str(device) == "cpu":
        return None
    import torch

    is_cuda = torch.device(device).type == "cuda"
    return torch.cuda.get_device_capability(device) if is_cuda else None


def shown_capability(device: torch.device | str) -> str:
    """Of a GPU, such as "9.0"; empty for a CPU."""
    found = compute_capability(device)
    return "" if found is None else "{}.{}".format(*found)


def kind_of(device: torch.device | str) -> str:
    """What a plan is made for: "sm90" of a GPU, "cpu" of a CPU."""
    found = compute_capability(device)
    return "cpu" if found is None else "sm{}{}".format(*found)


def installed(package: str) -> str:
    """Version of a package, empty where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def command(*words: str) -> str:
    """Output of a program, empty where it is absent, slow or ends badly."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def driver() -> str:
    """Version of the NVIDIA driver."""
    lines = command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return lines.splitlines()[0] if lines else ""


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's name."""
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
