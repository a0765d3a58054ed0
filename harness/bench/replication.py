"""One benchmark repeated on several hosts: their effects side by side, and whether they agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from harness.bench.analysis import Finding, RunVerdict, findings, verdict
from harness.bench.analysis_blocks import split
from harness.bench.console import TABLE, change, interval
from harness.bench.jsonl import read
from harness.bench.session_records import ArmFacts, Role, Session
from harness.bench.stats.sequential_test import Evidence
from harness.errors import UsageError, rejected

SAID = {True: "yes", False: "no", None: "–"}


@dataclass(frozen=True, kw_only=True)
class HostRun:
    """What a host measured.

    Args:
        path: of its records.
        sessions: their plans.
        run: its verdict.
    """

    path: Path
    sessions: tuple[Session, ...]
    run: RunVerdict

    @property
    def device(self) -> str:
        """The device that it measured on."""
        return ", ".join(dict.fromkeys(session.environment.device for session in self.sessions))

    @property
    def candidates(self) -> dict[tuple[str, str], Finding]:
        """By (workload, metric)."""
        found = self.run.findings
        return {(f.workload.id, f.metric): f for f in found if f.role is Role.CANDIDATE}


def host_run(path: Path) -> HostRun:
    """The records of a host, judged.

    Raises:
        UsageError: the file cannot be read.
        ContractError: blocks are missing or not in the drawn order.
    """
    lines = list(read(path))
    return HostRun(path=path, sessions=tuple(split(lines)[0]), run=verdict(findings(lines)))


def check_repeated(hosts: Sequence[HostRun]) -> None:
    """Refuse to compare runs that did not ask the same, or one run with itself.

    Interpreters, folders, seeds and levels may differ from host to host, and what follows from a
    level or from the noise: passes, and which metrics are judged.

    Raises:
        UsageError: naming the file, what differs in it, and what the first file has.
    """
    first, *others = hosts
    for place, other in enumerate(others, start=1):
        if any(other.sessions == earlier.sessions for earlier in hosts[:place]):
            raise UsageError(rejected("records", str(other.path), "those of another run"))
        expected, obtained = _asked(first), _asked(other)
        for name in [*expected, *obtained]:
            if expected.get(name) != obtained.get(name):
                accepted = f"{expected.get(name)!r}, as in {first.path}"
                raise UsageError(rejected(f"{other.path}: {name}", obtained.get(name), accepted))


def _asked(host: HostRun) -> dict[str, Any]:
    """What every host must have asked alike, by a name for people."""
    asked: dict[str, Any] = {"sessions": [session.id for session in host.sessions]}
    for session in host.sessions:
        facts = {
            "arm A": _arm(session.a),
            "arm B": _arm(session.b),
            "design": session.design.name.lower(),
            "workloads": session.workloads,
        }
        asked |= {f"{name} of session {session.id}": fact for name, fact in facts.items()}
    return asked


def _arm(arm: ArmFacts) -> tuple[str, dict[str, str], float]:
    """Its slowdown too, which a name of the user's own does not tell."""
    return arm.name, arm.versions, arm.slowdown


def agree(evidence: Sequence[Evidence]) -> bool | None:
    """Whether their intervals have a ratio in common; None where one has no bound at all."""
    if not all(one.low > 0.0 or one.high < math.inf for one in evidence):
        return None
    return max(one.low for one in evidence) <= min(one.high for one in evidence)


def side_by_side(hosts: Sequence[HostRun]) -> Group:
    """A table per workload of what all hosts judged: each one's effect, and whether they agree."""
    heads = [word for number, _ in enumerate(hosts, 1) for word in (f"{number}: B / A", "95 %")]
    tables, apart = [], []
    common = [place for place in hosts[0].candidates if all(place in h.candidates for h in hosts)]
    for workload, rows in groupby(common, key=itemgetter(0)):
        made = Table("metric", *heads, "agree", title=f"hosts, {workload}", **TABLE)
        for place in rows:
            evidence = [host.candidates[place].evidence for host in hosts]
            alike = agree(evidence)
            cells = [cell for one in evidence for cell in (change(one), interval(one))]
            made.add_row(place[1], *cells, SAID[alike])
            apart += [" ".join(place)] * (alike is False)
        tables.append(made)
    return Group(*tables, *(Text(f"hosts disagree: {place}") for place in apart))
