"""Files of benchmark records, ``bench.jsonl``: one JSON object per line, each written whole."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from harness.bench.session_records import Line, Session, Trial
from harness.errors import UsageError, rejected

PACKED = ".gz"
"""Ending of packed records, which can be read and not be added to."""
EXACT = ConfigDict(extra="forbid", strict=True, ser_json_inf_nan="constants")
"""No unknown field, no conversion; infinities are written as JSON's usual extension has them."""
LINE: TypeAdapter[Line] = TypeAdapter(
    Annotated[Session | Trial, Field(discriminator="kind")], config=EXACT
)
MOST_SHOWN = 60
RecordT = TypeVar("RecordT")


def to_json(line: Line) -> str:
    """One line, without a newline."""
    return LINE.dump_json(line).decode()


def from_json(text: str) -> Line:
    """The inverse of ``to_json``.

    Raises:
        UsageError: the line is neither a session nor a trial of this format.
    """
    return validated(LINE, text)


def validated(adapter: TypeAdapter[RecordT], text: str) -> RecordT:
    """The record that a line of JSON holds.

    Raises:
        UsageError: it holds none; names the first wrong field, ``format`` before any other.
    """
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False)
        first = min(wrong, key=lambda one: one["loc"][-1:] != ("format",))
        whole = "kind" if first["type"].startswith("union_tag") else "line"
        field = ".".join(map(str, first["loc"])) or whole
        accepted = first["msg"]
        raise UsageError(rejected(field, str(first["input"])[:MOST_SHOWN], accepted)) from error


def append(path: Path, *lines: Line) -> None:
    """Add lines, all of them or none, whole and on the disk before this returns."""
    with path.open("ab") as file:
        file.write("".join(f"{to_json(line)}\n" for line in lines).encode())
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
    whole = text.split("\n")[:-1]  # splitlines() would cut a reason at U+2028 as well.
    for number, line in enumerate(whole, start=1):
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
