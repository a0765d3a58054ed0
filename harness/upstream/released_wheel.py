"""The MHA backend of released sglang wheels, for comparison; nothing of theirs is kept here.

A wheel comes from the package index at run time. Two files of it are extracted, the backend and
its Triton kernel, and imported alone: every other module of sglang is a stub while they load.
Per EAGLE decode iteration the backend's own method runs once per phase: two draft steps, target
verify and draft extend v2.

* 0.5.13: torch operations, planned on the host, which reads the longest length from the device at
  each draft step; they cannot be captured.
* 0.5.14: torch operations and one Triton kernel per phase for the page table; nothing is read on
  the host, so they can be captured, though the release runs them before its graphs.
* 0.5.16: one fused Triton kernel per phase, recorded; it writes the whole width of each table.
* 0.5.23: the same kernel, bounded by the live pages.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from harness.core.argument_types import CommandLine
from harness.errors import UsageError, rejected
from harness.upstream.stub_modules import alone

BACKEND = "sglang.srt.layers.attention.trtllm_mha_backend"
CLASS = "TRTLLMHAAttnBackend"
FOLDER = "SPECGATE_WHEELS"
PLATFORMS = tuple(
    f"manylinux{tag}_x86_64" for tag in ("_2_34", "_2_28", "_2_27", "_2_24", "_2_17", "2014", "1")
)


@dataclass(frozen=True)
class Wheel:
    """One release.

    Args:
        version: of sglang.
        modules: extracted, the backend first.
    """

    version: str
    modules: tuple[str, ...]

    @classmethod
    def of_folder(cls, folder: Path) -> Wheel:
        """Of a whole release or checkout: the backend and every module named after it.

        Raises:
            UsageError: it has no such backend.
        """
        files = (folder / "sglang").rglob("trtllm_mha_*.py")
        names = {".".join(file.relative_to(folder).with_suffix("").parts) for file in files}
        if BACKEND not in names:
            raise UsageError(rejected("sglang", str(folder), f"a folder that holds {BACKEND}"))
        return cls(str(folder), (BACKEND, *sorted(names - {BACKEND})))

    @property
    def files(self) -> tuple[str, ...]:
        """Their paths in the wheel."""
        return tuple(module.replace(".", "/") + ".py" for module in self.modules)


_OPS = "sglang.kernels.ops"
WHEELS = {
    wheel.version: wheel
    for wheel in (
        Wheel("0.5.13", (BACKEND,)),
        Wheel("0.5.14", (BACKEND, "sglang.srt.layers.attention.triton_ops.trtllm_mha_page_table")),
        Wheel("0.5.16", (BACKEND, f"{_OPS}.kvcache.trtllm_mha_graph_metadata")),
        Wheel("0.5.23", (BACKEND, f"{_OPS}.attention.trtllm_mha_graph_metadata")),
    )
}


def cache() -> Path:
    """The folder of extracted files, by version; ``SPECGATE_WHEELS`` names another one."""
    given = os.environ.get(FOLDER)
    return Path(given).absolute() if given else Path.home() / ".cache/specgate/wheels"


def download(version: str, folder: Path) -> Path:
    """The wheel of a version of sglang, downloaded from the package index into ``folder``.

    Raises:
        UsageError: the index does not answer or lacks it.
    """
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    command += ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
    command += [word for name in PLATFORMS for word in ("--platform", name)]
    done = subprocess.run(
        [*command, f"sglang=={version}"], capture_output=True, text=True, check=False
    )
    archives = list(folder.glob("*.whl"))
    if done.returncode or not archives:
        said = done.stderr.strip().rpartition("\n")[2]
        raise UsageError(f"sglang {version} cannot be downloaded: {said}")
    return archives[0]


def fetch(wheel: Wheel, into: Path) -> None:
    """Download a wheel from the package index and extract its files.

    Raises:
        UsageError: the index does not answer or lacks it, or the wheel lacks a file.
    """
    with tempfile.TemporaryDirectory() as folder:
        extract(download(wheel.version, Path(folder)), wheel, into)


def extract(archive: Path, wheel: Wheel, into: Path) -> None:
    """Copy the files wanted out of a wheel to ``into/VERSION``.

    Raises:
        UsageError: it lacks one.
    """
    with zipfile.ZipFile(archive) as opened:
        if missing := set(wheel.files) - set(opened.namelist()):
            raise UsageError(f"{archive.name} lacks {', '.join(sorted(missing))}")
        for name in wheel.files:
            opened.extract(name, into / wheel.version)


def located(wheel: Wheel) -> Path:
    """The folder of a version's files, downloaded now if nobody did and no folder is given.

    Raises:
        UsageError: they are missing and cannot be had; the one line says how to fill the folder.
    """
    root = cache()
    folder = root / wheel.version
    if all((folder / name).is_file() for name in wheel.files):
        return folder
    reason = f"{FOLDER} is set, so nothing is downloaded"
    if FOLDER not in os.environ:
        try:
            fetch(wheel, root)
            return folder
        except UsageError as error:
            reason = str(error)
    how = f"fill it where there is a network with: python -m harness wheels --into {root}"
    raise UsageError(f"sglang {wheel.version} is not in {folder} ({reason}); {how}")


def load(wheel: Wheel, folder: Path | None = None) -> Any:
    """The release's MHA backend class; only its metadata methods can be used.

    Args:
        wheel: the release.
        folder: holds its files; where they are kept if None.

    Raises:
        UsageError: its files are missing.
    """
    with alone(folder or located(wheel), wheel.modules):
        return getattr(import_module(BACKEND), CLASS)


def main(argv: Sequence[str] | None = None) -> int:
    """``specgate wheels``: extract the files of released sglang that ``specgate latency`` runs."""
    parser = CommandLine(prog="specgate wheels", description=main.__doc__)
    filled = "gets a folder per release"
    parser.add_argument("--into", type=Path, default=cache(), metavar="FOLDER", help=filled)
    into = parser.parse_args(argv).into.absolute()
    for wheel in WHEELS.values():
        try:
            fetch(wheel, into)
        except UsageError as error:
            parser.exit(2, f"{error}\n")
        print(f"sglang {wheel.version}: {len(wheel.files)} files in {into / wheel.version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
