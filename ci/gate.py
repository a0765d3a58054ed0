"""``python -m ci.gate RECORDS...``: 0 if the records of a run are green and complete, 1 if not.

The files are those of one run: one, or one per shard.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from ci.summary import census, identity
from harness.core.record import Record, Verdict, read_records
from harness.errors import UsageError


def problems(records: Sequence[Record]) -> list[str]:
    """One line for each reason the run must not pass, none where it may."""
    if not records:
        return ["no records: nothing was tested"]
    return [*_red(records), *_contradictions(records), *_duplicates(records), *_census(records)]


def _red(records: Sequence[Record]) -> Iterator[str]:
    for record in records:
        if record.verdict.is_red:
            cause = record.message or "no cause given"
            yield f"{record.verdict}: {_name(record)}: {cause}" + _hint(record)


def _contradictions(records: Sequence[Record]) -> Iterator[str]:
    for record in records:
        if record.verdict is Verdict.PASSED and record.worst > 1:
            yield f"passed, yet {record.worst:.3g} × what was allowed: {_name(record)}"
        if record.verdict in (Verdict.REFUSED, Verdict.WAIVED) and not record.message:
            yield f"{record.verdict} without a reason: {_name(record)}"


def _duplicates(records: Sequence[Record]) -> Iterator[str]:
    for key, count in Counter(map(identity, records)).items():
        if count > 1:
            yield f"{count} records of one trial: {' '.join(key)}"


def _census(records: Sequence[Record]) -> Iterator[str]:
    plans = sorted({record.planned for record in records})
    if len(plans) > 1:
        yield f"records of more than one run: planned trials {plans}"
        return
    count = census(records)
    if count.missing:
        yield str(count)


def _name(record: Record) -> str:
    return " ".join(identity(record))


def _hint(record: Record) -> str:
    return f"\n    {record.reproduce}" if record.reproduce else ""


def main(argv: Sequence[str]) -> int:
    """Exit code: 0 green, 1 red, 2 for records that cannot be read."""
    if not argv:
        print("usage: python -m ci.gate RECORDS...", file=sys.stderr)
        return 2
    try:
        records = [record for path in argv for record in read_records(Path(path))]
    except UsageError as error:
        print(f"gate: {error}", file=sys.stderr)
        return 2
    found = problems(records)
    for line in found:
        print(f"gate: {line}")
    print(f"gate: {'red' if found else 'green'}, {len(found)} problems, {census(records)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
