"""Checks before a night: signatures, packages, disk, options of the benchmark; no GPU needed."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from xml.etree import ElementTree as Xml

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from harness.core.paths import ROOT

SIGNATURES = "suites/contract/kernels/test_kernels_signatures.py"
GIB = 1 << 30


@dataclass(frozen=True)
class NightlyCheck:
    """One check: whether it holds (None: it cannot be made here), and why."""

    name: str
    holds: bool | None
    said: str


def started(module: str, *args: str) -> subprocess.CompletedProcess[str]:
    """``python -m module args``, run in the repository; its output."""
    return ran([sys.executable, "-m", module, *args])


def ran(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """A command, run in the repository; its output."""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def checks(
    extras: Sequence[str],
    folder: Path,
    free_gib: float,
    bench: Sequence[str],
    *,
    unpinned: bool = False,
) -> list[NightlyCheck]:
    """All of them, in the order they are printed."""
    stack = "gpu" if "gpu" in extras else "cpu"
    asked = accepted(extras) if unpinned else packages(extras, stack)
    return [signatures(), asked, disk(folder, free_gib), benchmark(bench)]


def signatures() -> NightlyCheck:
    """Whether every call of the providers binds to the installed kernel packages."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "junit.xml")
        quiet = ("-q", "-n0", "-p", "no:cacheprovider", f"--junitxml={report}")
        started("pytest", SIGNATURES, *quiet)
        if not report.is_file():
            return NightlyCheck("kernel signatures", False, "pytest left no report")
        [suite] = Xml.parse(report).getroot().iter("testsuite")
    tests, failures, errors, skipped = (
        int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")
    )
    wrong = failures + errors
    said = f"{tests - wrong - skipped} tests passed, {wrong} failed"
    if skipped:
        said += f"; {skipped} skipped, because a kernel package is not installed"
    holds = None if skipped and not wrong else not wrong and tests > 0
    return NightlyCheck("kernel signatures", holds, said)


def packages(extras: Sequence[str], stack: str) -> NightlyCheck:
    """Whether every requirement of these extras is installed at its pinned version."""
    pins = dict(pinned("constraints.txt", f"constraints-{stack}.txt"))
    wanted = requirements(extras)
    wrong = []
    for requirement in wanted:
        name, found = canonicalize_name(requirement.name), installed(requirement) or "none"
        if name not in pins:
            wrong.append(f"{name} {found} is installed, nothing is pinned")
        elif found != pins[name]:
            wrong.append(f"{name} {pins[name]} is pinned, {found} is installed")
    said = "; ".join(wrong) or f"{len(wanted)} requirements are installed as pinned for {stack}"
    return NightlyCheck("packages", not wrong, said)


def accepted(extras: Sequence[str]) -> NightlyCheck:
    """Whether every requirement of these extras is installed at a version that it accepts."""
    wanted = [(requirement, installed(requirement)) for requirement in requirements(extras)]
    wrong = [
        f"{requirement} is required, {found or 'none'} is installed"
        for requirement, found in wanted
        if found is None or found not in requirement.specifier
    ]
    here = ", ".join(f"{requirement.name} {found}" for requirement, found in wanted)
    return NightlyCheck(
        "packages", not wrong, "; ".join(wrong) or f"not held to their pins: {here}"
    )


def pinned(*names: str) -> Iterator[tuple[str, str]]:
    """(package, version) of constraints files."""
    for name in names:
        for line in (ROOT / "ci" / name).read_text(encoding="utf-8").splitlines():
            if match := re.match(r"([\w.-]+)==(\S+)", line):
                yield canonicalize_name(match[1]), match[2]


def requirements(extras: Collection[str]) -> list[Requirement]:
    """Requirements of the project and these extras on this platform."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    more = [line for extra in extras for line in project["optional-dependencies"][extra]]
    wanted = map(Requirement, [*project["dependencies"], *more])
    return [one for one in wanted if one.marker is None or one.marker.evaluate()]


def installed(requirement: Requirement) -> str | None:
    """Public version of the package, None where there is none."""
    try:
        return version(canonicalize_name(requirement.name)).partition("+")[0]
    except PackageNotFoundError:
        return None


def disk(folder: Path, free_gib: float) -> NightlyCheck:
    """Whether there is room for two arms and their compiled kernels."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free / GIB
    said = f"{math.floor(free)} GiB free, {free_gib:.0f} are needed"
    return NightlyCheck("disk", free >= free_gib, said)


def benchmark(argv: Sequence[str]) -> NightlyCheck:
    """Whether the benchmark understands its command line."""
    done = ran([*argv, "--dry-run"])
    holds = done.returncode == 0
    said = (done.stdout if holds else done.stderr).strip().rpartition("\n")[2]
    return NightlyCheck("benchmark", holds, said)
