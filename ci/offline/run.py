"""Run a lane on a bundle: unpack it once, check the machine, start the lane's command."""

from __future__ import annotations

import compileall
import configparser
import hashlib
import os
import shlex
import sys
import tarfile
import tempfile
import warnings
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from io import BytesIO
from pathlib import Path
from typing import Any

from ci.carried import MOST_BYTES, SUFFIX, pack, sign, signature_of
from ci.child import carried_out
from ci.offline import checkout_metadata
from ci.offline.bundle import PYTHONS_FOLDER, RELEASES_FOLDER, specification
from harness.core.archives import extract
from harness.core.paths import ROOT
from harness.errors import UsageError, rejected
from harness.upstream.released_wheel import FOLDER as RELEASES

REPORT = "report"
"""Of the lanes of tox.ini."""
CACHE, JIT = "SPECGATE_CACHE", "FLASHINFER_WORKSPACE_BASE"
NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
"""Set in many images; an import of sglang takes 31 s with it and 17 s without."""


@dataclass(frozen=True, kw_only=True)
class Carry:
    """What becomes of a lane's records: one file, to be carried to the gate of all.

    Args:
        kind: that the GPU must be.
        is_declared: a dry run on the CPU, whatever is here.
        key: of SSH, that signs the file; None signs nothing.
    """

    kind: str
    is_declared: bool = False
    key: Path | None = None

    @property
    def args(self) -> list[str]:
        """For the lane."""
        return ["--kind", self.kind, *(["--device", "cpu"] if self.is_declared else [])]

    def file(self, report: Path) -> Path:
        """Where it is."""
        return report / f"{self.kind}{SUFFIX}"

    def write(self, report: Path) -> None:
        """Write the file beside the records, and say where it is.

        Raises:
            UsageError: there are no records of this kind, or they cannot be signed.
        """
        file = pack(report / "records.jsonl", self.kind, self.file(report))
        written = [file, *([sign(file, self.key)] if self.key else [])]
        for path in written:
            print(f"offline: {path} ({path.stat().st_size:,} bytes)")
        if file.stat().st_size > MOST_BYTES:
            print(f"offline: {file} is larger than {MOST_BYTES:,} bytes", file=sys.stderr)


def rehearse(lane: str, args: list[str], carry: Carry) -> int:
    """Exit code of a lane with what is installed here, in place of a bundle."""
    return carried_lane(lane, args, dict(os.environ), carry)


def carried_lane(lane: str, args: list[str], environment: dict[str, str], carry: Carry) -> int:
    """Exit code of a lane; its records are carried, red ones too."""
    words = command(lane, [*carry.args, *args])
    report = ROOT / REPORT
    file = carry.file(report)
    for of_a_run_before in (report / "records.jsonl", file, signature_of(file)):
        of_a_run_before.unlink(missing_ok=True)
    code = carried_out(words, environment)
    carry.write(report)
    return code


def run(bundle: Path, lane: str, args: list[str], carry: Carry | None = None) -> int:
    """Exit code of a lane, run by this Python with the bundle's packages and this checkout.

    Args:
        bundle: folder of ``part-*/``.
        lane: its name in ``tox.ini``.
        args: handed to it.
        carry: what becomes of its records.

    Raises:
        UsageError: the bundle is incomplete or damaged, or the machine is not the one it is for,
            or the project's metadata cannot be written.
    """
    check_machine(specification()["machine"])
    cache = Path(os.environ.get(CACHE) or Path.home() / ".cache" / "specgate").absolute()
    site = unpack(bundle, cache)
    write_pythons(site, cache)
    defaults = {JIT: str(cache / "jit"), RELEASES: str(site / RELEASES_FOLDER)}
    environment = defaults | os.environ | {"OMP_NUM_THREADS": "1"}
    Path(environment[JIT]).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        checkout_metadata.write(Path(folder), site)
        more = [*map(str, further(site)), *filter(None, [os.environ.get("PYTHONPATH")])]
        paths = [str(site), folder, str(ROOT), *more]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        environment.pop(NO_BYTECODE, None)
        if carry is not None:
            return carried_lane(lane, args, environment, carry)
        return carried_out(command(lane, args), environment)


