"""Environments of every set of extras, and the suites in each."""

from __future__ import annotations

import os
import shlex
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from ci.doors import extras
from ci.doors.doors_table import CommandRow, Table
from ci.doors.extras import Extras
from ci.doors.shell import Outcome, Shell, fresh
from ci.doors.tried import Tried

LIMIT_S = 1200.0
COLLECT = "-m pytest suites --collect-only -q -n0 -p no:cacheprovider"
RUN = "-m pytest -q -n0 -p no:cacheprovider"


def environments(table: Table, root: Path, into: Path, documents: Iterable[str]) -> Iterator[Tried]:
    """Results of every set of extras.

    A set with a package for GPUs is resolved against its pins, and the rest of it installed.

    Args:
        table: says which extras need a GPU.
        root: the clone.
        into: the environments are made here.
        documents: texts that name sets.
    """
    tox = (root / "tox.ini").read_text(encoding="utf-8")
    named = extras.of_tox(tox) | extras.of_documents(documents)
    for chosen in sorted(filter(table.gpu_extras.intersection, named), key=sorted):
        yield _resolved(chosen, root)
    for chosen in sorted({one - table.gpu_extras for one in named}, key=sorted):
        yield from _installed(chosen, table, root, into / "-".join(sorted(chosen)))


def _pip(python: str | Path, stack: str, *words: str) -> str:
    pins = [f"--constraint=ci/{name}.txt" for name in ("constraints", f"constraints-{stack}")]
    return shlex.join([str(python), "-m", "pip", "install", "--quiet", *pins, *words])


def _resolved(chosen: Extras, root: Path) -> Tried:
    """Whether pip finds a version of everything; nothing is installed."""
    wanted = extras.requirement(chosen)
    text = _pip(sys.executable, "gpu", "--dry-run", "--ignore-installed", wanted)
    return _tried(chosen, f"pip install --dry-run {wanted}", Shell(root, fresh(os.environ)), text)


def _installed(chosen: Extras, table: Table, root: Path, home: Path) -> Iterator[Tried]:
    """Install it, find the command, collect every suite, run a test of each folder."""
    shell, at = Shell(root, fresh(os.environ)), shlex.quote(str(home))
    python = shlex.quote(str(home / "bin/python"))
    wanted = extras.requirement(chosen)
    make = f"python3 -m venv {at} && {_pip(home / 'bin/python', 'cpu', '-e', wanted)}"
    made = _tried(chosen, f"pip install -e {wanted}", shell, make)
    yield made
    if made.problem:
        return
    elsewhere = f"(cd {at} && bin/specgate --help)"
    yield _tried(chosen, "specgate --help, in another folder", shell, elsewhere)
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    accepted = extras.kernel_packages(project, table.gpu_extras)
    report = home / "report.xml"
    at_report = shlex.quote(f"--junitxml={report}")
    collected = _tried(chosen, "pytest --collect-only", shell, f"{python} {COLLECT} {at_report}")
    yield _without_lack(collected, report, accepted)
    tests = extras.one_of_each_folder(collected.output)
    text = f"{python} {RUN} {at_report} {shlex.join(tests)}"
    ran = _tried(chosen, f"pytest, a test of each of {len(tests)} folders", shell, text)
    yield _without_lack(ran, report, accepted)


def _tried(chosen: Extras, asked: str, shell: Shell, text: str) -> Tried:
    ended: Outcome = shell.run(text, CommandRow(text, LIMIT_S))
    place = f"[{','.join(sorted(chosen))}]"
    return Tried(place, asked, "", ended.seconds, ended.output, ended.problem)


def _without_lack(tried: Tried, report: Path, accepted: Iterable[str]) -> Tried:
    """Red also where a test was skipped for want of a package."""
    reasons = extras.lacking(report, accepted) if report.is_file() else ["pytest left no report"]
    return replace(tried, problem=tried.problem or "; ".join(reasons))
