"""Comparison of token sequences, which may differ after a tie, and of plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from deepdiff import DeepDiff

from harness.core.record import Verdict
from harness.differential.compare.outcome import Comparison

SHOWN_DIFFERENCES = 4


def compare_tokens(
    obtained: Sequence[int],
    expected: Sequence[int],
    margins: Sequence[float],
    tie: float,
    quantity: str = "tokens",
) -> Comparison:
    """Equal sequences, or a first difference at which the oracle itself was undecided.

    After a tie two right answers part ways, so nothing after it is judged; the message of the
    passed comparison says so. Fit for tokens, and for accept lengths with their step margins.

    Args:
        obtained: from the subject.
        expected: from the oracle.
        margins: the oracle's top-1 minus top-2 at every expected item, in units of the row's RMS.
        tie: largest margin at which either may win, see ``tolerance.tie_margin``.
        quantity: its name in messages and records.
    """
    pairs = enumerate(zip(obtained, expected, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(obtained), len(expected)))
    if at == len(obtained) == len(expected):
        return Comparison(quantity=quantity, verdict=Verdict.PASSED, rows=at)
    margin = margins[at] if at < min(len(margins), len(obtained), len(expected)) else torch.inf
    tied = margin <= tie
    shown = [str(items[at]) if at < len(items) else "the end" for items in (obtained, expected)]
    cause = f"margin {margin:.2e} is {'a tie: within' if tied else 'no tie: above'} {tie:.2e}"
    return Comparison(
        quantity=quantity,
        verdict=Verdict.PASSED if tied else Verdict.WRONG_TOKENS,
        error=0.0 if tied else margin,
        allowed=tie,
        where=f"item {at}",
        rows=len(expected),
        bad_rows=0 if tied else 1,
        message=f"{quantity}: item {at} is {shown[0]}, expected {shown[1]}; {cause}",
    )


def compare_exact(
    quantity: str, obtained: Any, expected: Any, verdict: Verdict = Verdict.BROKEN_INVARIANT
) -> Comparison:
    """Plain data (lists, dicts, numbers, tensors of integers) that must be equal, types included.

    Args:
        quantity: its name in messages and records.
        obtained: from the subject.
        expected: plain data.
        verdict: of a difference.
    """
    difference = DeepDiff(_plain(expected), _plain(obtained), zip_ordered_iterables=True)
    if not difference:
        return Comparison(quantity=quantity, verdict=Verdict.PASSED)
    lines = difference.pretty().splitlines()
    more = f"; and {len(lines) - SHOWN_DIFFERENCES} more" if len(lines) > SHOWN_DIFFERENCES else ""
    return Comparison(
        quantity=quantity,
        verdict=verdict,
        error=torch.inf,
        where=lines[0],
        bad_rows=len(lines),
        message=f"{quantity}: {'; '.join(lines[:SHOWN_DIFFERENCES])}{more}",
    )


def _plain(value: Any) -> Any:
    """Tensors as their dtype and values, so that a difference names the index."""
    if isinstance(value, torch.Tensor):
        return {"dtype": str(value.dtype), "values": value.tolist()}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
