"""History of the nightly runs: a series per case and kind of machine, with its alarms.

Every night measures B against the same pinned A, so differences between hosts cancel out. Another
pin or another image starts a new epoch; nights are compared within one epoch alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import TypeAdapter

from ci.bench.case_report import relative
from ci.bench.change_point import Change, changed
from harness.bench.jsonl import EXACT, validated
from harness.bench.stats.bench_verdict import BenchVerdict
from harness.bench.wording import percent
from harness.errors import UsageError

FILE = "history.jsonl"
ALARM = 365.0
"""Threshold of the e-detector: one false alarm in so many nights at most (Shin et al., 2022)."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One case of one night.

    Args:
        night: when its session started, ISO 8601, UTC.
        sku: name of the device.
        case: "workload/metric".
        pin: the reference, by its versions.
        image: what both arms stand on: driver, CUDA, packages.
        commit: of the suite.
        verdict: of the night.
        cost: ln of B / A, positive is worse.
        low, high: bounds of ``cost``; None where nothing was shown.
        e: evidence of the night against "at most delta0 worse".
        blocks: valid ones.
        higher_is_better: whether more of the metric is an improvement.
        format: of the line that records it.
    """

    night: str
    sku: str
    case: str
    pin: str
    image: str
    commit: str
    verdict: BenchVerdict
    cost: float
    low: float | None
    high: float | None
    e: float
    blocks: int
    higher_is_better: bool
    format: Literal[2] = 2
    __pydantic_config__: ClassVar = EXACT

    @property
    def change(self) -> float:
        """B / A as a relative change, in the metric's own direction."""
        return relative(self.cost, self.higher_is_better)

    @property
    def epoch(self) -> tuple[str, str]:
        """The same in nights that are compared."""
        return self.pin, self.image

    def to_json(self) -> str:
        """One line, without a newline."""
        return ENTRY.dump_json(self).decode()


ENTRY = TypeAdapter(Entry)


@dataclass(frozen=True)
class Series:
    """A case on a kind of machine, night by night.

    Args:
        entries: in the order of nights.
        evidence: the e-detector after each of them; it starts anew with every epoch.
        change: suspected in the present epoch.
    """

    entries: tuple[Entry, ...]
    evidence: tuple[float, ...]
    change: Change | None

    @property
    def epochs(self) -> list[int]:
        """Places where an epoch starts, 0 first."""
        kinds = [entry.epoch for entry in self.entries]
        return [n for n, kind in enumerate(kinds) if n == 0 or kind != kinds[n - 1]]

    @property
    def alarms(self) -> list[int]:
        """Places at which the e-detector has reached ``ALARM``."""
        return [n for n, evidence in enumerate(self.evidence) if evidence >= ALARM]


def read(path: Path) -> list[Entry]:
    """Entries of a file in its order; none where there is no file yet.

    Raises:
        UsageError: a line is not an entry; the message names it.
    """
    return parsed(path.read_text(encoding="utf-8"), str(path)) if path.exists() else []


def parsed(text: str, where: str) -> list[Entry]:
    """Entries of a text in its order.

    Args:
        text: one a line.
        where: it was found, for the message.

    Raises:
        UsageError: a line is not an entry; the message names it.
    """
    entries = []
    lines = text.removesuffix("\n").split("\n") if text else []  # U+2028 ends no line of JSON.
    for number, line in enumerate(lines, start=1):
        try:
            entries.append(validated(ENTRY, line))
        except UsageError as error:
            raise UsageError(f"{where}:{number}: {error}") from error
    return entries


def append(path: Path, entries: Iterable[Entry]) -> list[Entry]:
    """The whole history with these nights; those that it did not have are written."""
    known = read(path)
    new = lacking(entries, known)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        # A history from elsewhere may lack the end of its last line.
        if known and not path.read_bytes().endswith(b"\n"):
            file.write("\n")
        file.writelines(entry.to_json() + "\n" for entry in new)
    return known + new


def lacking(entries: Iterable[Entry], known: Iterable[Entry]) -> list[Entry]:
    """Entries of nights, machines and cases that the known ones do not have."""
    seen = {(entry.night, entry.sku, entry.case) for entry in known}
    return [entry for entry in entries if (entry.night, entry.sku, entry.case) not in seen]


def all_series(entries: Iterable[Entry]) -> dict[tuple[str, str], Series]:
    """(case, sku) -> its nights, in the order of cases."""
    groups: defaultdict[tuple[str, str], list[Entry]] = defaultdict(list)
    for entry in entries:
        groups[entry.case, entry.sku].append(entry)
    return {key: series(group) for key, group in sorted(groups.items())}


def notes(found: Mapping[tuple[str, str], Series]) -> list[str]:
    """One line per series with an alarm or a suspected change, alarms first."""
    alarms, suspected = [], []
    for (case, sku), one in found.items():
        if one.evidence and one.evidence[-1] >= ALARM:
            first = one.entries[next(n for n in one.alarms if n >= one.epochs[-1])].night
            alarms.append(f"alarm: {case} @ {sku} creeps, confirmed since {first}")
        if one.change:
            size = relative(one.change.size, one.entries[-1].higher_is_better)
            moved = f"{percent(1 + size)} since {one.change.night}"
            suspected.append(f"suspected change: {case} @ {sku}, {moved}: look there")
    return alarms + suspected


def series(entries: Iterable[Entry]) -> Series:
    """The nights of one case, with the e-detector and the suspected change."""
    nights = tuple(sorted(entries, key=lambda entry: entry.night))
    found = Series(nights, tuple(detector(nights)), None)
    present = nights[found.epochs[-1] :] if nights else ()
    return Series(nights, found.evidence, suspicion(present))


def detector(nights: Sequence[Entry]) -> list[float]:
    """Shiryaev–Roberts: M ← (M + 1) · e after every valid night, from 0 in every epoch."""
    evidence: list[float] = []
    level = 0.0
    for place, entry in enumerate(nights):
        if place and entry.epoch != nights[place - 1].epoch:
            level = 0.0
        if entry.verdict is not BenchVerdict.INVALID:
            level = (level + 1.0) * entry.e
        evidence.append(level)
    return evidence


def suspicion(nights: Sequence[Entry]) -> Change | None:
    """The suspected change among the valid nights of an epoch."""
    valid = [night for night in nights if night.verdict is not BenchVerdict.INVALID]
    return changed([night.night for night in valid], [night.cost for night in valid])
