"""Summaries of records: pure functions from records to small tables, no text, no colour."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from harness.core.case import Execution, Mode
from harness.core.record import Record, TokenCounts, Verdict

GroupKey = TypeVar("GroupKey", bound=Hashable)
REFERENCE_KERNEL = "reference"
"""The kernel that never stands in for another."""
UNTOLD = "any"
"""The kind of records that are older than kinds."""


def once(records: Iterable[Record]) -> list[Record]:
    """The last record of each trial: a retry is counted once."""
    return list({record.trial: record for record in records}.values())


def contradictions(records: Iterable[Record]) -> dict[tuple[str, ...], list[str]]:
    """Trial -> what its records say otherwise of it; a retry says the same and is not here.

    A retry is a record of the same test, tree and plan with the same verdict.
    """
    found = {
        trial: [
            f"{name} {', '.join(values)}"
            for name, said in _RETRY_FACTS.items()
            if len(values := sorted({said(record) or "unknown" for record in group})) > 1
        ]
        for trial, group in _grouped(records, lambda r: r.trial).items()
    }
    return {trial: said for trial, said in found.items() if said}


_RETRY_FACTS: dict[str, Callable[[Record], str]] = {
    "verdict": lambda record: record.verdict,
    "test": lambda record: record.test,
    "tree": lambda record: record.environment.tree,
}


def kinds(records: Iterable[Record]) -> list[str]:
    """The kinds whose plans the records belong to, in the order of appearance."""
    return list(dict.fromkeys(map(kind, records)))


def kind(record: Record) -> str:
    """Whose plan a record belongs to; of an old record, which does not say, "any"."""
    return record.kind or UNTOLD


def ran(record: Record) -> bool:
    """Whether the trial launched anything."""
    return record.verdict not in (Verdict.REFUSED, Verdict.WAIVED)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """All trials of one subject in one mode and execution."""

    records: tuple[Record, ...]

    @property
    def ran(self) -> int:
        """Trials that launched."""
        return sum(map(ran, self.records))

    @property
    def red(self) -> int:
        """Trials a gate must fail on."""
        return sum(record.verdict.is_red for record in self.records)

    @property
    def compared(self) -> bool:
        """Whether any trial compared numbers; a generation compares tokens alone."""
        return any(record.quantities for record in self.records)

    @property
    def is_equal(self) -> bool:
        """Whether all that was compared was the same, and nothing else was wrong."""
        return self.compared and self.worst == 0 and self.state == "passed"

    @property
    def worst(self) -> float:
        """Largest error / allowed over the trials."""
        return max((record.worst for record in self.records), default=0.0)

    @property
    def state(self) -> str:
        """One of "red", "passed" and, where nothing launched, "refused"."""
        if self.red or self.worst > 1:
            return "red"
        return "passed" if self.ran else "refused"


def merged(cells: Iterable[Cell]) -> Cell:
    """One cell of all their trials."""
    return Cell(records=tuple(record for cell in cells for record in cell.records))


@dataclass(frozen=True)
class Census:
    """planned = run + refused + waived; anything else is red."""

    planned: int
    run: int
    refused: int
    waived: int

    @property
    def missing(self) -> int:
        """Trials that were planned and left no record; negative if more came than planned."""
        return self.planned - self.run - self.refused - self.waived

    def __str__(self) -> str:
        sign = "!=" if self.missing else "="
        parts = f"run {self.run} + refused {self.refused} + waived {self.waived}"
        return f"planned {self.planned} {sign} {parts}"


def plans(records: Iterable[Record]) -> dict[str, list[int]]:
    """Kind -> the numbers of planned trials that its records name; a run has one."""
    groups = _grouped(records, kind).items()
    return {name: sorted({record.planned for record in group}) for name, group in groups}


def censuses(records: Iterable[Record]) -> dict[str, Census]:
    """Kind -> counts of its plan."""
    return {name: _census(group) for name, group in _grouped(records, kind).items()}


def census(records: Iterable[Record]) -> Census:
    """Counts over the plans of all kinds."""
    every = [(c.planned, c.run, c.refused, c.waived) for c in censuses(records).values()]
    return Census(*(map(sum, zip(*every, strict=True)) if every else (0, 0, 0, 0)))


def _census(records: Sequence[Record]) -> Census:
    """Counts of one plan; ``planned`` is what its records say, 0 where they disagree."""
    planned = {record.planned for record in records}
    verdicts = Counter(record.verdict for record in records)
    return Census(
        planned=planned.pop() if len(planned) == 1 else 0,
        run=sum(map(ran, records)),
        refused=verdicts[Verdict.REFUSED],
        waived=verdicts[Verdict.WAIVED],
    )


def reasons(records: Iterable[Record]) -> list[tuple[str, str, int]]:
    """(verdict, reason, trials) of what did not run, most frequent first."""
    counts = Counter((str(r.verdict), r.message) for r in records if not ran(r))
    return [(verdict, reason, count) for (verdict, reason), count in counts.most_common()]


def columns(records: Sequence[Record]) -> list[tuple[str, str]]:
    """(mode, execution) of the matrix: the order of the enums, then that of appearance."""
    seen = dict.fromkeys((record.mode, record.execution) for record in records)
    modes = dict.fromkeys([*map(str, Mode), *(mode for mode, _ in seen)])
    executions = dict.fromkeys([*map(str, Execution), *(execution for _, execution in seen)])
    return [(m, e) for m in modes for e in executions if (m, e) in seen]


def matrix(records: Iterable[Record]) -> dict[tuple[str, str], dict[tuple[str, str], Cell]]:
    """(subject, place) -> (mode, execution) -> cell; what was never planned is absent."""
    rows = _grouped(records, lambda r: (r.subject, r.place))
    return {
        subject: {
            column: Cell(records=tuple(group))
            for column, group in _grouped(trials, lambda r: (r.mode, r.execution)).items()
        }
        for subject, trials in sorted(rows.items())
    }


def accept_lengths(records: Iterable[Record]) -> dict[tuple[str, str, str], Counter[int]]:
    """(pair, subject, execution) -> how often a verify step accepted that many tokens.

    A generation's case is "pair/prompt"; its pair is the part before the first slash.
    """
    counts: defaultdict[tuple[str, str, str], Counter[int]] = defaultdict(Counter)
    for record in records:
        if record.accept_lengths:
            pair = record.case.partition("/")[0]
            counts[pair, record.subject, record.execution].update(record.accept_lengths)
    return dict(sorted(counts.items()))


def tokens(records: Iterable[Record]) -> TokenCounts:
    """Of all generated texts."""
    return sum((record.tokens for record in records), TokenCounts())


def effects(
    records: Iterable[Record],
) -> tuple[list[str], dict[tuple[str, str, str], dict[str, list[int]]]]:
    """Names of all effects and (subject, mode, execution) -> name -> distinct exact counts."""
    counted = [record for record in records if record.effects]
    names = sorted({name for record in counted for name in record.effects})
    groups = _grouped(counted, lambda r: (r.subject, r.mode, r.execution))
    return names, {
        key: {name: sorted({r.effects[name] for r in group if name in r.effects}) for name in names}
        for key, group in sorted(groups.items())
    }


def stand_ins(records: Iterable[Record]) -> dict[str, list[str]]:
    """Place -> kernels in whose stead the strict reference ran there: on a CPU all of them."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for record in records:
        if ran(record) and (kernel := stand_in(record.subject, record.place)):
            found[record.place].add(kernel)
    return {place: sorted(kernels) for place, kernels in sorted(found.items())}


