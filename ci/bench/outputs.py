"""Every output of a night, written side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ci.bench import exports, github, history, junit, latency_table
from ci.bench.bench_report import BenchReport
from ci.bench.page import page
from harness.errors import UsageError, rejected

PAGE, SUMMARY = "bench.html", "summary.md"


@dataclass(frozen=True)
class Written:
    """What a night comes to: whether a gate fails, and the summary as Markdown."""

    is_red: bool
    summary: str
    remarks: tuple[str, ...]


def write(bench: Path, folder: Path, nights: Path, *, notes: Sequence[str] = ()) -> Written:
    """Add the night to its history, then write what people and tools read.

    Args:
        bench: a ``bench.jsonl``.
        folder: made where missing; gets bench.xml, bench.json, bench.openmetrics.txt, summary.md
            and bench.html. Figures of a ``latency.json`` in it go into the JSON and OpenMetrics.
        nights: the history, made where missing.
        notes: further lines of the summary.

    Raises:
        UsageError: the records cannot be read, or the folder cannot be written.
    """
    book = BenchReport.read(bench)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        figures = latency_table.read(folder / latency_table.FILE)
        series = history.all_series(history.append(nights, book.entries()))
        summary = github.summary(book, notes=[*history.notes(series), *notes], link=PAGE)
        texts = {
            "bench.xml": junit.document(book.rows),
            "bench.json": exports.smaller_is_better(book.rows, figures),
            "bench.openmetrics.txt": exports.openmetrics(book.rows, figures),
            SUMMARY: summary,
            PAGE: page(book, series),
        }
        for name, text in texts.items():
            _write(folder / name, text)
    except OSError as error:
        raise UsageError(rejected("folder", str(folder), f"a writable one ({error})")) from error
    return Written(book.is_red, summary, tuple(github.remarks(book)))


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)
