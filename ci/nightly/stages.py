"""What a night runs, in order: commands alone, so that a dry run shows what a real one starts."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ci.nightly.checks import ROOT
from ci.nightly.machine import Machine
from harness.errors import UsageError, rejected

DIFFERENTIAL = ("suites/differential", "suites/graphs", "suites/speculative", "suites/contract")
BENCH = "bench.jsonl"
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
    out, bench = report.absolute(), config["bench"]
    pins = {"reference": reference, "candidate": candidate}
    arms = {name: Arm(pin, ROOT / ".tox" / "pins") for name, pin in pins.items()}
    installs = [stage for name, arm in arms.items() for stage in arm.stages(name)]
    needs = tuple(stage.name for stage in installs if stage.needs)
    return [
        Stage("differential", module("harness", "gpu", "--report", str(out), *DIFFERENTIAL)),
        Stage("server", _server(machine, bench, out)),
        Stage("latency", module("harness", "latency", f"--junitxml={out}/latency.xml")),
        *installs,
        Stage("bench", _bench(machine, bench, out, arms), needs),
    ]


def module(name: str, *args: str) -> tuple[str, ...]:
    """``python -m name args`` with this Python."""
    return (sys.executable, "-m", name, *args)


def _server(machine: Machine, config: dict[str, Any], out: Path) -> tuple[str, ...]:
    """The installed sglang where there is one, the embedded server otherwise."""
    chosen: tuple[str, ...] = ("--server", "embedded")
    if find_spec("sglang"):
        backend = str(machine.row["attention_backend"])
        chosen = (
            "--server",
            "sglang",
            "--server-pair",
            config["pair"],
            "--server-backend",
            backend,
        )
    return module("pytest", "suites/server", "-n0", *chosen, f"--junitxml={out}/server.xml")


def _bench(
    machine: Machine, config: dict[str, Any], out: Path, arms: dict[str, Arm]
) -> tuple[str, ...]:
    common = f"sglang:pair={config['pair']},backend={machine.row['attention_backend']}"
    a, b = (f"{common},name={name},python={arm.python}" for name, arm in arms.items())
    limits = ("--sessions", config["sessions"], "--seconds", str(config["seconds"]))
    sides = ("--a", a, "--b", b, "--out", str(out / BENCH))
    return module("harness", "bench", *sides, *limits)
