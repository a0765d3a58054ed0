"""One process, one release: its files and packages on the path, stubs and patches in place.

On CUDA nothing is put in place: the release is the one of the environment, on the kernels it pins.
"""

from __future__ import annotations

import os
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from harness.core.collector import importing
from harness.core.environment import installed
from harness.errors import UsageError, rejected
from harness.graphs.triton_launches import watch_interpreter
from harness.sglang.patches import apply_patches
from harness.sglang.releases import Release, packages_of, source_of
from harness.sglang.stubs import StubFinder

WORKSPACE_BYTES = 1 << 20
_active: list[tuple[Release, Path | None]] = []


def activate(
    release: Release, source: Path | None = None, device: torch.device | str = "cpu"
) -> None:
    """Make ``import sglang`` find a release's files, for the rest of the process.

    Args:
        release: decides the packages and the generation of the contract.
        source: the folder that holds ``sglang/``; if None the release's own unpacked wheel, or on
            CUDA the installed package.
        device: what it will run on.

    Raises:
        UsageError: another release or source is active, or the files are missing.
    """
    if _active:
        if _active != [(release, source)]:
            raise UsageError(
                rejected(
                    "release",
                    _named(release, source),
                    f"{_named(*_active[0])}, the one of this process",
                )
            )
        return
    if torch.device(device).type == "cpu":
        _stand_in(release, source or source_of(release))
    else:
        _as_installed(release, source)
    _active.append((release, source))


def _named(release: Release, source: Path | None) -> str:
    return release.version if source is None else f"{release.version} in {source}"


def _as_installed(release: Release, source: Path | None) -> None:
    if source is not None:
        sys.path.insert(0, str(source))
    elif (found := installed("sglang")) != release.version:
        raise UsageError(
            rejected("sglang on CUDA", found or "none", f"{release.version} installed")
        )


def hide_gpus() -> None:
    """Keep CUDA out of the process: where it is, a release takes its GPU's ways on a CPU, too.

    Raises:
        UsageError: CUDA was in use before.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if torch.cuda.is_available():
        accepted = "a process that has not used CUDA yet"
        raise UsageError(rejected("process of a release on a CPU", "one that has", accepted))


def _stand_in(release: Release, source: Path) -> None:
    packages = packages_of(release)
    for folder in (source / "sglang", packages):
        if not folder.is_dir():
            how = f"specgate upstream --install {release.version}"
            raise UsageError(f"sglang {release.version} is not installed in {folder}; {how}")
    hide_gpus()
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ["SGLANG_FLASHINFER_WORKSPACE_SIZE"] = str(WORKSPACE_BYTES)
    sys.path[:0] = [str(source), str(packages)]
    sys.meta_path.insert(0, StubFinder())
    with importing(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in ("sglang.srt.utils.common", "sglang.srt.utils"):
            vars(import_module(module))["is_flashinfer_available"] = lambda: True
        apply_patches()
    watch_interpreter()


def active() -> Release:
    """The release of this process."""
    return _active[0][0]


def load(module: str) -> Any:
    """A module of the release, by its name below ``sglang.``."""
    return import_module(f"sglang.{module}")
