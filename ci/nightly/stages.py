"""What a night runs, in order: commands alone, so that a dry run shows what a real one starts."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ci.nightly.checks import ROOT
from ci.nightly.machine import Machine
from harness.errors import UsageError, rejected

DIFFERENTIAL = ("suites/differential", "suites/graphs", "suites/speculative", "suites/contract")
PIN = re.compile(r"[A-Za-z0-9][\w.-]*(==[\w.+!-]+)?")


@dataclass(frozen=True)
class Stage:
    """One command of the night.

    Args:
        name: in the summary.
        argv: what is started, in the repository.
        needs: stages that must have succeeded before.
    """

    name: str
    argv: tuple[str, ...]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Arm:
    """One side of the benchmark.

    Args:
        pin: a requirement such as "sglang==0.5.14", or the path of a Python that has sglang.
        folder: where environments of requirements are made.
    """

    pin: str
    folder: Path

    def __post_init__(self) -> None:
        if not self.is_python and not PIN.fullmatch(self.pin):
            accepted = "a requirement such as sglang==0.5.14, or an existing Python"
            raise UsageError(rejected("pin", self.pin, accepted))

    @property
    def is_python(self) -> bool:
        """Whether it was installed by somebody else."""
        return Path(self.pin).is_file()

    @property
    def home(self) -> Path:
        """Of its environment."""
        return self.folder / self.pin.replace("==", "-")

    @property
    def python(self) -> str:
        """Its interpreter."""
        return self.pin if self.is_python else str(self.home / "bin" / "python")

    def stages(self, name: str) -> list[Stage]:
        """What makes its environment; nothing where there is one."""
        if self.is_python:
            return []
        make = (sys.executable, "-m", "venv", str(self.home))
        pip = (self.python, "-m", "pip", "install", "--quiet", "--upgrade", self.pin)
        return [Stage(f"{name} environment", make), Stage(name, pip, (f"{name} environment",))]


def plan(
    machine: Machine, config: dict[str, Any], report: Path, *, reference: str, candidate: str
) -> list[Stage]:
    """The stages of a night on this machine.

    Raises:
        UsageError: a pin is neither a requirement nor a Python.
    """
    out = report.absolute()
    arms = [Arm(pin, ROOT / ".tox" / "pins") for pin in (reference, candidate)]
    installs = [*arms[0].stages("reference"), *arms[1].stages("candidate")]
    needs = tuple(stage.name for stage in installs if stage.needs)
    return [
        Stage("differential", module("harness", "gpu", "--report", str(out), *DIFFERENTIAL)),
        Stage("server", module("pytest", "suites/server", "-n0", f"--junitxml={out}/server.xml")),
        Stage("latency", module("harness", "latency", f"--junitxml={out}/latency.xml")),
        *installs,
        Stage("bench", _bench(machine, config["bench"], out, arms), needs),
    ]


def module(name: str, *args: str) -> tuple[str, ...]:
    """``python -m name args`` with this Python."""
    return (sys.executable, "-m", name, *args)


def _bench(
    machine: Machine, config: dict[str, Any], out: Path, arms: Sequence[Arm]
) -> tuple[str, ...]:
    models = [f"{side}={ROOT / config[side]}" for side in ("target", "draft")]
    common = ",".join((f"backend={machine.row['attention_backend']}", *models))
    specs = [f"sglang:{common},python={arm.python}" for arm in arms]
    limits = ("--sessions", config["sessions"], "--seconds", str(config["seconds"]))
    sides = ("--a", specs[0], "--b", specs[1], "--out", str(out / "bench.jsonl"))
    return module("harness", "bench", *sides, *limits)