def write_pythons(site: Path, cache: Path) -> None:
    """An interpreter of every release in the bundle, ``python-RELEASE``: this one and its path."""
    for release in (site / PYTHONS_FOLDER).glob("*"):
        path = f"{shlex.quote(str(release))}${{PYTHONPATH:+:$PYTHONPATH}}"
        script = f'#!/bin/sh\nPYTHONPATH={path} exec {shlex.quote(sys.executable)} "$@"\n'
        made = cache / f"python-{release.name}"
        made.write_text(script)
        made.chmod(0o755)


def further(site: Path) -> list[Path]:
    """Folders that packages add to the path by ``.pth`` files, which only installers have read."""
    lines = (line for file in sorted(site.glob("*.pth")) for line in file.read_text().splitlines())
    return [site / line for line in lines if line and (site / line).is_dir()]


def command(lane: str, args: list[str]) -> list[str]:
    """The command of a lane's tox environment, run by this Python."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    python, *words = shlex.split(tox[f"testenv:{lane}"]["commands"])
    if python != "python" or words.pop() != "{posargs}":
        raise UsageError(f"tox.ini: the {lane} lane is no longer python … {{posargs}}")
    return [sys.executable, *words, *args]


def check_machine(machine: dict[str, Any]) -> None:
    """Whether compiled packages of the bundle can be loaded here.

    Raises:
        UsageError: Python or torch is of another version.
    """
    python = "{}.{}".format(*sys.version_info)
    if python != machine["python"]:
        raise UsageError(rejected("python", python, machine["python"]))
    try:
        torch = version("torch").partition("+")[0]
    except PackageNotFoundError:
        torch = "none"
    if torch != machine["torch"]:
        raise UsageError(rejected("torch", torch, machine["torch"]))


def unpack(bundle: Path, cache: Path) -> Path:
    """Folder of the bundle's packages under ``cache``, unpacked at the first call.

    Raises:
        UsageError: a part is missing or damaged, or parts of several bundles are mixed.
    """
    digest, parts = parts_of(bundle)
    site = cache / digest[:16]
    if site.is_dir():
        return site
    packed = b"".join(part.read_bytes() for part in parts)
    if hashlib.sha256(packed).hexdigest() != digest:
        raise UsageError(
            rejected("bundle", str(bundle), "parts as they were built: carry it again")
        )
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        unfinished = Path(folder, "site")
        with tarfile.open(fileobj=BytesIO(packed), mode="r:xz") as tar:
            extract(tar, unfinished)
        try:
            unfinished.rename(site)
        except OSError:
            if not site.is_dir():  # else another run on the same cache was first
                raise
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other people's escape sequences
        compileall.compile_dir(site, quiet=2, workers=0)  # servers that start at once read it
    return site


def parts_of(bundle: Path) -> tuple[str, list[Path]]:
    """The digest of the whole and its parts in order.

    Raises:
        UsageError: there is no bundle, a part is missing, or there are parts of several.
    """
    found = {path.name: path for path in bundle.glob("part-*/*-of-*")}
    wholes = {(name.partition(".")[0], name.rpartition("-")[2]) for name in found}
    if len(wholes) != 1:
        wrong = f"a folder of one bundle, it has {len(wholes)}"
        raise UsageError(rejected("bundle", str(bundle), wrong))
    [(digest, count)] = wholes
    names = [f"{digest}.{number}-of-{count}" for number in range(int(count))]
    if missing := [name for name in names if name not in found]:
        raise UsageError(rejected("bundle", str(bundle), f"all parts, {missing[0]} among them"))
    return digest, [found[name] for name in names]
