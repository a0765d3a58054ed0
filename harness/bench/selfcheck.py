"""``python -m harness.bench.selfcheck``: false alarms of A/A, detection of an injected slowdown.

Each run is a benchmark of its own, by the command a user types: an A/A session and one whose arm B
sleeps 5 % of every step's time. Both arms are one embedded server, launched once per run and
switched by ``/slow_down`` trial by trial: a small shared machine is fast or slow for seconds by
more than the injected slowdown, launches of one command differ by several percent, and forty
sessions of launches would take hours. So this checks everything from a request to a verdict, but
not the differences between launches. A run that ended is not repeated; an interrupted one is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from harness.bench.analysis import Finding, findings
from harness.bench.jsonl import read
from harness.bench.session_records import Role, Trial
from harness.bench.stats.bench_verdict import BenchVerdict
from harness.core.argument_types import CommandLine, above_zero, count
from harness.core.paths import ROOT
from harness.server.launch.process import embedded, launch, run_guarded

WORKLOAD = "smoke-bs2-in32-out32"
FLAGGED = (BenchVerdict.REGRESSED, BenchVerdict.IMPROVED)


@dataclass(frozen=True, kw_only=True)
class SelfCheckOutcome:
    """The verdicts of one run.

    Args:
        same: of the A/A session, by metric.
        injected: of the session with the injected slowdown, by metric.
        blocks: most blocks of a case of either.
        seconds: of all trials.
    """

    same: dict[str, BenchVerdict]
    injected: dict[str, BenchVerdict]
    blocks: int
    seconds: float

    @property
    def left_alone(self) -> bool:
        """Whether A/A was measured and is neither REGRESSED nor IMPROVED."""
        return bool(self.same) and not {*self.same.values()} & {*FLAGGED, BenchVerdict.INVALID}

    @property
    def found(self) -> bool:
        """Whether the slowdown is REGRESSED."""
        return BenchVerdict.REGRESSED in self.injected.values()


def outcome(found: Sequence[Finding], seconds: float) -> SelfCheckOutcome:
    """The outcome of a run's findings."""
    by_role = {
        role: {f.metric: f.verdict for f in found if f.role is role}
        for role in (Role.SAME, Role.INJECTED)
    }
    return SelfCheckOutcome(
        same=by_role[Role.SAME],
        injected=by_role[Role.INJECTED],
        blocks=max((f.evidence.blocks for f in found), default=0),
        seconds=seconds,
    )


def run(number: int, options: argparse.Namespace) -> SelfCheckOutcome:
    """One benchmark on one launch, or the records of an earlier one that ended."""
    done = options.out.absolute() / f"run-{number}.jsonl"
    if done.exists():
        return _outcome_of(done)
    out = done.with_suffix(".part")
    out.unlink(missing_ok=True)
    with launch(embedded(options.pair), out.with_suffix(".log")) as server:
        words = ("--a", f"url:{server.url}", "--sessions", "A/A,injected", "--out", str(out))
        how = ("--design", "thue_morse", "--workloads", WORKLOAD, "--seed", f"selfcheck-{number}")
        more = ("--passes", str(options.passes), "--injected", str(options.injected))
        most = ("--blocks-at-most", str(options.blocks_at_most), "--warm-ups", "10")
        command = [sys.executable, "-m", "harness", "bench", *words, *how, *more, *most]
        run_guarded(command, cwd=ROOT)  # a run without a candidate is red, whatever it shows
    return _outcome_of(out.rename(done))


def _outcome_of(records: Path) -> SelfCheckOutcome:
    lines = list(read(records))
    seconds = sum(line.seconds for line in lines if isinstance(line, Trial))
    return outcome(findings(lines, detectable_too=False), seconds)


def table(outcomes: Sequence[SelfCheckOutcome]) -> Table:
    """One row per run, and the sums."""
    made = Table("run", "A/A", "injected", "blocks", "seconds", box=None, pad_edge=False)
    for number, one in enumerate(outcomes):
        cells = (
            ", ".join(f"{m} {r}" for m, r in side.items()) for side in (one.same, one.injected)
        )
        made.add_row(str(number), *cells, str(one.blocks), f"{one.seconds:.0f}")
    alone, found = (sum(o.left_alone for o in outcomes), sum(o.found for o in outcomes))
    total = sum(one.seconds for one in outcomes)
    runs = len(outcomes)
    made.add_row(
        "all", f"{alone} of {runs} left alone", f"{found} of {runs} found", "", f"{total:.0f}"
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every A/A session was left alone and every injected slowdown found, else 1."""
    parser = CommandLine(prog="python -m harness.bench.selfcheck", description=__doc__)
    parser.add_argument(
        "--runs", type=count, default=20, metavar="N", help="times that both sessions are run"
    )
    parser.add_argument("--pair", default="gqa", help="shipped pair that is served")
    parser.add_argument(
        "--injected", type=above_zero, default=0.05, metavar="PART", help="slowdown; 0.05 is 5 %%"
    )
    parser.add_argument("--passes", type=count, default=1, metavar="N", help="passes per trial")
    parser.add_argument(
        "--blocks-at-most", type=count, default=32, metavar="N", help="blocks per workload"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("report/selfcheck"),
        metavar="FOLDER",
        help="of the records",
    )
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    outcomes = [run(number, options) for number in range(options.runs)]
    Console(width=160).print(table(outcomes))
    return int(not all(one.left_alone and one.found for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
