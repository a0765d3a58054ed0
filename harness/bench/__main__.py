"""``specgate compare RECORDS``: analyse the records of a benchmark again and print the findings."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from harness.bench.analysis import findings, verdict
from harness.bench.console import conclude
from harness.bench.jsonl import read
from harness.bench.session_records import Line
from harness.core.argument_types import CommandLine
from harness.errors import SpecgateError


def show(lines: Iterable[Line], console: Console) -> int:
    """Print the findings and the verdict.

    Returns:
        1 if the verdict is red, else 0.
    """
    run = verdict(findings(lines))
    console.print(conclude(run.findings, run.reasons, run.verdict))
    return int(run.verdict.is_red)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 for a red verdict, 2 for records that cannot be read."""
    parser = CommandLine(prog="specgate compare", description=__doc__)
    packed = "a bench.jsonl, or one packed as bench.jsonl.gz"
    parser.add_argument("records", type=Path, metavar="RECORDS", help=packed)
    options = parser.parse_args(argv)
    try:
        return show(read(options.records), Console())
    except SpecgateError as error:
        print(f"specgate compare: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
