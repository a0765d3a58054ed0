"""Randomised paired blocks: two arms next to each other, in an order drawn from a recorded seed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from harness.bench.stats.e_process import Array
from harness.bench.stats.estimates import centre
from harness.bench.stats.margin import checked
from harness.errors import ContractError, UsageError, rejected


class Design(StrEnum):
    """The two orders of a block's trials, of which one is drawn for each block."""

    PAIRS = "AB/BA"
    """One trial per arm: half the launches."""
    QUADS = "ABBA/BAAB"
    """Two trials per arm: a linear drift adds the same to both arms."""
    THUE_MORSE = "ABBABAABBAABABBABAABABBAABBABAAB/BAABABBAABBABAABABBABAABBAABABBA"
    """Sixteen short trials per arm on one launch: a machine that is fast and slow for seconds, and
    drifts, affect both arms alike, and a spike moves two of sixteen neighbours at most."""

    THUE_MORSE_8 = "ABBABAAB/BAABABBA"
    """Four trials per arm on one launch: where launches differ more than what runs on them."""

    @property
    def orders(self) -> tuple[str, str]:
        """The two orders; each is the other with the arms swapped."""
        first, second = self.value.split("/")
        return first, second

    @property
    def launches(self) -> int:
        """Servers of a block: one per arm, or one per trial where no two share a launch."""
        return 2 if self.shares_launches else len(self.orders[0])

    @property
    def shares_launches(self) -> bool:
        """Whether all trials of an arm in a block run on one launch."""
        return self in (Design.THUE_MORSE, Design.THUE_MORSE_8)

    def servers(self, sessions: int) -> int:
        """Servers of a block of each session: where launches are shared, one reference is too."""
        return 1 + sessions if self.shares_launches else sessions * self.launches


def draw_order(seed: str, index: int, design: Design) -> str:
    """The randomised order of block ``index`` (from 0); anybody can recompute it from the seed."""
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    return design.orders[digest[0] & 1]


@dataclass(frozen=True, kw_only=True)
class Block:
    """One block of trials, in the order they ran.

    Args:
        index: its place in the session, from 0; invalid blocks keep theirs.
        order: such as ``BAAB``, one letter per trial.
        values: one number per trial, in run order and in the metric's unit.
        mhz: median SM clock during each trial; empty where unknown, or where it follows the load.
        invalid: why its measurement cannot be believed; empty otherwise.
    """

    index: int
    order: str
    values: tuple[float, ...]
    mhz: tuple[float, ...] = ()
    invalid: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        known = [order for design in Design for order in design.orders]
        if self.order not in known:
            raise UsageError(rejected("order", self.order, ", ".join(known)))
        if self.invalid:
            return  # A trial that failed may have left no number, and none is read.
        self._check("values", self.values)
        if self.mhz:
            self._check("mhz", self.mhz)

    def _check(self, field: str, numbers: tuple[float, ...]) -> None:
        if len(numbers) != len(self.order):
            accepted = f"one number for each trial of {self.order}"
            raise UsageError(rejected(f"block {self.index} {field}", numbers, accepted))
        for place, number in enumerate(numbers):
            checked(f"block {self.index} {field}[{place}]", number)

    def arm(self, letter: str) -> float:
        """Geometric mean of the arm's trials, in the metric's unit."""
        return math.exp(self._log_mean(letter, self.values))

    @property
    def effect(self) -> float:
        """Ln of B / A of neighbouring trials, their Hodges–Lehmann estimate: of two the mean."""
        return self._effect(self.values)

    @property
    def effect_in_cycles(self) -> float:
        """The same of time × clock, for a metric that is a time; needs ``mhz``."""
        return self._effect([value * mhz for value, mhz in zip(self.values, self.mhz, strict=True)])

    @property
    def effect_of_clock(self) -> float:
        """The same of the clock; needs ``mhz``."""
        return self._effect(self.mhz)

    def _effect(self, numbers: Sequence[float]) -> float:
        return float(centre(neighbours(np.log(numbers), self.order)))

    def _log_mean(self, letter: str, numbers: Sequence[float]) -> float:
        logs = [math.log(n) for arm, n in zip(self.order, numbers, strict=True) if arm == letter]
        return math.fsum(logs) / len(logs)


def neighbours(logs: Array, order: str) -> Array:
    """B minus A of each two trials in a row, [..., n / 2] of [..., n] in run order."""
    signs = np.array([1.0 if arm == "B" else -1.0 for arm in order])
    signed = logs * signs
    return np.asarray(signed[..., 0::2] + signed[..., 1::2])


def check_session(blocks: Sequence[Block], seed: str, design: Design) -> None:
    """Check that the blocks are those of the seed: none missing, none reordered.

    Raises:
        ContractError: a block is missing, or its order is not the drawn one. With a fixed order a
            drift looks like an effect (false alarms of 36 to 96 % instead of 1 %); a block left out
            for its result is worse.
    """
    for place, block in enumerate(blocks):
        if block.index != place:
            raise ContractError(rejected("block index", block.index, f"{place}, none left out"))
        drawn = draw_order(seed, place, design)
        if block.order != drawn:
            raise ContractError(rejected(f"block {place} order", block.order, f"{drawn}, as drawn"))
