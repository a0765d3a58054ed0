"""Terminal view of a benchmark: a bar per session, a table redrawn after every round of blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from types import TracebackType
from typing import Any

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from harness.bench.analysis import Finding, dropped, visible
from harness.bench.session_records import Role, Session, Trial
from harness.bench.stats.bench_verdict import BenchVerdict
from harness.bench.stats.sequential_test import Evidence
from harness.bench.wording import between, percent

VERDICT_STYLES = {
    BenchVerdict.REGRESSED: "bold red",
    BenchVerdict.INVALID: "red",
    BenchVerdict.BLIND: "red",
    BenchVerdict.INCONCLUSIVE: "yellow",
    BenchVerdict.OK: "green",
    BenchVerdict.IMPROVED: "bold green",
}
TABLE: dict[str, Any] = {
    "title_justify": "left",
    "title_style": "bold",
    "box": None,
    "pad_edge": False,
    "padding": (0, 1, 0, 0),
}
HEADS = ("metric", "verdict", "B / A", "95 %", "e", "MDE", "blocks")


def change(evidence: Evidence) -> str:
    """Its ratio as a change; "–" where it has no block."""
    return percent(evidence.ratio if evidence.blocks else None)


def interval(evidence: Evidence) -> str:
    """The bounds of its ratio, such as "-1.1 to +6.9 %"; "–" where nothing is bounded."""
    return between(evidence.low, evidence.high)


def e_value(evidence: Evidence) -> str:
    """The e-value of its verdict, in at most seven characters."""
    e = evidence.e_value
    return f"{e:.3g}" if 1.0 <= e < 1000.0 else f"{e:.2g}"


def table(found: Sequence[Finding]) -> Group:
    """One row per finding by session and workload, within 80 columns; then the dropped blocks."""
    rows = [_row(f) for f in found]
    columns = zip(HEADS, *rows, strict=True)
    widths = [max(cell_len(str(cell)) for cell in column) for column in columns]
    tables = []
    for place, here in groupby(zip(found, rows, strict=True), key=lambda one: _place(one[0])):
        made = Table(title=place, **TABLE)
        for head, width in zip(HEADS, widths, strict=True):
            made.add_column(head, width=width, overflow="fold")
        for _, row in here:
            made.add_row(*row)
        tables.append(made)
    return Group(*tables, *map(Text, dropped(found)))


def _place(f: Finding) -> str:
    return f"{f.session.id}, {f.workload.id}"


def _row(f: Finding) -> tuple[Text | str, ...]:
    evidence = f.evidence
    said = str(f.verdict) if evidence.over else f"({f.verdict})"
    return (
        f.metric,
        Text(said, style=VERDICT_STYLES[f.verdict]),
        change(evidence),
        interval(evidence),
        e_value(evidence) if evidence.blocks else "–",
        "" if f.mde is None else percent(math.exp(f.mde)),
        f"{evidence.blocks}/{f.case.bounds.n_max}",
    )


class ConsoleView:
    """Trials and findings on a terminal; elsewhere one line per round of blocks.

    Args:
        sessions: one bar each.
        console: that is written to.
    """

    def __init__(self, sessions: Sequence[Session], console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[last]}"),
            TimeElapsedColumn(),
            console=console,
            expand=True,
        )
        self._tasks = {
            session.id: self._bars.add_task(session.id, total=_most_trials(session), last="")
            for session in sessions
        }
        self._live = Live(self._bars, console=console, transient=True)
        self._printed: Sequence[str] = ()

    def __enter__(self) -> ConsoleView:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: object, __: TracebackType | None
    ) -> None:
        self._live.stop()

    def trial_done(self, trial: Trial) -> None:
        """Move its session's bar on."""
        last = f"block {trial.block} {trial.arm} {trial.workload}"
        self._bars.update(self._tasks[trial.session], advance=1, last=last)

    def blocks_done(self, found: Sequence[Finding]) -> None:
        """Redraw the table."""
        self._live.update(Group(table(found), self._bars))
        if not self._console.is_terminal:
            cases = [f for f in found if not f.is_part]
            open_cases = sum(not f.evidence.over for f in cases)
            blocks = max(f.evidence.blocks for f in cases)
            self._console.print(f"{blocks} blocks, {open_cases} of {len(cases)} cases undecided")
            self._print_new(dropped(found))

    def _print_new(self, lines: Sequence[str]) -> None:
        for line in lines:
            if line not in self._printed:
                self._console.print(line, markup=False, highlight=False)
        self._printed = lines


def _most_trials(session: Session) -> int:
    """Trials where no case is decided early."""
    places = len(session.design.orders[0])
    most = max(case.bounds.n_max for case in session.cases)
    return most * places * len(session.workloads)


def conclude(found: Sequence[Finding], reasons: Sequence[str], verdict: BenchVerdict) -> Group:
    """The result: the table, why candidates moved or are red, the verdict and its reasons."""
    candidates = [f for f in found if f.role is Role.CANDIDATE]
    asked = [f for f in candidates if f.is_part or f.has_moved or f.verdict.is_red]
    own = {f.id: [why for why in f.reasons if why not in reasons] for f in asked}
    told = [Text(f"{name}: {'; '.join(whys)}") for name, whys in own.items() if whys]
    why = [Text(f"  {reason}") for reason in reasons]
    said = Text(f"verdict: {verdict}", style=VERDICT_STYLES[verdict])
    return Group(*map(Text, filter(None, [visible(found)])), table(found), *told, said, *why)