def stand_in(subject: str, place: str) -> str:
    """The kernel of a subject that the reference stands in for at this place; "" for none."""
    kernel = subject.rpartition("/")[2]
    return kernel if place.split()[0] == "cpu" and kernel != REFERENCE_KERNEL else ""


def by_kind(records: Iterable[Record]) -> dict[str, dict[str, Cell]]:
    """Subject -> kind -> all its trials there."""
    return {
        subject: {name: Cell(records=tuple(g)) for name, g in _grouped(group, kind).items()}
        for subject, group in sorted(_grouped(records, lambda r: r.subject).items())
    }


def unverified(records: Iterable[Record]) -> dict[str, Counter[str]]:
    """Subject -> why, how often: trials that a real kernel passed on no kind of a run on GPUs.

    Empty where no GPU took part: there the stand-ins say so of every kernel. Effects that are
    counted on the CPU need no kernel.
    """
    every = [r for r in records if not (r.effects and r.place.split()[0] == "cpu")]
    if not any(record.device.startswith("cuda") for record in every):
        return {}
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    groups = _grouped(every, lambda r: (r.case, r.subject, r.mode, r.execution))
    for (_, subject, _, _), group in sorted(groups.items()):
        if not any(_is_verified(record) for record in group):
            there = [r for r in group if r.device.startswith("cuda")]
            told = [f"{r.verdict} on {kind(r)}" if ran(r) else r.message for r in there]
            found[subject][told[0] if told else "ran on no GPU that runs it"] += 1
    return dict(found)


def _is_verified(record: Record) -> bool:
    passed = record.verdict is Verdict.PASSED
    return passed and not stand_in(record.subject, record.place)


def dates(records: Iterable[Record]) -> tuple[str, str] | None:
    """The first and the last date and minute of the records, UTC; None where none has one."""
    known = sorted(record.recorded for record in records if record.recorded)
    return (minute(known[0]), minute(known[-1])) if known else None


def minute(moment: str) -> str:
    """Of an ISO 8601 moment, such as "2026-11-22 07:30"."""
    return moment[:16].replace("T", " ")


def rate(records: Iterable[Record]) -> float:
    """Differential cases a second of one worker, start-up aside; 0 where none was timed."""
    timed = [r.seconds for r in records if ran(r) and r.quantities and not r.accept_lengths]
    return len(timed) / sum(timed) if sum(timed) > 0 else 0.0


def _grouped(
    records: Iterable[Record], key: Callable[[Record], GroupKey]
) -> dict[GroupKey, list[Record]]:
    groups: defaultdict[GroupKey, list[Record]] = defaultdict(list)
    for record in records:
        groups[key(record)].append(record)
    return dict(groups)
