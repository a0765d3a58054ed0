"""Report of a run: its cases, and the sentences at the head of every output."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ci.bench.case_report import CONTROLS, CaseReport
from ci.bench.history import Entry
from ci.summary import minute
from harness.bench.analysis import (
    WORST_FIRST,
    Finding,
    RunVerdict,
    dropped,
    findings,
    verdict,
    visible,
)
from harness.bench.jsonl import read
from harness.bench.session_records import ArmFacts, Line, Session, Trial
from harness.bench.stats.validity import unknown_conditions
from harness.core.record import Environment
from harness.errors import UsageError

IMAGE = ("platform", "driver", "cuda", "torch", "triton", "flashinfer", "sgl_kernel")
"""Facts of the environment that both arms share."""


@dataclass(frozen=True)
class BenchReport:
    """The content of every output.

    Args:
        run: judged findings.
        trials: every trial that they rest on.
    """

    run: RunVerdict
    trials: tuple[Trial, ...]

    @classmethod
    def of(cls, lines: Iterable[Line], *, controlled: bool = True) -> BenchReport:
        """Of the lines of a ``bench.jsonl``.

        Args:
            lines: of one run.
            controlled: whether its controls must be there and as they should.

        Raises:
            UsageError: there is no session among them.
        """
        known = list(lines)
        found = findings(known)
        if not found:
            raise UsageError("bench records hold no planned case: nothing was measured")
        trials = tuple(line for line in known if isinstance(line, Trial))
        return cls(verdict(found, controlled=controlled), trials)

    @classmethod
    def read(cls, path: Path, *, controlled: bool = True) -> BenchReport:
        """Of a ``bench.jsonl``; see ``of``.

        Raises:
            UsageError: it is missing, broken or empty.
        """
        return cls.of(read(path), controlled=controlled)

    @cached_property
    def cases(self) -> tuple[CaseReport, ...]:
        """Those that gates and files know, in the order of the plans."""
        return tuple(row for row in self.rows if not row.finding.is_part)

    @cached_property
    def rows(self) -> tuple[CaseReport, ...]:
        """These and the parts of steps."""
        return tuple(CaseReport(found, self._seconds(found)) for found in self.run.findings)

    def _seconds(self, found: Finding) -> float:
        return sum(
            trial.seconds
            for trial in self.trials
            if (trial.session, trial.workload) == (found.session.id, found.workload.id)
        )

    @property
    def judged(self) -> list[CaseReport]:
        """Those of candidates, the worst first."""
        rows = [row for row in self.cases if not row.is_control]
        return sorted(rows, key=lambda row: (WORST_FIRST.index(row.verdict), -row.cost))

    @property
    def sessions(self) -> list[Session]:
        """In the order of the plans."""
        return list({row.session.id: row.session for row in self.cases}.values())

    @property
    def is_red(self) -> bool:
        """Whether a gate fails."""
        return self.run.verdict.is_red

    @property
    def title(self) -> str:
        """The verdict of the run."""
        return str(self.run.verdict).upper()

    @property
    def counts(self) -> dict[str, int]:
        """Verdict -> candidate rows that have it, the worst verdict first."""
        return _counts(self.judged)

    @property
    def sentence(self) -> str:
        """Cases by verdict, the device and the date."""
        counts = ", ".join(f"{count} {verdict}" for verdict, count in self.counts.items())
        first = self.sessions[0]
        where = f"{first.environment.device}, {minute(first.started)} UTC"
        return f"{counts or 'no case was judged'} of {len(self.judged)} cases on {where}"

    @property
    def arms(self) -> list[str]:
        """The arms, one line per session."""
        return [f"{s.id} ({s.role}): A = {_arm(s.a)}, B = {_arm(s.b)}" for s in self.sessions]

    @property
    def visible(self) -> str:
        """The effects that this run could have seen; empty without an A/A session."""
        return visible(self.run.findings)

    @property
    def controls(self) -> list[str]:
        """One line per control session."""
        lines = []
        for session in self.sessions:
            rows = [row for row in self.cases if row.session.id == session.id and row.is_control]
            if rows:
                accepted = " or ".join(CONTROLS[session.role].accepted)
                said = ", ".join(f"{n} {verdict}" for verdict, n in _counts(rows).items())
                lines.append(f"control {session.role}, should be {accepted}: {said}")
        return lines or ["no control was run"]

    @property
    def dropped(self) -> list[str]:
        """One line for each workload of a session with dropped blocks, with the reasons."""
        return dropped(self.run.findings)

    @property
    def unknown_conditions(self) -> list[str]:
        """One line of the conditions that no trial has, none where every one was asked for."""
        names = unknown_conditions([trial.conditions for trial in self.trials])
        return [f"unknown conditions: {', '.join(names)}"] if names else []

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the run is invalid."""
        return self.run.reasons

    def entries(self) -> list[Entry]:
        """The lines that the history keeps; cases without a valid block are left out."""
        return [_entry(row) for row in self.cases if not row.is_control and row.evidence.blocks]


def _counts(rows: Iterable[CaseReport]) -> dict[str, int]:
    verdicts = [row.verdict for row in rows]
    return {str(r): verdicts.count(r) for r in WORST_FIRST if r in verdicts}


def _entry(row: CaseReport) -> Entry:
    low, high = (bound if math.isfinite(bound) else None for bound in row.interval)
    return Entry(
        night=row.session.started,
        sku=row.sku,
        case=row.case,
        pin=_arm(row.session.a),
        image=image(row.session.environment),
        commit=row.session.environment.commit,
        verdict=row.verdict,
        cost=row.cost,
        low=low,
        high=high,
        e=row.evidence.e_regressed,
        blocks=row.evidence.blocks,
        higher_is_better=row.higher_is_better,
    )


def image(environment: Environment) -> str:
    """The software that both arms share, in one line."""
    known = ((name, getattr(environment, name)) for name in IMAGE)
    return ", ".join(f"{name} {fact}" for name, fact in known if fact)


def _arm(arm: ArmFacts) -> str:
    versions = " ".join(f"{name} {version}" for name, version in sorted(arm.versions.items()))
    return f"{arm.name} ({versions})" if versions else arm.name
