"""Comparison of tensors row by row: the first wrong row, and its error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from harness.core.record import Verdict
from harness.core.tolerance import Budget
from harness.differential.compare.outcome import Comparison

Locate = Callable[[int], str] | Sequence[str] | None

# Rows that are this much smaller than the largest one are measured against it instead: the
# remainder of a sum that cancels is rounding, not signal.
NEGLIGIBLE = 2.0**-20


def compare(
    quantity: str,
    obtained: torch.Tensor | None,
    expected: torch.Tensor,
    reference: torch.Tensor,
    budget: Budget,
    locate: Locate = None,
) -> Comparison:
    """Judge a tensor row by row (dimension 0); never raises.

    Args:
        quantity: its name in messages and records.
        obtained: from the subject.
        expected: from the oracle, of the same shape.
        reference: from the plain dense implementation, of that shape and of the dtype that
            ``obtained`` must have.
        budget: the row of the tolerance table.
        locate: names row i (request, position, page) in a message; "row i" by default.
    """

    def failed(verdict: Verdict, message: str, **facts: Any) -> Comparison:
        line = f"{quantity}: {message}"
        return Comparison(
            **{"error": torch.inf} | facts, quantity=quantity, verdict=verdict, message=line
        )

    if not isinstance(obtained, torch.Tensor):
        return failed(Verdict.WRONG_SHAPE, f"obtained {type(obtained).__name__}, expected a tensor")
    for name, tensor in (("obtained", obtained), ("reference", reference)):
        if tensor.shape != expected.shape:
            shapes = f"{name} shape {list(tensor.shape)}, expected {list(expected.shape)}"
            return failed(Verdict.WRONG_SHAPE, shapes)
    if obtained.dtype != reference.dtype:
        dtypes = f"obtained dtype {obtained.dtype}, expected {reference.dtype}"
        return failed(Verdict.WRONG_DTYPE, dtypes)
    values = {"obtained": obtained, "expected": expected, "reference": reference}
    rows = {name: _rows(tensor) for name, tensor in values.items()}
    for name, tensor in rows.items():
        finite = tensor.isfinite()
        if not bool(finite.all()):
            bad = (~finite).any(-1).nonzero().flatten().tolist()
            where = _label(locate, bad[0])
            counts = {"where": where, "rows": len(tensor), "bad_rows": len(bad)}
            said = f"{name} is not finite in {len(bad)} of {len(tensor)} rows, first at {where}"
            return failed(Verdict.NON_FINITE, said, **counts)
    return _compare_numbers(quantity, rows, budget, locate)


def _compare_numbers(
    quantity: str, rows: dict[str, torch.Tensor], budget: Budget, locate: Locate
) -> Comparison:
    errors = _relative(rows["obtained"], rows["expected"])
    plain = _relative(rows["reference"], rows["expected"])
    if not errors.numel():
        return Comparison(quantity=quantity, verdict=Verdict.PASSED, allowed=budget.floor)
    allowed = (budget.factor * plain).clamp(min=budget.floor)
    bad = (~(errors <= allowed)).nonzero().flatten().tolist()
    row = bad[0] if bad else int((errors / allowed).argmax())
    error, limit, where = float(errors[row]), float(allowed[row]), _label(locate, row)
    said = f"{len(bad)} of {len(errors)} rows wrong, first at {where}"
    mean = float(errors.mean())
    allowed_mean = max(budget.floor, budget.mean_factor * float(plain.mean()))
    if not bad and mean > allowed_mean:
        error, limit, where = mean, allowed_mean, "mean over rows"
        said = "every row is in its budget, but their mean is not"
    red = bool(bad) or error > limit
    numbers = f"error {error:.2e}, allowed {limit:.2e}"
    return Comparison(
        quantity=quantity,
        verdict=Verdict.WRONG_NUMBERS if red else Verdict.PASSED,
        error=error,
        allowed=limit,
        where=where,
        rows=len(errors),
        bad_rows=len(bad),
        message=f"{quantity}: {said}: {numbers}" if red else "",
    )


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """[rows, elements per row] in float64 on the host."""
    tensor = tensor.detach().cpu().double()
    return tensor.flatten(1) if tensor.dim() > 1 else tensor.reshape(-1, 1)


def _relative(obtained: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """L2 distance of every row over the row's norm; a zero tensor requires zeros."""
    distance = (obtained - expected).norm(dim=-1)
    norms = expected.norm(dim=-1)
    scale = norms.clamp(min=NEGLIGIBLE * float(norms.max())) if norms.numel() else norms
    return torch.where(distance == 0, 0.0, distance / scale)


def _label(locate: Locate, row: int) -> str:
    if locate is None:
        return f"row {row}"
    if callable(locate):
        return locate(row)
    return locate[row] if row < len(locate) else f"row {row}"
