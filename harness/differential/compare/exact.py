"""Comparison of plain data."""

from __future__ import annotations

from typing import Any

import torch
from deepdiff import DeepDiff

from harness.core.record import Verdict
from harness.differential.compare.outcome import Comparison

SHOWN_DIFFERENCES = 4


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
