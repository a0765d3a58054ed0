"""One process, one release: its files and packages on the path, stubs and patches in place."""

from __future__ import annotations

import os
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

from harness.errors import UsageError, rejected
from harness.graphs.triton_launches import watch_interpreter
from harness.sglang.patches import apply_patches
from harness.sglang.releases import Release, packages_of, source_of
from harness.sglang.stubs import StubFinder

WORKSPACE_BYTES = 1 << 20
_active: list[tuple[Release, Path]] = []


def activate(release: Release, source: Path | None = None) -> None:
    """Make ``import sglang`` find a release's files, for the rest of the process.

    Args:
        release: decides the packages and the generation of the contract.
        source: the folder that holds ``sglang/``; the release's own unpacked wheel if None.

    Raises:
        UsageError: another release is active, or the files are missing.
    """
    source = source or source_of(release)
    if _active:
        if _active != [(release, source)]:
            raise UsageError(
                rejected(
                    "release", release.version, f"{_active[0][0].version}, the one of this process"
                )
            )
        return
    packages = packages_of(release)
    for folder in (source / "sglang", packages):
        if not folder.is_dir():
            how = f"specgate upstream --install {release.version}"
            raise UsageError(f"sglang {release.version} is not installed in {folder}; {how}")
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ["SGLANG_FLASHINFER_WORKSPACE_SIZE"] = str(WORKSPACE_BYTES)
    sys.path[:0] = [str(source), str(packages)]
    sys.meta_path.insert(0, StubFinder())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in ("sglang.srt.utils.common", "sglang.srt.utils"):
            vars(import_module(module))["is_flashinfer_available"] = lambda: True
        apply_patches()
    watch_interpreter()
    _active.append((release, source))


def active() -> Release:
    """The release of this process."""
    return _active[0][0]


def load(module: str) -> Any:
    """A module of the release, by its name below ``sglang.``."""
    return import_module(f"sglang.{module}")
