"""Lanes as work for a cluster: the rows of ``cluster.toml`` on the kinds that are there."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from ci.cluster.machine import CPU
from ci.cluster.work import LaneWork
from harness.core.paths import ROOT
from harness.core.tree import digest
from harness.errors import UsageError, rejected

TABLE = Path(__file__).with_name("cluster.toml")
PYTEST = ("-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider")
CHECKED = {CPU: ("torch",), "gpu": ("torch", "flashinfer-python", "sglang-kernel")}
"""Stack -> what must be of the version that its constraints pin."""


def rows() -> dict[str, dict[str, Any]]:
    """``cluster.toml``."""
    with TABLE.open("rb") as file:
        return tomllib.load(file)


def versions(stack: str) -> dict[str, str]:
    """Distribution -> pinned version, of a stack's ``CHECKED``."""
    text = (ROOT / "ci" / f"constraints-{stack}.txt").read_text(encoding="utf-8")
    pins = dict(line.split("==") for line in text.splitlines() if "==" in line)
    return {name: pins[name] for name in CHECKED[stack]}


def kinds_of(lane: str, wanted: Collection[str]) -> list[str]:
    """Those of the wanted kinds that a lane is for.

    Raises:
        UsageError: the lane cannot be spread.
    """
    if lane not in rows():
        raise UsageError(rejected("lane", lane, ", ".join(rows())))
    takes = rows()[lane]["kinds"]
    return [kind for kind in wanted if takes in ("any", CPU if kind == CPU else "gpu")]


def work(
    lane: str,
    kind: str,
    args: Sequence[str],
    *,
    is_declared: bool = False,
    per_gpu: int = 1,
) -> LaneWork:
    """A lane on a kind.

    Args:
        lane: its name.
        kind: of ``kinds_of``.
        args: handed to pytest, or to the lane's command.
        is_declared: the CPU stands in for the kind.
        per_gpu: batches that share a GPU.
    """
    row = rows()[lane]
    on_gpu = kind != CPU and not is_declared
    argv, items = tuple(row.get("command", ())), row.get("items", ())
    if suites := row.get("suites"):
        where = ("--device", "cuda:0" if on_gpu else CPU, "--kind", kind)
        argv = (*PYTEST, *suites, *where)
    return LaneWork(
        lane=lane,
        kind=kind,
        argv=(*argv, *args),
        items=tuple(chain.from_iterable(args if w == "{args}" else [w] for w in items)),
        item=row.get("item", ""),
        first=row.get("first", ""),
        is_declared=is_declared,
        share=1.0 if kind == CPU else 1.0 / per_gpu,
        is_alone=row.get("alone", False),
        versions=versions("gpu" if on_gpu else CPU),
        tree=digest(),
    )
