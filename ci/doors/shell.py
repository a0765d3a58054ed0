"""A shell in which one command after another is run, each with a time limit of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ci.doors.doors_table import CommandRow
from harness.core.signals import hear_sigint

SCRIPT = "set -a\ntrap 'env -0 > \"$0\"' EXIT\n"
"""Variables, exported or not, and the folder outlive the process as they outlive a line typed."""
TRACEBACK = "Traceback (most recent call last)"
INTERRUPT_CODES = (0, 128 + signal.SIGINT, -signal.SIGINT)
GRACE_S = 15.0
SHELL_POLL_S = 0.2
OWN = re.compile(r"_|SHLVL|VIRTUAL_ENV\w*|(PYTHON|TOX|COVERAGE|HYPOTHESIS|SPECGATE)\w*")
"""Variables of the lane, which are removed."""
QUICK_PIP = {"PIP_COMPILE": "0"}
"""What a few commands import is compiled as they import it; all of torch takes far longer."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended.

    Args:
        seconds: it took.
        output: standard output and error.
        problem: why it is red; empty where it is not.
    """

    seconds: float
    output: str
    problem: str = ""


def fresh(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a shell that has just been opened, from those of this process."""
    home = environment.get("VIRTUAL_ENV")
    paths = environment.get("PATH", os.defpath).split(os.pathsep)
    path = [one for one in paths if home is None or not Path(one).is_relative_to(home)]
    kept = {name: value for name, value in environment.items() if not OWN.fullmatch(name)}
    return kept | QUICK_PIP | {"PATH": os.pathsep.join(path)}


class Shell:
    """A bash session: variables and folder are kept from one command to the next.

    Args:
        folder: in which it is opened.
        environment: its variables.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.environment = dict(environment)

    def run(self, text: str, row: CommandRow) -> Outcome:
        """Run a command line and judge it by its row.

        Args:
            text: the command line, placeholders filled.
            row: its time limit and how it must end.
        """
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            state, log = Path(folder, "state"), Path(folder, "log")
            with log.open("wb") as file:
                process = subprocess.Popen(
                    ["bash", "-c", SCRIPT + text, str(state)],
                    cwd=self.folder,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=hear_sigint,
                )
            late = _attended(process, row, log)
            self._take_over(state)
            output = log.read_text(encoding="utf-8", errors="replace")
        problem = late or _problem(process.returncode, output, row)
        return Outcome(time.monotonic() - started, output, problem)

    def _take_over(self, state: Path) -> None:
        if not state.is_file():
            return
        lines = state.read_text(encoding="utf-8").split("\0")
        found = dict(line.split("=", 1) for line in lines if "=" in line)
        self.folder = Path(found.get("PWD", self.folder))
        own = ("_", "SHLVL", "PWD", "OLDPWD")
        self.environment = {name: value for name, value in found.items() if name not in own}


def _attended(process: subprocess.Popen[bytes], row: CommandRow, log: Path) -> str:
    """Wait for the end, interrupt a server that is ready; the problem, empty for none."""
    deadline = time.monotonic() + row.limit
    told = not row.ready
    try:
        while not _ended(process, SHELL_POLL_S):
            if not told and row.ready in log.read_text(encoding="utf-8", errors="replace"):
                told = True
                os.killpg(process.pid, signal.SIGINT)
            if time.monotonic() > deadline:
                return f"longer than {row.limit:.0f} s"
    finally:
        _stop(process)
    return "" if told else f"never said {row.ready!r}"


def _ended(process: subprocess.Popen[bytes], wait_s: float | None) -> bool:
    """Whether a process ends within so many seconds, which are waited for; None for any."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(wait_s)
    return process.returncode is not None


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a command and what it started, if any of it is left."""
    for how, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        _ended(process, wait_s)


def _problem(code: int, output: str, row: CommandRow) -> str:
    """Why a command that ended by itself is red; empty where it is not."""
    if (row.ready or row.refused) and TRACEBACK in output:
        return "a traceback"
    if row.ready:
        return "" if code in INTERRUPT_CODES else f"ended with {code} after Ctrl-C"
    if row.refused:
        last = (output.strip().splitlines() or [""])[-1]
        return "" if code and row.refused in last else f"ended with {code}, unlike {row.refused!r}"
    return f"ended with {code}" if code else ""
