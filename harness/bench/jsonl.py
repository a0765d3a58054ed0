"""Lines of a ``bench.jsonl``: written whole, read back as what they were."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.bench.session_records import (
    ArmFacts,
    CasePlan,
    Line,
    Role,
    Sample,
    Session,
    Trial,
    Workload,
)
from harness.bench.stats.design import Design
from harness.bench.stats.margin import Bounds
from harness.bench.stats.stopping import Thresholds
from harness.bench.stats.validity import Conditions
from harness.core.record import Environment
from harness.errors import UsageError, rejected

FORMAT = 3
PACKED = ".gz"
"""Ending of records that were packed; they can be read, and not be added to."""


def to_json(line: Line) -> str:
    """One line, without a newline."""
    kind = type(line).__name__.lower()
    return json.dumps({"format": FORMAT, "kind": kind} | asdict(line), separators=(",", ":"))


def from_json(text: str) -> Line:
    """The inverse of ``to_json``.

    Raises:
        UsageError: the line is neither a session nor a trial of this format.
    """
    try:
        data: dict[str, Any] = json.loads(text)
        if (found := data.pop("format", None)) != FORMAT:
            raise UsageError(rejected("bench record format", found, str(FORMAT)))
        kind = data.pop("kind", None)
        if kind == "session":
            return _session(data)
        if kind == "trial":
            return _trial(data)
        raise UsageError(rejected("bench record kind", kind, "session, trial"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"not a bench record: {text[:80]!r} ({error})") from error


def _session(data: dict[str, Any]) -> Session:
    for arm in ("a", "b"):
        facts = data[arm]
        data[arm] = ArmFacts(**facts | {"command": tuple(facts["command"])})
    cases = (CasePlan(**case | {"bounds": Bounds(**case["bounds"])}) for case in data["cases"])
    return Session(
        **data
        | {
            "role": Role(data["role"]),
            "design": Design(data["design"]),
            "thresholds": Thresholds(**data["thresholds"]),
            "workloads": tuple(Workload(**workload) for workload in data["workloads"]),
            "cases": tuple(cases),
            "environment": Environment(**data["environment"]),
        }
    )


def _trial(data: dict[str, Any]) -> Trial:
    samples = (s | {"chunk_gaps_ms": tuple(s["chunk_gaps_ms"])} for s in data["samples"])
    conditions: dict[str, Any] = {
        name: tuple(fact) if isinstance(fact, list) else fact
        for name, fact in data["conditions"].items()
    }
    return Trial(
        **data
        | {
            "samples": tuple(Sample(**sample) for sample in samples),
            "conditions": Conditions(**conditions),
            "invalid": tuple(data["invalid"]),
        }
    )


def append(path: Path, line: Line) -> None:
    """Add a line, whole and on the disk before this returns."""
    with path.open("a", encoding="utf-8") as file:
        file.write(to_json(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> Iterator[Line]:
    """Every line of a file, in order; a last line that was cut off is left out.

    Args:
        path: a ``bench.jsonl``, or one that was packed: ``bench.jsonl.gz``.

    Raises:
        UsageError: the file is missing, or a line is no record; the message names the line.
    """
    if not path.is_file():
        raise UsageError(rejected("bench records", str(path), "an existing file"))
    text = _text(path)
    whole = text[: text.rfind("\n") + 1]
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            yield from_json(line)
        except UsageError as error:
            raise UsageError(f"{path}:{number}: {error}") from error


def _text(path: Path) -> str:
    is_packed = path.suffix == PACKED
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if is_packed else data).decode()
    except (EOFError, OSError, UnicodeDecodeError, zlib.error) as error:
        accepted = f"a whole {PACKED} file of JSON lines" if is_packed else "JSON lines in UTF-8"
        raise UsageError(rejected("bench records", str(path), accepted)) from error


def mend(path: Path) -> None:
    """Cut off a last line that was not written to its end, so that the next one starts anew."""
    with path.open("rb+") as file:
        file.truncate(file.read().rfind(b"\n") + 1)
        os.fsync(file.fileno())
