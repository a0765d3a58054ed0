"""What a comparison returns."""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.record import Quantity, Verdict


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The outcome of comparing one quantity.

    Args:
        quantity: what was compared.
        verdict: PASSED, or what was wrong first: shape, dtype, finiteness, numbers.
        error: error of the row named by ``where``; infinite where it could not be measured.
        allowed: what that row was allowed.
        where: the first bad row, or the worst one if none is bad.
        rows: rows compared.
        bad_rows: how many of them are bad.
        message: one line; empty where there is nothing to say.
    """

    quantity: str
    verdict: Verdict
    error: float = 0.0
    allowed: float = 0.0
    where: str = ""
    rows: int = 0
    bad_rows: int = 0
    message: str = ""

    @property
    def passed(self) -> bool:
        """Whether nothing was wrong."""
        return self.verdict is Verdict.PASSED

    def to_quantity(self) -> Quantity:
        """What a record keeps of it."""
        return Quantity(
            name=self.quantity, error=self.error, allowed=self.allowed, where=self.where
        )
