"""The outcome of a comparison."""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.core.record import Quantity, TokenCounts, Verdict


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The outcome of comparing one quantity.

    Args:
        quantity: its name.
        verdict: PASSED, or the first fault of shape, dtype, finiteness, numbers.
        error: error of the row named by ``where``; infinite where it could not be measured.
        allowed: for that row.
        where: the first bad row, or the worst one if none is bad.
        rows: number of rows.
        bad_rows: number of bad ones.
        message: one line; empty where nothing is wrong.
        tokens: of a generated text.
    """

    quantity: str
    verdict: Verdict
    error: float = 0.0
    allowed: float = 0.0
    where: str = ""
    rows: int = 0
    bad_rows: int = 0
    message: str = ""
    tokens: TokenCounts = field(default_factory=TokenCounts)

    @property
    def passed(self) -> bool:
        """Whether nothing was wrong."""
        return self.verdict is Verdict.PASSED

    def to_quantity(self) -> Quantity:
        """The part of it that a record keeps."""
        return Quantity(
            name=self.quantity, error=self.error, allowed=self.allowed, where=self.where
        )
