"""Batches: neighbouring units, fewer and fewer, so that whatever takes long ends nobody's wait.

The longest batch is the first to run. Where nothing is known of a unit's time, those that are
collected last, as long rows are, are the smallest batches (guided self-scheduling, Polychronopoulos
and Kuck, 1987).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

ROUNDS = 8
"""A batch takes at most 1 / ROUNDS of what is an even share of the rest."""
SHORTEST_S = 0.5
"""A batch costs some 10 ms of its own, which is a fiftieth of this."""
UNKNOWN_S = SHORTEST_S
"""Of a unit where none was ever timed."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Units that one process runs one after another.

    Args:
        units: node ids or items.
        seconds: they are expected to take.
    """

    units: tuple[str, ...]
    seconds: float


def batches(units: Sequence[str], recorded: Mapping[str, float], slots: int) -> list[Batch]:
    """Every unit in exactly one batch, the longest batch first.

    Args:
        units: in their order.
        recorded: unit -> seconds that it took; the median of these stands for any other.
        slots: batches that can run at a time, 1 or more.
    """
    known = [recorded[unit] for unit in units if unit in recorded]
    usual = median(known) if known else UNKNOWN_S
    seconds = [recorded.get(unit, usual) for unit in units]
    rest = sum(seconds)
    made: list[Batch] = []
    begun: list[str] = []
    taken = 0.0
    for unit, own in zip(units, seconds, strict=True):
        if begun and taken + own > max(SHORTEST_S, rest / (slots * ROUNDS)):
            made.append(Batch(units=tuple(begun), seconds=taken))
            rest -= taken
            begun, taken = [], 0.0
        begun.append(unit)
        taken += own
    if begun:
        made.append(Batch(units=tuple(begun), seconds=taken))
    return sorted(made, key=lambda batch: -batch.seconds)


def apart(batch: Batch) -> list[Batch]:
    """Each unit in a batch of its own."""
    own = batch.seconds / len(batch.units)
    return [Batch(units=(unit,), seconds=own) for unit in batch.units]
