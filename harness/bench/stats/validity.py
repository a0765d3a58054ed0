"""Validity of a block: conditions of its trials, blind to the arms, and exact counts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from harness.errors import UsageError, rejected

CLOCK_SPREAD = 0.01
CAPPED_SHARE = 0.01
WARMING_C = 8.0


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Facts of one trial; None is a fact that is unknown, and is listed by ``unknown_conditions``.

    Args:
        foreign_processes: other processes that computed on the GPU meanwhile.
        throttled: hardware slowdown, power brake and thermal reasons seen.
        capped: share of the samples under the software power cap.
        mhz: median SM clock.
        celsius: GPU temperature.
        machine: driver, VBIOS, MIG and ECC state, as one line.
        pcie_full: whether the link has its full width.
        load: share of the host's cores that other processes kept busy.
        failed: requests that did not end well.
        output_tokens: of all requests.
        cached_tokens: prompt tokens that came from a cache.
        flushed: whether the flush was proven.
        correct: whether the answers were checked and right.
    """

    foreign_processes: int | None = None
    throttled: tuple[str, ...] | None = None
    capped: float | None = None
    mhz: float | None = None
    celsius: float | None = None
    machine: str | None = None
    pcie_full: bool | None = None
    load: float | None = None
    failed: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    flushed: bool | None = None
    correct: bool | None = None

    @property
    def under_cap(self) -> bool:
        """Whether the power cap held, so that clocks follow the load."""
        return (self.capped or 0.0) > CAPPED_SHARE


def _one(values: Collection[Any]) -> bool:
    return len(set(values)) == 1


# A power cap is accepted where every trial of the block was under it.
VALIDITY_CHECKS: tuple[tuple[str, Callable[[Sequence[Any]], bool], str], ...] = (
    ("foreign_processes", lambda seen: not any(seen), "no other process computes on the GPU"),
    ("throttled", lambda seen: not any(seen), "no slowdown, power brake or thermal reason"),
    ("capped", lambda seen: len({x > CAPPED_SHARE for x in seen}) == 1, "in 1 % or alike"),
    ("mhz", lambda seen: max(seen) <= (1 + CLOCK_SPREAD) * min(seen), "clocks within 1 %"),
    ("celsius", lambda seen: max(seen) - min(seen) <= WARMING_C, "within 8 °C"),
    ("machine", _one, "one driver, VBIOS, MIG and ECC state"),
    ("pcie_full", all, "full PCIe width"),
    ("load", lambda seen: max(seen) < 0.5, "others under half the cores"),
    ("failed", lambda seen: not any(seen), "every request ends well"),
    ("output_tokens", _one, "as many output tokens in every trial"),
    ("cached_tokens", lambda seen: not any(seen), "no cached token"),
    ("flushed", all, "a proven flush"),
    ("correct", all, "right answers"),
)  # fmt: skip


def reasons(trials: Sequence[Conditions]) -> tuple[str, ...]:
    """Why the block of these trials is invalid, whatever their order, and so blind to the arms."""
    found = []
    capped = any(trial.under_cap for trial in trials)
    for name, holds, accepted in VALIDITY_CHECKS:
        if name == "mhz" and capped:
            continue
        seen = [getattr(trial, name) for trial in trials if getattr(trial, name) is not None]
        if seen and len(seen) < len(trials):
            found.append(f"{name}: asked of some trials only")
        elif seen and not holds(seen):
            found.append(f"{name}: {_summary(seen)}, accepted: {accepted}")
    return tuple(found)


def _summary(seen: Collection[Any]) -> str:
    """The facts in a few words, however many trials there are."""
    if all(isinstance(fact, int | float) and not isinstance(fact, bool) for fact in seen):
        ends = dict.fromkeys(f"{round(end, 2):g}" for end in (min(seen), max(seen)))
        return " to ".join(ends)
    words = {" ".join(fact) or "none" if isinstance(fact, tuple) else str(fact) for fact in seen}
    return ", ".join(sorted(words))


def unknown_conditions(trials: Sequence[Conditions]) -> tuple[str, ...]:
    """Names of the facts that no trial has."""
    names = [field.name for field in fields(Conditions)]
    return tuple(n for n in names if all(getattr(trial, n) is None for trial in trials))


def changed_counts(
    expected: Mapping[str, int], obtained: Mapping[str, int]
) -> dict[str, tuple[int | None, int | None]]:
    """(expected, obtained) by name wherever exact counts differ; None where a side has none.

    Raises:
        UsageError: a count that is not a whole number of at least 0.
    """
    for side, counts in (("expected", expected), ("obtained", obtained)):
        for name, count in counts.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                accepted = "a whole number of at least 0"
                raise UsageError(rejected(f"{side} {name}", count, accepted))
    names = sorted({*expected, *obtained})
    pairs = {name: (expected.get(name), obtained.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
