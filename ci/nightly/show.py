"""The plan of a night, printed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ci.nightly.checks import NightlyCheck
from ci.nightly.machine import Machine
from ci.nightly.stages import Stage
from ci.nightly.trials import PlannedTrial, per_subject

CHECK_MARKS = {True: "[green]yes[/]", False: "[bold red]no[/]", None: "[yellow]unknown[/]"}


def show(
    console: Console,
    machine: Machine,
    trials: Sequence[PlannedTrial],
    checks: Sequence[NightlyCheck],
    night: Sequence[Stage],
) -> None:
    """Print machine, checks, the trials of every subject and the stages."""
    console.print(f"machine: {machine}", markup=False)
    table = Table("check", "holds", "found", title="checks", title_justify="left")
    for check in checks:
        table.add_row(check.name, CHECK_MARKS[check.holds], escape(check.said))
    console.print(table)
    table = Table(title="planned trials", title_justify="left")
    table.add_column("subject", no_wrap=True)
    for name in ("run", "refused"):
        table.add_column(name, justify="right")
    table.add_column("most frequent reason")
    for subject, runs, refused, reason in per_subject(trials):
        table.add_row(subject, str(runs), str(refused), escape(reason))
    console.print(table)
    for number, stage in enumerate(night, start=1):
        console.print(f"stage {number}, {stage.name}: {shlex.join(stage.argv)}", markup=False)


def unverified_lines(left: Mapping[str, int], stages: Sequence[str], where: str) -> list[str]:
    """Trials and stages that a night leaves unverified on the target GPU, one line per subject.

    Args:
        left: subject -> trials.
        stages: that did not succeed there.
        where: that GPU.
    """
    if not left and not stages:
        return [f"everything planned for {where} was verified there"]
    lines = [f"not verified on {where}: {sum(left.values())} trials"]
    lines += [f"  {subject}: {count} trials" for subject, count in left.items()]
    return lines + ([f"  stages: {', '.join(stages)}"] if stages else [])
