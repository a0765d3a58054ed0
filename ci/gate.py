"""``python -m ci.gate RECORDS...``: 0 if the records of a run are green and complete, 1 if not.

The files are those of one verdict: of one machine, of its shards, or of several kinds of GPU. A
kind's trials are complete for themselves; a trial that ran again and said the same counts once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ci import carried, summary
from harness.core.argument_types import CommandLine
from harness.core.record import Record, Verdict, read_records
from harness.errors import UsageError

SHOWN_DIGITS = 12
"""Of a digest."""


def problems(records: Sequence[Record], kinds: Sequence[str] = ()) -> list[str]:
    """One line for each reason the run must not pass, none where it may.

    Args:
        records: of the verdict.
        kinds: that it must be about, such as "sm90"; those of the records if none is named.
    """
    if not records:
        return ["no records: nothing was tested"]
    counted = summary.once(records)
    return [
        *_red(counted),
        *_untrue(counted),
        *_contradictions(records),
        *_trees(counted),
        *_census(counted),
        *(f"no records of {kind}" for kind in kinds if kind not in summary.kinds(counted)),
    ]


def _red(records: Sequence[Record]) -> Iterator[str]:
    for record in records:
        if record.verdict.is_red:
            cause = record.message or "no cause given"
            yield f"{record.verdict}: {_name(record)}: {cause}" + _hint(record)


def _untrue(records: Sequence[Record]) -> Iterator[str]:
    for record in records:
        if record.verdict is Verdict.PASSED and record.worst > 1:
            yield f"passed, yet {record.worst:.3g} × what was allowed: {_name(record)}"
        if record.verdict in (Verdict.REFUSED, Verdict.WAIVED) and not record.message:
            yield f"{record.verdict} without a reason: {_name(record)}"


def _contradictions(records: Sequence[Record]) -> Iterator[str]:
    for trial, said in summary.contradictions(records).items():
        yield f"records of one trial contradict each other: {' '.join(trial)}: {'; '.join(said)}"


def _trees(records: Sequence[Record]) -> Iterator[str]:
    trees = sorted({record.environment.tree for record in records})
    if len(trees) > 1:
        shown = ", ".join(tree[:SHOWN_DIGITS] or "unknown" for tree in trees)
        yield f"records of more than one tree: {shown}"


def _census(records: Sequence[Record]) -> Iterator[str]:
    counts = summary.censuses(records)
    for kind, planned in summary.plans(records).items():
        of = f" on {kind}" if len(counts) > 1 else ""
        if len(planned) > 1:
            yield f"records of more than one run{of}: planned trials {planned}"
        elif counts[kind].missing:
            yield f"{counts[kind]}{of}"


def _name(record: Record) -> str:
    return " ".join(record.trial)


def _hint(record: Record) -> str:
    return f"\n    {record.reproduce}" if record.reproduce else ""


def read(path: Path, signers: Path | None = None) -> list[Record]:
    """The records of a file of a run, or of one that was carried here.

    Args:
        path: of the file.
        signers: of whom one must have signed what was carried; nobody is asked if None.

    Raises:
        UsageError: it cannot be read, or not be trusted.
    """
    if path.suffix != carried.SUFFIX:
        return list(read_records(path))
    if signers is not None:
        print(f"gate: {path} is signed by {carried.signer(path, signers)}")
    return carried.unpack(path)


def named_kinds(text: str) -> list[str]:
    """Of "sm90,sm100", each once."""
    return [kind for kind in dict.fromkeys(text.split(",")) if kind]


def main(argv: Sequence[str]) -> int:
    """Exit code: 0 green, 1 red, 2 for records that cannot be read."""
    parser = CommandLine(prog="python -m ci.gate", description=__doc__)
    files = "records.jsonl of a run or a part, or .xz that a machine without a network wrote"
    parser.add_argument("records", type=Path, nargs="+", metavar="RECORDS", help=files)
    asked = "kinds that must be among them, such as sm90,sm100; otherwise those that are"
    parser.add_argument("--kinds", type=named_kinds, default=[], metavar="KINDS", help=asked)
    signers = "names and public keys, as ssh-keygen has them: each .xz must be signed by one"
    parser.add_argument("--signers", type=Path, metavar="FILE", help=signers)
    options = parser.parse_args(argv)
    try:
        records = [record for path in options.records for record in read(path, options.signers)]
    except UsageError as error:
        print(f"gate: {error}", file=sys.stderr)
        return 2
    found = problems(records, options.kinds)
    for line in found:
        print(f"gate: {line}")
    census = summary.census(summary.once(records))
    print(f"gate: {'red' if found else 'green'}, {len(found)} problems, {census}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
