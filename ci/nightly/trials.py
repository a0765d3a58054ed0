"""Differential trials planned for a GPU, and those left unverified there."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ci.nightly.checks import started
from ci.nightly.machine import Sm, shown
from harness.core.record import Record, Verdict
from harness.errors import UsageError

TRIPLES = ("--covering", "3")
"""Options of a run whose covering rows have every feasible triple of values."""


@dataclass(frozen=True)
class PlannedTrial:
    """A planned differential trial; ``refused`` is why it will not run, empty if it will."""

    case: str
    subject: str
    mode: str
    execution: str
    refused: str


def planned(sm: Sm) -> list[PlannedTrial]:
    """Every differential trial of a GPU of this compute capability, wherever this runs.

    Raises:
        UsageError: the plan cannot be made; the message is its last line.
    """
    done = started("fixtures.planned", "--gpu", shown(sm), *TRIPLES)
    if done.returncode:
        raise UsageError(f"no plan: {(done.stderr.strip().splitlines() or ['no cause given'])[-1]}")
    rows = json.loads(done.stdout)
    return [PlannedTrial(*(name or "" for name in row)) for row in rows]


def per_subject(trials: Iterable[PlannedTrial]) -> list[tuple[str, int, int, str]]:
    """(subject, trials that run, refused ones, their most frequent reason)."""
    groups: defaultdict[str, list[PlannedTrial]] = defaultdict(list)
    for trial in trials:
        groups[trial.subject].append(trial)
    rows = []
    for subject, group in sorted(groups.items()):
        reasons = Counter(trial.refused for trial in group if trial.refused)
        often = max(reasons, key=lambda reason: reasons[reason], default="")
        rows.append((subject, len(group) - reasons.total(), reasons.total(), often))
    return rows


def unverified(trials: Sequence[PlannedTrial], records: Iterable[Record]) -> dict[str, int]:
    """Subject -> planned trials of it that no record shows passed on a GPU.

    Args:
        trials: planned for the GPU in question.
        records: of runs on that GPU alone.
    """
    passed = {
        (record.case, record.subject, record.mode, record.execution)
        for record in records
        if record.verdict is Verdict.PASSED and record.device.startswith("cuda")
    }
    left = Counter(
        trial.subject
        for trial in trials
        if not trial.refused
        and (trial.case, trial.subject, trial.mode, trial.execution) not in passed
    )
    return dict(sorted(left.items()))
