"""Outputs for GitHub: a step summary of at most 60 lines, and annotations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ci.bench.bench_report import BenchReport
from ci.bench.case_report import CaseReport
from harness.bench.console import change, e_value, interval
from harness.bench.stats.bench_verdict import BenchVerdict
from harness.bench.wording import percent

MOST_LINES = 60
MOST_NOTES = 40
"""More would leave no line to the verdict."""
BREAK = "  "
"""Of a line, in Markdown."""
LEVELS = {
    BenchVerdict.REGRESSED: "error",
    BenchVerdict.INVALID: "error",
    BenchVerdict.BLIND: "error",
    BenchVerdict.INCONCLUSIVE: "warning",
    BenchVerdict.IMPROVED: "notice",
}
MOST_ANNOTATIONS = 10
"""Per level and step; GitHub drops further ones."""
TABLE_HEAD = (
    "| case | verdict | B / A | 95 % interval | e | MDE | blocks |\n|---|---|--:|---|--:|--:|--:|"
)


def summary(report: BenchReport, *, notes: Sequence[str] = (), link: str = "") -> str:
    """Markdown: the verdict, the arms, the controls and whatever is not OK, worst first.

    Args:
        report: of the run.
        notes: further lines, the most important first.
        link: of the whole report, empty for none.
    """
    head = [f"## specgate bench: {report.title}", "", report.sentence, ""]
    head += [f"* {report.visible}"] if report.visible else []
    head += [
        f"* {line}"
        for line in (
            *report.arms,
            *report.controls,
            *report.dropped,
            *report.unknown_conditions,
        )
    ]
    further = len(notes) - MOST_NOTES
    told = [*notes[:MOST_NOTES], *([f"… and {further} more notes."] if further > 0 else [])]
    tail = ["", *(note + BREAK for note in told)] if told else []
    tail += [line for reason in report.reasons[:3] for line in ("", reason)]
    tail += ["", f"[The whole report]({link})"] if link else []
    rows = [row for row in report.judged if row.verdict is not BenchVerdict.OK]
    others = len(tail) + len(TABLE_HEAD.splitlines()) + 3
    head = head[: MOST_LINES - others]  # A busy machine drops blocks of every workload.
    room = MOST_LINES - others - len(head)
    table = ["", TABLE_HEAD, *map(_row, rows[:room])] if rows else []
    hidden = len(rows) - room
    more = ["", f"… and {hidden} more in the report."] if hidden > 0 else []
    lines = "\n".join([*head, *table, *more, *tail]).splitlines()
    return "\n".join(lines[:MOST_LINES]) + "\n"


def _row(row: CaseReport) -> str:
    e = row.evidence
    cells = (
        row.case,
        f"**{row.verdict}**" if row.is_red else str(row.verdict),
        change(e),
        interval(e),
        e_value(e),
        percent(row.detectable),
        f"{e.blocks}" + (f" (+{e.dropped} dropped)" if e.dropped else ""),
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def remarks(report: BenchReport) -> Iterator[str]:
    """Workflow commands, the first ten of every level."""
    used = dict.fromkeys(LEVELS.values(), 0)
    failed_controls = [row for row in report.cases if row.is_control and row.is_red]
    for row in (*failed_controls, *report.judged):
        level = "error" if row.is_red else LEVELS.get(row.verdict)
        if level is None or used[level] == MOST_ANNOTATIONS:
            continue
        used[level] += 1
        yield f"::{level} title={_escaped(row.title, ':,')}::{_escaped(row.sentence)}"


def _escaped(text: str, further: str = "") -> str:
    for letter in "%\r\n" + further:
        text = text.replace(letter, f"%{ord(letter):02X}")
    return text
