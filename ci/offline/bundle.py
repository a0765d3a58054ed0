"""Build the bundle: download wheels for the other machine, strip, pack, split."""

from __future__ import annotations

import hashlib
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ci.offline import device_code
from harness.errors import UsageError
from harness.upstream.released_wheel import WHEELS as RELEASES
from harness.upstream.released_wheel import fetch as fetch_release

OFFLINE_FOLDER = Path(__file__).parent
RELEASES_FOLDER = "specgate-wheels"
"""Where in the bundle the files of sglang's releases lie, for the latency suite."""
PYTHONS_FOLDER = "specgate-pythons"
"""Where those that serve lie, a folder each; an interpreter finds them before the lane's own."""
SERVED = "releases"
INSTALLED = ("purelib", "platlib")
STRIPPED_FROM = 1 << 20
EXECUTABLE = 0o111


def specification() -> dict[str, Any]:
    """``bundle.toml``."""
    with (OFFLINE_FOLDER / "bundle.toml").open("rb") as file:
        return tomllib.load(file)


def build(out: Path, part_size: int, lanes: Sequence[str] = ("gpu",)) -> list[Path]:
    """Write the bundle's parts, ``OUT/part-N/DIGEST.N-of-COUNT``, and remove those of an older one.

    Args:
        out: made where missing.
        part_size: bytes of a part at most.
        lanes: what will run on it.

    Raises:
        UsageError: a package cannot be downloaded.
    """
    spec = specification()
    tables = [*dict.fromkeys(table for lane in lanes for table in spec["lanes"][lane])]
    packages = {k: v for table in tables if table != SERVED for k, v in spec[table].items()}
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder, "site")
        of_folders = {site: packages}
        if SERVED in tables:
            of_folders |= {site / PYTHONS_FOLDER / k: v for k, v in spec[SERVED].items()}
        left_out, of_releases = spec["left_out"]["patterns"], spec["left_out"]["of_releases"]
        for number, (into, wanted) in enumerate(of_folders.items()):
            patterns = left_out if into == site else [*left_out, *of_releases]
            for wheel in download(wanted, spec["machine"], Path(folder, f"wheels-{number}")):
                unpack_wheel(wheel, into, patterns)
        strip(site, spec["machine"]["architecture"], spec["kernels"])
        for release in RELEASES.values():
            fetch_release(release, site / RELEASES_FOLDER)
        archive = Path(folder, "site.tar.xz")
        pack(site, archive)
        for old in out.glob("part-*"):
            shutil.rmtree(old)
        return list(split(archive, out, part_size))


def download(packages: dict[str, str], machine: dict[str, Any], folder: Path) -> list[Path]:
    """Wheels of exactly these versions for the other machine.

    Raises:
        UsageError: pip fails; it has said why.
    """
    tags = [f"manylinux_{glibc}" for glibc in machine["glibc"]] + ["manylinux2014", "manylinux1"]
    platforms = [word for tag in tags for word in ("--platform", f"{tag}_{machine['platform']}")]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    form = ["--no-deps", "--only-binary=:all:", "--implementation", "cp"]
    wanted = [f"{name}=={version}" for name, version in packages.items()]
    command = [*pip, *form, "--python-version", machine["python"], *platforms, "--dest", folder]
    if subprocess.run([*map(str, command), *wanted], check=False).returncode:
        raise UsageError("the packages of bundle.toml cannot be downloaded")
    return sorted(folder.glob("*.whl"))


def unpack_wheel(wheel: Path, site: Path, left_out: Iterable[str]) -> None:
    """Lay a wheel's modules and metadata out as an installer does, without what is left out."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if member.is_dir() or any(fnmatch(member.filename, name) for name in left_out):
                continue
            top, _, rest = member.filename.partition("/")
            if top.endswith(".data") and rest.startswith(INSTALLED):
                member.filename = rest.partition("/")[2]
            path = Path(archive.extract(member, site))
            if member.external_attr >> 16 & EXECUTABLE:
                path.chmod(path.stat().st_mode | EXECUTABLE)


def strip(site: Path, architecture: int, kernels: Mapping[str, str]) -> None:
    """Remove from large libraries what that GPU does not load, and symbols, if ``strip`` exists.

    Args:
        site: searched for libraries.
        architecture: of the GPU.
        kernels: by a library's name, the pattern of those that stay.
    """
    tool = shutil.which("strip")
    for library in site.rglob("*.so*"):
        if library.stat().st_size < STRIPPED_FROM:
            continue
        device_code.keep(library, architecture, kernels.get(library.name, ""))
        if tool:
            subprocess.run([tool, "--strip-unneeded", str(library)], check=False)


def pack(site: Path, archive: Path) -> None:
    """The same files give the same bytes, whenever they were downloaded."""
    with lzma.open(archive, "wb", preset=6) as file, tarfile.open(fileobj=file, mode="w|") as tar:
        for path in sorted(site.rglob("*")):
            entry = tar.gettarinfo(path, str(path.relative_to(site)))
            entry.mtime = entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            if entry.isreg():
                with path.open("rb") as content:
                    tar.addfile(entry, content)
            elif entry.isdir():
                tar.addfile(entry)


def split(archive: Path, out: Path, part_size: int) -> Iterator[Path]:
    """Parts in folders of their own, so that each can travel alone; their names tell the whole."""
    with archive.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        count = -(-os.fstat(file.fileno()).st_size // part_size)
        file.seek(0)
        for number in range(count):
            part = out / f"part-{number}" / f"{digest}.{number}-of-{count}"
            part.parent.mkdir(parents=True)
            part.write_bytes(file.read(part_size))
            yield part
