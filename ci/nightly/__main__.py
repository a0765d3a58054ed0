"""``python -m ci.nightly [--dry-run] [-- BENCH OPTIONS]``: check, run every stage, report.

Options after ``--`` go to ``specgate bench``, after those of ``nightly.toml``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from ci.bench import history
from ci.nightly import checks, machine, nightly_run, stages, trials
from ci.nightly.history_branch import HistoryBranch, night_of
from ci.nightly.show import show, unverified_lines
from harness.core.argument_types import CommandLine
from harness.errors import UsageError, rejected

REPORT = Path("report/nightly")
CPU_EXTRAS = ("test",)
NightlyConfig = dict[str, Any]


def parser(config: NightlyConfig) -> argparse.ArgumentParser:
    """The command line; its defaults are in ``nightly.toml``."""
    made = CommandLine(prog="python -m ci.nightly", description=__doc__)
    made.add_argument("--dry-run", action="store_true", help="plan and check, launch no kernel")
    made.add_argument(
        "--report", type=Path, default=REPORT, metavar="DIR", help="folder of the reports"
    )
    past = made.add_mutually_exclusive_group()
    past.add_argument(
        "--history",
        type=Path,
        metavar="FILE",
        help="series of earlier runs to add to (default: DIR/history.jsonl)",
    )
    branch = "branch of nights in this repository to read and append to; pushing it is up to you"
    past.add_argument("--history-branch", type=HistoryBranch, metavar="NAME", help=branch)
    bench = config["bench"]
    made.add_argument(
        "--reference", default=bench["reference"], metavar="PIN", help="package of arm A"
    )
    made.add_argument(
        "--candidate", default=bench["candidate"], metavar="PIN", help="package of arm B"
    )
    made.add_argument(
        "--attention-backend",
        metavar="NAME",
        help="instead of the one that nightly.toml has for the GPU",
    )
    made.add_argument("--unpinned", action="store_true", help="accept other versions of packages")
    made.add_argument("--gpu", metavar="MAJOR.MINOR", help="whose kernels a dry run plans for")
    return made


def nightly(config: NightlyConfig, options: argparse.Namespace, bench: Sequence[str]) -> int:
    """Exit code: 0 green, 1 red.

    Args:
        config: ``nightly.toml``.
        options: of the command line.
        bench: further options of the benchmark.

    Raises:
        UsageError: the options cannot be planned.
    """
    if options.gpu and not options.dry_run:
        raise UsageError(rejected("--gpu", options.gpu, "nothing: a real run asks the driver"))
    here = machine.detect(config, options.gpu).serving(options.attention_backend)
    branch: HistoryBranch | None = options.history_branch
    tonight = night_of(datetime.now(UTC).date().isoformat(), (*here.gpus, here.row["name"])[0])
    kept = [branch.description(tonight)] if branch else []
    arms = stages.arms_of({"reference": options.reference, "candidate": options.candidate})
    night = stages.plan(here, config, options.report, arms, bench)
    planned = trials.planned(here.sm)
    extras = (*CPU_EXTRAS, "gpu") if here.gpus else CPU_EXTRAS
    free_gib = free_gib_needed(config, arms) if here.gpus else 0.0
    [benchmark] = [stage.argv for stage in night if stage.name == "bench"]
    found = checks.checks(extras, options.report, free_gib, benchmark, unpinned=options.unpinned)
    show(Console(highlight=False, soft_wrap=True), here, planned, found, night)
    wrong = [f"{check.name}: {check.said}" for check in found if check.holds is False]
    if not here.gpus and not options.dry_run:
        wrong.append("no GPU here: launching kernels needs one, --dry-run does not")
    for line in wrong:
        print(f"nightly: {line}", file=sys.stderr)
    codes = {} if wrong or options.dry_run else nightly_run.run_stages(night, options.report)
    unpinned = [check.said for check in found if check.name == "packages" and options.unpinned]
    left = left_over(config, here, options.report, night, codes)
    recorded = nightly_run.records(options.report) if codes else []
    told = [*nightly_run.lines(codes, recorded), *unpinned, *left]
    print(*told, *(kept if options.dry_run else ()), sep="\n")
    if wrong or options.dry_run:
        return 1 if wrong else 0
    if branch:
        green = nightly_run.publish_on(branch, tonight, options.report, told)
    else:
        past = options.history or options.report / history.FILE
        green = nightly_run.publish(options.report, past, told)
    return 0 if green and not any(codes.values()) else 1


def free_gib_needed(config: NightlyConfig, arms: Mapping[str, stages.PinnedArm]) -> float:
    """Disk space that a night needs; an arm that is installed already needs none."""
    made = [arm for arm in arms.values() if not arm.is_python]
    return float(config["free_gib"] + config["free_gib_environment"] * len(made))


def left_over(
    config: NightlyConfig,
    here: machine.Machine,
    report: Path,
    night: Sequence[stages.Stage],
    codes: dict[str, int],
) -> list[str]:
    """Trials and stages that the target GPU has not verified in this night."""
    target = machine.parsed(config["target_gpu"])
    row = machine.row_of(config, target)
    is_there = bool(codes) and here.row["name"] == row["name"]
    records = nightly_run.records(report) if is_there else []
    left = trials.unverified(trials.planned(target), records)
    undone = [stage.name for stage in night if not is_there or codes.get(stage.name) != 0]
    return unverified_lines(left, undone, f"{row['name']} ({', '.join(row['gpus'])})")


def main(argv: Sequence[str]) -> int:
    """Exit code: 0 green, 1 red, 2 for bad options."""
    config = machine.configuration()
    split = argv.index("--") if "--" in argv else len(argv)
    options = parser(config).parse_args(argv[:split])
    try:
        return nightly(config, options, argv[split + 1 :])
    except UsageError as error:
        print(f"nightly: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
