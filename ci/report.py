"""``specgate report``: print the records of a run as a table, write their page."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from rich.console import Console
from rich.table import Table

from ci import gate, summary
from harness.core.argument_types import CommandLine
from harness.core.record import Record
from harness.core.whole_file import write_whole
from harness.errors import UsageError, rejected

REPORT_FOLDER = Path(__file__).parent


def times(ratio: float) -> str:
    """A ratio of error to allowed as shown: two digits below ten, ∞ for what is no number."""
    if not math.isfinite(ratio):
        return "∞"
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.3g}"


@dataclass(frozen=True)
class Bar:
    """One bar of an accept-length histogram; shares are of the tallest bar and of all steps."""

    length: int
    steps: int
    height: float
    share: float


def bars(counts: dict[int, int]) -> list[Bar]:
    """One bar per length from 1 to the longest seen, gaps included."""
    tallest, total = max(counts.values()), sum(counts.values())
    return [
        Bar(length, steps, steps / tallest, steps / total)
        for length in range(1, max(counts) + 1)
        for steps in [counts.get(length, 0)]
    ]


def histograms(records: Sequence[Record]) -> list[dict[str, object]]:
    """One entry per (pair, subject, execution), as the page draws it."""
    return [
        {
            "pair": pair,
            "subject": subject,
            "execution": execution,
            "bars": bars(counts),
            "steps": counts.total(),
            "mean": sum(length * steps for length, steps in counts.items()) / counts.total(),
        }
        for (pair, subject, execution), counts in summary.accept_lengths(records).items()
    ]


def row(record: Record) -> dict[str, object]:
    """A record as the page's script reads it: no environment, no number that JSON lacks."""
    data = asdict(record)
    del data["environment"], data["planned"], data["kind"], data["device"]
    data["red"], data["place"] = record.verdict.is_red, record.place
    data["worst"] = min(record.worst, sys.float_info.max)
    data["quantities"] = [
        [q.name, f"{q.error:.3g}", f"{q.allowed:.3g}", times(q.ratio), q.where, q.ratio > 1]
        for q in record.quantities
    ]
    return data


def embedded(value: object) -> Markup:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return Markup(text.replace("<", "\\u003c"))


def breakable(name: str, after: str = "-/") -> Markup:
    """A name that a narrow column may break after each of these letters."""
    return Markup("<wbr>").join(re.split(f"(?<=[{after}])", name))


def page(records: Sequence[Record]) -> str:
    """The report: one self-contained HTML document."""
    jinja = Environment(
        loader=FileSystemLoader(REPORT_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters |= {"times": times, "breakable": breakable}
    jinja.globals["stand_in"] = summary.stand_in
    told, records = records, summary.once(records)
    effect_names, effect_rows = summary.effects(records)
    return jinja.get_template("report.html").render(
        records=records,
        problems=gate.problems(told),
        census=summary.census(records),
        censuses=summary.censuses(records),
        by_kind=summary.by_kind(records),
        unverified=summary.unverified(records),
        dates=summary.dates(records),
        stand_ins=summary.stand_ins(records),
        columns=summary.columns(records),
        matrix=summary.matrix(records),
        reasons=summary.reasons(records),
        histograms=histograms(records),
        tokens=summary.tokens(records),
        effect_names=effect_names,
        effects=effect_rows,
        environments=[asdict(e) for e in dict.fromkeys(r.environment for r in records)],
        rate=summary.rate(records),
        rows=embedded([row(record) for record in records]),
    )


def write_page(path: Path, records: Sequence[Record]) -> None:
    """Write the page whole or not at all.

    Raises:
        UsageError: the path cannot be written.
    """
    try:
        write_whole(path, page(records))
    except OSError as error:
        raise UsageError(f"--out = {str(path)!r} is not accepted: {error.strerror}") from error


def table(records: Sequence[Record]) -> Table:
    """One line per subject: its trials, and the worst error / allowed of each execution."""
    executions = list(dict.fromkeys(execution for _, execution in summary.columns(records)))
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    shown.add_column("subject", no_wrap=True)
    for name in ("run", "red", "not run", *(f"worst {name}" for name in executions)):
        shown.add_column(name, justify="right")
    for (subject, place), cells in summary.matrix(records).items():
        whole = summary.merged(cells.values())
        by_execution = [
            summary.merged(cell for (_, e), cell in cells.items() if e == execution)
            for execution in executions
        ]
        counts = (whole.ran, whole.red, len(whole.records) - whole.ran)
        worst = (times(cell.worst) if cell.compared else "–" for cell in by_execution)
        style = "bold red" if whole.state == "red" else ""
        shown.add_row(f"{subject} @ {place}", *map(str, counts), *worst, style=style)
    return shown


def show(records: Sequence[Record], console: Console) -> None:
    """Print the table, the census of each kind, what no kind verified, and the rate."""
    records = summary.once(records)
    console.print(table(records))
    of_kinds = summary.censuses(records)
    lines = [f"{kind}: {count}" for kind, count in of_kinds.items() if len(of_kinds) > 1]
    for subject, reasons in summary.unverified(records).items():
        [(reason, _)] = reasons.most_common(1)
        lines.append(f"verified by no kind: {subject}: {reasons.total()} trials, {reason}")
    rate = f"{summary.rate(records):.1f} differential cases/s per worker"
    for line in (*lines, f"{summary.census(records)}; {rate}"):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def main(argv: Sequence[str]) -> int:
    """Exit code: 0, or 2 for records or a path that cannot be used."""
    parser = CommandLine(prog="specgate report", description=__doc__)
    files = "records.jsonl of a run, of each of its shards, or .xz that was carried here"
    parser.add_argument("records", type=Path, nargs="+", metavar="RECORDS", help=files)
    parser.add_argument("--out", type=Path, metavar="PAGE", help="HTML page to write")
    options = parser.parse_args(argv)
    try:
        records = [record for path in options.records for record in gate.read(path)]
        if not records:
            files = ", ".join(map(str, options.records))
            raise UsageError(rejected("records", files, "one or more records"))
        if options.out is not None:
            write_page(options.out, records)
    except UsageError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    show(records, Console())
    if options.out is not None:
        print(f"report: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
