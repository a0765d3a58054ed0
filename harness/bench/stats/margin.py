"""Equivalence margins: the effect that counts as none and the one that must be found, by metric."""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.errors import UsageError, rejected

PART = "phase_"
"""What the metrics of a step's phases begin with."""
MOST_FLOOR = 0.04
"""Of a level: what a floor may make of delta0."""


def checked(field: str, value: float, *, above: float = 0.0) -> float:
    """``value`` as it came, refused unless it is a finite number greater than ``above``.

    Raises:
        UsageError: naming field, value and what would have been accepted.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= above:
        raise UsageError(rejected(field, value, f"a finite number greater than {above:g}"))
    return value


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """A margin at one level, in log units of cost, and the largest number of valid blocks.

    Args:
        delta0: effects up to it count as none.
        delta1: effects from it on must not be accepted as equivalent.
        n_max: blocks after which nothing more is measured.
    """

    delta0: float
    delta1: float
    n_max: int

    def __post_init__(self) -> None:
        # Zero is allowed: the simulation shows validity without any slack.
        checked("delta0", self.delta0, above=-math.ulp(0))
        checked("delta1", self.delta1, above=self.delta0)
        checked("n_max", self.n_max)


@dataclass(frozen=True, kw_only=True)
class Margin:
    """A row of the margins table.

    Args:
        metric: its name in records.
        unit: of a measurement and of ``floor``.
        delta0, delta1: relative effects, 0.01 is one percent.
        floor: absolute difference under which an effect counts as none, in ``unit``; 0 is none.
        n_max: most valid blocks of a case; 0 where it is not measured to a verdict.
        higher_is_better: whether a larger measurement is the good one.
    """

    metric: str
    unit: str
    delta0: float = 0.0
    delta1: float = 0.0
    floor: float = 0.0
    n_max: int = 0
    higher_is_better: bool = False

    @property
    def is_part(self) -> bool:
        """Whether it is a part of a step: told beside the step time, which alone decides.

        A part counts in no family of e-BH and in no control, makes no run red, BLIND or INVALID and
        keeps no session open.
        """
        return self.metric.startswith(PART)

    def is_judged(self, level: float) -> bool:
        """Whether it gets a verdict where the reference arm measures about ``level``.

        A floor must leave room to blame a regression of 5 %. Parts are told whatever it hides.
        """
        return self.is_part or self.floor <= MOST_FLOOR * checked("level", level)

    def bounds(self, level: float, n_max: int) -> Bounds:
        """Log bounds where the reference arm measures about ``level`` in ``unit``.

        The floor may widen delta0; delta1 then keeps its distance. ``level`` must be known before
        the first block, from a calibration or a rehearsal: a margin that depends on the data it
        judges voids the error rates.

        Raises:
            UsageError: the level is no positive number.
        """
        least = math.log1p(self.floor / checked("level", level))
        delta0, delta1 = math.log1p(self.delta0), math.log1p(self.delta1)
        widened = max(delta0, least)
        return Bounds(delta0=widened, delta1=delta1 + (widened - delta0), n_max=n_max)

    def cost(self, ratio: float) -> float:
        """Log effect of a ratio B / A, signed so that positive is worse."""
        log = math.log(checked("ratio", ratio))
        return -log if self.higher_is_better else log

    def ratio(self, cost: float) -> float:
        """Ratio B / A of a log effect, the inverse of ``cost``; infinite bounds stay bounds."""
        return math.exp(-cost if self.higher_is_better else cost)
