"""``python -m ci.bench BENCH [--out DIR]``: write every report of a benchmark.

Exit code: 0 where nothing is red, 1 where something is, 2 for records that cannot be read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ci.bench import history, outputs
from harness.core.argument_types import CommandLine
from harness.errors import UsageError


def main(argv: Sequence[str]) -> int:
    """Write the reports and print the summary, and on GitHub the annotations."""
    parser = CommandLine(prog="python -m ci.bench", description=__doc__)
    parser.add_argument("bench", type=Path, metavar="BENCH", help="a bench.jsonl")
    parser.add_argument(
        "--out", type=Path, default=Path("report"), metavar="DIR", help="folder of what is written"
    )
    parser.add_argument(
        "--history",
        type=Path,
        metavar="FILE",
        help="series of earlier runs to add to (default: DIR/history.jsonl)",
    )
    parser.add_argument(
        "--without-controls",
        action="store_true",
        help="judge the candidates of a comparison that has none, as specgate campaign does",
    )
    options = parser.parse_args(argv)
    controlled = not options.without_controls
    past = options.history or options.out / history.FILE
    try:
        written = outputs.write(options.bench, options.out, past, controlled=controlled)
    except UsageError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    print(written.summary, end="")
    if os.environ.get("GITHUB_ACTIONS"):
        print(*written.remarks, sep="\n")
    return 1 if written.is_red else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
