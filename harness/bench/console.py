"""A benchmark as people watch it: a bar a session, a table that changes after every wave."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from harness.bench.analysis import Finding
from harness.bench.session_records import Session, Trial
from harness.bench.stats.bench_verdict import BenchVerdict
from harness.bench.stats.sequential_test import Evidence

COLOURS = {
    BenchVerdict.REGRESSED: "bold red",
    BenchVerdict.INVALID: "red",
    BenchVerdict.INCONCLUSIVE: "yellow",
    BenchVerdict.OK: "green",
    BenchVerdict.IMPROVED: "bold green",
}
HEADS = ("session", "workload", "metric", "ruling", "B / A", "95 %", "e", "MDE", "blocks")


def percent(ratio: float | None) -> str:
    """A ratio as a change, such as "+3.1 %"; "…" where it has no bound, "–" where there is none."""
    if ratio is None or math.isnan(ratio):
        return "–"
    return f"{100 * (ratio - 1):+.1f} %" if 0.0 < ratio < math.inf else "…"


def interval(evidence: Evidence) -> str:
    """The bounds of its ratio, such as "-1.1 % to +6.9 %"."""
    return f"{percent(evidence.low)} to {percent(evidence.high)}"


def table(found: Sequence[Finding]) -> Table:
    """One row a finding, in their order."""
    made = Table(*HEADS, box=None, pad_edge=False)
    for f in found:
        evidence = f.evidence
        said = str(f.verdict) if evidence.over else f"({f.verdict})"
        dropped = f" +{evidence.dropped} dropped" if evidence.dropped else ""
        made.add_row(
            f.session.id,
            f.workload.id,
            f.metric,
            Text(said, style=COLOURS[f.verdict]),
            percent(evidence.ratio),
            interval(evidence),
            f"{evidence.e_value:.3g}",
            "" if f.mde is None else percent(math.exp(f.mde)),
            f"{evidence.blocks} of {f.case.bounds.n_max}{dropped}",
        )
    return made


class ConsoleView:
    """Shows trials and findings on a terminal; elsewhere a line a wave.

    Args:
        sessions: one bar each.
        console: where to.
    """

    def __init__(self, sessions: Sequence[Session], console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[last]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._tasks = {
            session.id: self._bars.add_task(session.id, total=_most(session), last="")
            for session in sessions
        }
        self._live = Live(self._bars, console=console, transient=True)

    def __enter__(self) -> ConsoleView:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: object, __: TracebackType | None
    ) -> None:
        self._live.stop()

    def trial(self, trial: Trial) -> None:
        """Move its session's bar on."""
        last = f"block {trial.block} {trial.arm} {trial.workload}"
        self._bars.update(self._tasks[trial.session], advance=1, last=last)

    def wave(self, found: Sequence[Finding]) -> None:
        """Redraw the table."""
        self._live.update(Group(table(found), self._bars))
        if not self._console.is_terminal:
            open_cases = sum(not f.evidence.over for f in found)
            blocks = max(f.evidence.blocks for f in found)
            self._console.print(f"{blocks} blocks, {open_cases} of {len(found)} cases undecided")


def _most(session: Session) -> int:
    """Trials if nothing is decided early."""
    places = len(session.design.orders[0])
    most = max(case.bounds.n_max for case in session.cases)
    return most * places * len(session.workloads)


def conclude(found: Sequence[Finding], reasons: Sequence[str], verdict: BenchVerdict) -> Group:
    """The last word: the table, the verdict and why."""
    why = [Text(f"  {reason}") for reason in reasons]
    return Group(table(found), Text(f"verdict: {verdict}", style=COLOURS[verdict]), *why)
