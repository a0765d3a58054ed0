"""``specgate compare RECORDS…``: analyse the records of a benchmark again and print the findings.

Of one benchmark that was repeated on several hosts, every host's findings are printed, and then
their effects side by side.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from harness.bench.analysis import RunVerdict, findings, verdict
from harness.bench.console import conclude
from harness.bench.replication import check_repeated, host_run, side_by_side
from harness.bench.session_records import Line
from harness.core.argument_types import CommandLine
from harness.errors import SpecgateError


def show(lines: Iterable[Line], console: Console) -> int:
    """Print the findings and the verdict.

    Returns:
        1 if the verdict is red, else 0.
    """
    return _show(verdict(findings(lines)), console)


def _show(run: RunVerdict, console: Console) -> int:
    console.print(conclude(run.findings, run.reasons, run.verdict))
    return int(run.verdict.is_red)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 for a red verdict of any host, 2 for records that cannot be compared."""
    parser = CommandLine(prog="specgate compare", description=__doc__)
    packed = "a bench.jsonl, or one packed as bench.jsonl.gz; one per host"
    parser.add_argument("records", type=Path, nargs="+", metavar="RECORDS", help=packed)
    options = parser.parse_args(argv)
    try:
        hosts = [host_run(path) for path in options.records]
        check_repeated(hosts)
    except SpecgateError as error:
        print(f"specgate compare: {error}", file=sys.stderr)
        return 2
    console = Console()
    if len(hosts) == 1:
        return _show(hosts[0].run, console)
    codes = []
    for number, host in enumerate(hosts, start=1):
        console.print(f"{number}: {host.path}, {host.device}", markup=False, highlight=False)
        codes.append(_show(host.run, console))
    console.print(side_by_side(hosts))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
