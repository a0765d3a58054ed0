"""The folder of a lane: records of its trials, how each unit ended, files of its commands."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ci.cluster.driver import as_line
from ci.cluster.work import LaneWork, UnitEnd
from harness.core.exclusive import alone_in
from harness.core.record import Record, record_lines, write_records
from harness.core.whole_file import write_whole
from harness.errors import UsageError, rejected

RECORDS, ENDED = "records.jsonl", "ended.jsonl"
Line = dict[str, Any]


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a lane's folder, made where missing, for one run.

    Raises:
        UsageError: another run writes to it, or it cannot be made.
    """
    accepted = "a folder that no other run writes to"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(not_writable(folder, error)) from error
    with alone_in(folder, rejected("--report", str(folder), accepted)):
        yield


def not_writable(folder: Path, error: OSError) -> str:
    """What to say of a folder."""
    return rejected("--report", str(folder), f"a writable folder ({error.strerror})")


class Store:
    """Keeps what ends at once, so that a run that is killed goes on from there.

    Args:
        folder: of one lane, as ``held`` has it.
        works: the lane on its kinds.
        resume: whether good ends of this tree are kept; otherwise all is begun anew.
        source: commit and whether it is changed, for records of a tree that travelled without git.

    Raises:
        UsageError: there is nothing to resume, it is of another tree, or the folder cannot be
            written.
    """

    def __init__(
        self,
        folder: Path,
        works: Sequence[LaneWork],
        *,
        resume: bool,
        source: tuple[str, bool],
    ) -> None:
        self.folder, self._source = folder, source
        self.failures: list[str] = []
        before = [*_lines(folder / ENDED)]
        self._seconds = {(line["kind"], line["unit"]): float(line["seconds"]) for line in before}
        self._kept: dict[tuple[str, str], Line] = {}
        records: list[Record] = []
        if resume:
            self._kept = _good(folder, before, works[0].tree)
            records = [*_kept_records(folder / RECORDS, self._kept)]
        lines = (json.dumps(line) + "\n" for line in self._kept.values())
        try:
            # Ends first: a unit that has ended, of a run that is killed between, has its record.
            write_whole(folder / ENDED, "".join(lines))
            write_whole(folder / RECORDS, record_lines(records))
        except OSError as error:
            raise UsageError(not_writable(folder, error)) from error

    def recorded(self, work: LaneWork) -> dict[str, float]:
        """Unit -> seconds that it took in the run before."""
        return {unit: s for (kind, unit), s in self._seconds.items() if kind == work.kind}

    def kept(self, work: LaneWork) -> set[str]:
        """Units that do not run again."""
        return {unit for kind, unit in self._kept if kind == work.kind}

    def add(self, work: LaneWork, ended: Sequence[UnitEnd]) -> None:
        """Keep what ended. A record is written before its unit counts as ended."""
        commit, dirty = self._source
        records = [Record.from_json(end.record) for end in ended if end.record]
        write_records(
            self.folder / RECORDS,
            [
                record
                if record.environment.commit
                else replace(
                    record, environment=replace(record.environment, commit=commit, dirty=dirty)
                )
                for record in records
            ],
        )
        for end in ended:
            for name, content in end.files.items():
                path = self.folder / work.kind / end.unit / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            if end.outcome == "failed" and not end.record:
                self.failures.append(f"{end.unit} on {work.kind}: {end.message}")
        with (self.folder / ENDED).open("a", encoding="utf-8") as file:
            file.writelines(as_line(work, end) + "\n" for end in ended)


def _lines(path: Path) -> Iterator[Line]:
    """Lines of a file; the last of a process that was killed may have no end."""
    if path.is_file():
        whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
        yield from map(json.loads, whole.splitlines())


def _good(folder: Path, before: Sequence[Line], tree: str) -> dict[tuple[str, str], Line]:
    if not before:
        raise UsageError(rejected("--resume", str(folder), "the folder of a run"))
    for line in before:
        if line["tree"] != tree:
            said = rejected("tree", line["tree"][:12], tree[:12])
            raise UsageError(f"--resume: {folder / ENDED}: {said}")
    return {(x["kind"], x["unit"]): x for x in before if x["outcome"] != "failed"}


def _kept_records(path: Path, kept: dict[tuple[str, str], Line]) -> Iterator[Record]:
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0] if path.is_file() else ""
    for line in whole.splitlines():
        record = Record.from_json(line)
        if (record.kind, record.test) in kept:
            yield record
