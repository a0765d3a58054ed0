"""Installs releases of sglang for trial: the wheel's files, and the packages its import asks for.

Neither goes into the environment of the process: several releases pin different transformers.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from harness.errors import UsageError
from harness.sglang.releases import RELEASES, Release, find_release, packages_of, source_of
from harness.upstream.released_wheel import download

PACKAGES = (
    "aiohappyeyeballs==2.7.1",
    "aiohttp==3.14.5",
    "aiosignal==1.4.0",
    "apache-tvm-ffi==0.1.15.post2",
    "compressed-tensors==0.20.0",
    "dill==0.4.1",
    "einops==0.8.2",
    "filelock==4.2.11",
    "frozenlist==1.8.0",
    "gguf==0.19.0",
    "ipython==9.18.1",
    "loguru==0.7.3",
    "msgspec==0.22.0",
    "multidict==7.2.1",
    "openai==3.54.0",
    "orjson==3.13.0",
    "packaging==26.3",
    "partial-json-parser==0.2.1.1.post7",
    "pillow==13.0.0",
    "propcache==0.5.4",
    "pybase64==1.5.1",
    "pyyaml==6.0.3",
    "pyzmq==27.3.0",
    "regex==2026.11.15",
    "sentencepiece==0.2.3",
    "setproctitle==1.3.7",
    "sniffio==1.3.1",
    "tqdm==4.70.1",
    "traitlets==5.16.1",
    "xgrammar==0.2.8",
    "yarl==1.25.1",
)
"""What importing a backend of any release asks for besides this project's own packages."""

HUB_1 = (
    "httpcore==1.0.9",
    "httpx==0.28.1",
    "huggingface-hub==1.33.0",
    "tokenizers==0.22.2",
)
HUB_2 = ("huggingface-hub==2.4.0", "tokenizers==0.23.3")
HUBS = {"5.6.0": HUB_1, "5.8.1": HUB_1, "5.12.1": HUB_1, "5.19.0": HUB_2}
"""transformers -> the packages that it accepts in another version than others do."""


def install(release: Release, *, wheel: bool = True) -> None:
    """Download what is missing of a release; nothing half-written is left.

    Args:
        release: which.
        wheel: whether its own files are wanted; a checkout in their place wants packages alone.

    Raises:
        UsageError: the package index does not answer or lacks something.
    """
    if wheel and not source_of(release).is_dir():
        _install_wheel(release, source_of(release))
    if not packages_of(release).is_dir():
        _install_packages(release, packages_of(release))


def _install_wheel(release: Release, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        archive = download(release.version, Path(temporary))
        with zipfile.ZipFile(archive) as opened:
            opened.extractall(Path(temporary) / "unpacked")
        _settle(Path(temporary) / "unpacked", folder)


def _install_packages(release: Release, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    wanted = (f"transformers=={release.transformers}", *HUBS[release.transformers], *PACKAGES)
    target = Path(tempfile.mkdtemp(dir=folder.parent))
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target)]
    done = subprocess.run([*command, *wanted], capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(target)
        said = done.stderr.strip().rpartition("\n")[2]
        raise UsageError(f"packages of sglang {release.version} cannot be installed: {said}")
    target.chmod(0o755)
    _settle(target, folder)


def _settle(made: Path, folder: Path) -> None:
    """Put a finished folder in its place, unless another process was first."""
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(made)


def wanted(names: Iterable[str]) -> list[Release]:
    """The releases of these versions; every one for "all".

    Raises:
        UsageError: a version is not in the table.
    """
    chosen = list(names)
    return list(RELEASES.values()) if "all" in chosen else [find_release(name) for name in chosen]
