"""``python3 -m ci.offline build OUT`` here, ``ci/offline/run OUT`` where there is no network.

With ``--kind`` a run leaves one file of records, which the gate here takes into its verdict.

Needs Python alone; for building also pip and a package index.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ci.offline.bundle import build, specification
from ci.offline.run import Carry, rehearse, run
from harness.core.argument_types import CommandLine
from harness.core.signals import INTERRUPTED
from harness.errors import UsageError, rejected

LANES = tuple(specification()["lanes"])
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size(text: str) -> int:
    """Bytes of "38M".

    Raises:
        argparse.ArgumentTypeError: it is no whole number of K, M or G.
    """
    number, unit = text[:-1], text[-1:]
    if unit not in UNITS or not number.isdecimal() or not int(number):
        raise argparse.ArgumentTypeError(rejected("--size", text, "a number and K, M or G"))
    return int(number) * UNITS[unit]


def parser() -> argparse.ArgumentParser:
    """The command line: one subcommand a machine."""
    made = CommandLine(prog="python3 -m ci.offline", description=__doc__)
    verbs = made.add_subparsers(dest="verb", required=True, metavar="VERB", help="one of:")
    builds = verbs.add_parser("build", help="download, strip and pack what the machine lacks")
    builds.add_argument(
        "out", type=Path, metavar="OUT", help="holds part-0/, part-1/, … afterwards"
    )
    builds.add_argument("--size", type=size, default="38M", help="of one part at most")
    told = f"of {', '.join(LANES)}: what is to be run"
    builds.add_argument(
        "--lane",
        dest="lanes",
        nargs="+",
        choices=LANES,
        default=LANES[:1],
        metavar="LANE",
        help=told,
    )
    runs = verbs.add_parser("run", help="unpack a bundle once and run a lane on it")
    runs.add_argument("bundle", type=Path, metavar="BUNDLE", help="a folder that build wrote")
    told = "run a lane with what is installed here on the CPU, as a dry run of a kind of GPU"
    rehearses = verbs.add_parser("rehearse", help=told)
    is_kind = "what the GPU must be, such as sm100; leaves report/KIND.xz for the gate elsewhere"
    runs.add_argument("--kind", metavar="KIND", help=is_kind)
    rehearses.add_argument("--kind", required=True, metavar="KIND", help="such as sm100")
    for verb in (runs, rehearses):
        signs = "key of SSH that signs the file, in KIND.xz.sig"
        verb.add_argument("--sign", type=Path, metavar="KEY", help=signs)
    for verb in (runs, rehearses):
        verb.add_argument("--lane", choices=LANES, default=LANES[0], help="what is to be run")
    return made


def main(argv: list[str]) -> int:
    """Exit code: the lane's, or 2 for what cannot be built or run.

    Args:
        argv: the verb and its arguments; what ``run`` does not know goes to the lane.
    """
    commands = parser()
    split = argv.index("--") if "--" in argv else len(argv)
    options, rest = commands.parse_known_args(argv[:split])
    rest += argv[split:]
    try:
        if options.verb == "rehearse":
            carry = Carry(kind=options.kind, is_declared=True, key=options.sign)
            return rehearse(options.lane, rest, carry)
        if options.verb == "run":
            if options.kind is None:
                if options.sign is not None:
                    raise UsageError(rejected("--sign", str(options.sign), "a key beside --kind"))
                return run(options.bundle, options.lane, rest)
            return run(
                options.bundle, options.lane, rest, Carry(kind=options.kind, key=options.sign)
            )
        if rest:
            commands.error(f"unrecognized arguments: {' '.join(rest)}")
        for part in build(options.out, options.size, options.lanes):
            print(f"{part.stat().st_size:>10,} {part}")
    except UsageError as error:
        print(f"offline: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("offline: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
