"""Invariants of a forward's effects: waits of the host, entries of the kernel, operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from harness.core.case import Case, Family, Mode
from harness.core.conventions import Conventions
from harness.differential.invariants.classes import DISPATCH, HOST_SYNC, OPERATIONS

RAGGED = {(Family.MHA, Mode.EXTEND), (Family.MHA, Mode.DRAFT_EXTEND), (Family.MLA, Mode.EXTEND)}
"""Phases whose queries go to a context entry; MLA pads those of a draft extend."""


def check_waits(waits: Sequence[str]) -> list[str]:
    """A line for each place where the host waited for the device."""
    return [f"the host waits for the device: {wait} [{HOST_SYNC}]" for wait in waits]


def check_entries(
    calls: Sequence[str], case: Case, conventions: Conventions, *, captured: int | None = None
) -> list[str]:
    """Every attention of every layer and draft step went to the entry that the mode demands.

    Args:
        calls: entries of the kernel, in order.
        case: what ran.
        conventions: of the backend.
        captured: graphs that were captured meanwhile, each after a warm-up or several; None for
            one eager forward.
    """
    if conventions.context_modes is None:
        return []
    ragged = (case.family, case.mode) in RAGGED or case.mode in conventions.context_modes
    entry = ("mla_" if case.family is Family.MLA else "") + ("context" if ragged else "decode")
    forwards = case.num_steps - 1 if case.mode is Mode.MULTI_STEP_DRAFT else 1
    due = case.num_layers * forwards if case.bs else 0
    least = due * (captured or 1)
    found = Counter(calls)
    right = found[entry] == least if captured is None else found[entry] >= 2 * least
    if set(found) <= {entry} and right and not (due and found[entry] % due):
        return []
    told = ", ".join(f"{name} {times} times" for name, times in found.items()) or "nothing"
    wanted = f"{entry} {least} times" + ("" if captured is None else " and as often to warm up")
    return [f"the kernel was asked for {told}, expected {wanted} [{DISPATCH}]"]


def check_operations(what: str, counted: int, expected: int) -> list[str]:
    """A line where a count is another than the formula's."""
    if counted == expected:
        return []
    return [f"{what}: {counted} operations, expected {expected} [{OPERATIONS}]"]
