"""Stages of a night: its commands in order, the same in a dry run and in a real one."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ci.nightly.machine import Machine
from ci.nightly.trials import TRIPLES
from harness.core.paths import ROOT
from harness.errors import UsageError, rejected

DIFFERENTIAL_SUITES = (
    "suites/differential",
    "suites/graphs",
    "suites/speculative",
    "suites/contract",
)
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
class PinnedArm:
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
        """Whether it is an interpreter that has sglang already."""
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
        """The stages that make its environment, none where there is one."""
        if self.is_python:
            return []
        environment, plugin = f"{name} environment", f"{name} plugin"
        make = (sys.executable, "-m", "venv", str(self.home))
        pip = (self.python, "-m", "pip", "install", "--quiet")
        return [
            Stage(environment, make),
            Stage(plugin, (*pip, "--no-deps", "--editable", str(ROOT)), (environment,)),
            Stage(name, (*pip, "--upgrade", self.pin), (plugin,)),
        ]


def arms_of(pins: Mapping[str, str]) -> dict[str, PinnedArm]:
    """Name -> arm.

    Args:
        pins: name -> pin.

    Raises:
        UsageError: a pin is neither a requirement nor a Python.
    """
    return {name: PinnedArm(pin, ROOT / ".tox" / "pins") for name, pin in pins.items()}


def plan(
    machine: Machine,
    config: dict[str, Any],
    report: Path,
    arms: Mapping[str, PinnedArm],
    options: Sequence[str] = (),
) -> list[Stage]:
    """The stages of a night on this machine.

    Args:
        machine: it, or the one that is planned for.
        config: ``nightly.toml``.
        report: folder of everything that is written.
        arms: the reference and the candidate; the suites of servers run on the candidate.
        options: of the bench, after those of ``config``; where both name one, these win.
    """
    out, bench = report.absolute(), config["bench"]
    installs = [stage for name, arm in arms.items() for stage in arm.stages(name)]
    installed = tuple(name for name, arm in arms.items() if not arm.is_python)
    serves = tuple(name for name in installed if name == "candidate")
    latency = ("--report", str(out), f"--junitxml={out}/latency.xml")
    on_cpu = ("--report", str(out / "cpu"), "--device", "cpu", "-n", "auto", "-k", "with")
    other_inputs = ("--draw", str(datetime.now(UTC).date().toordinal()))
    measured = (*_bench(machine, bench, out, arms), *options)
    return [
        Stage(
            "differential",
            module("harness", "gpu", "--report", str(out), *TRIPLES, *DIFFERENTIAL_SUITES),
        ),
        Stage("triples on cpu", module("harness", "run", *on_cpu, *other_inputs, *TRIPLES)),
        Stage("latency", module("harness", "latency", *latency)),
        *_properties(config["properties"]["seconds"], out),
        *installs,
        Stage("server", _server(machine, bench, out, arms["candidate"]), serves),
        Stage("bench", measured, installed),
    ]


def module(name: str, *args: str) -> tuple[str, ...]:
    """``python -m name args`` with this Python."""
    return (sys.executable, "-m", name, *args)


def _properties(seconds: float, out: Path) -> list[Stage]:
    """Property tests on examples of this night; what takes no device runs on the CPU."""
    budget = ("--property-seconds", str(seconds))
    return [
        Stage(
            f"properties on {device}",
            module(
                "pytest", *budget, "--device", device, f"--junitxml={out}/properties-{device}.xml"
            ),
        )
        for device in ("cpu", "cuda")
    ]


def _server(
    machine: Machine, config: dict[str, Any], out: Path, candidate: PinnedArm
) -> tuple[str, ...]:
    """The suites of servers, run on the candidate."""
    serves = ("--server", "sglang", "--server-python", candidate.python)
    what = ("--server-pair", config["pair"], "--server-backend", machine.row["attention_backend"])
    return module("pytest", "suites/server", "-n0", *serves, *what, f"--junitxml={out}/server.xml")


def _bench(
    machine: Machine, config: dict[str, Any], out: Path, arms: Mapping[str, PinnedArm]
) -> tuple[str, ...]:
    backend = machine.row["attention_backend"]
    common = f"sglang:shape={config['shape']},backend={backend}"
    a, b = (f"{common},name={name},python={arm.python}" for name, arm in arms.items())
    sides = ("--a", a, "--b", b, "--out", str(out / BENCH))
    return module("harness", "bench", *sides, *config["options"])
