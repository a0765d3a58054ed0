"""All outputs of a run, written into one folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ci.bench import exports, github, history, junit, latency_table, pytorch_benchmark
from ci.bench.bench_report import BenchReport
from ci.bench.page import page
from harness.core.whole_file import write_whole
from harness.errors import UsageError, rejected

PAGE, SUMMARY = "bench.html", "summary.md"


@dataclass(frozen=True)
class Written:
    """The result of a run: whether a gate fails, and the summary as Markdown."""

    is_red: bool
    summary: str
    remarks: tuple[str, ...]


def write(
    bench: Path, folder: Path, past: Path, *, notes: Sequence[str] = (), controlled: bool = True
) -> Written:
    """Add the run to its history, then write its outputs.

    Args:
        bench: a ``bench.jsonl``.
        folder: made where missing; gets bench.xml, bench.json, bench.pytorch.json,
            bench.openmetrics.txt, summary.md and bench.html. Figures of a ``latency.json`` in it go
            into bench.json and the OpenMetrics.
        past: file of the history, made where missing.
        notes: further lines of the summary.
        controlled: whether the controls must be there and as they should.

    Raises:
        UsageError: the records cannot be read, or the folder cannot be written.
    """
    report = BenchReport.read(bench, controlled=controlled)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        figures = latency_table.read(folder / latency_table.LATENCY_FILE)
        series = history.all_series(history.append(past, report.entries()))
        summary = github.summary(report, notes=[*notes, *history.notes(series)], link=PAGE)
        texts = {
            "bench.xml": junit.document(report.cases),
            "bench.json": exports.smaller_is_better(report.cases, figures),
            "bench.openmetrics.txt": exports.openmetrics(report.cases, figures),
            "bench.pytorch.json": pytorch_benchmark.document(report.cases),
            SUMMARY: summary,
            PAGE: page(report, series),
        }
        for name, text in texts.items():
            write_whole(folder / name, text)
    except OSError as error:
        raise UsageError(rejected("folder", str(folder), f"a writable one ({error})")) from error
    return Written(report.is_red, summary, tuple(github.remarks(report)))
