"""Numerics of a real kernel: its roundings and its spread of NaN, which the oracle repeats."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from harness.core.case import Case, Execution, Inputs, KVDtype, Mode

ANY_MODE = frozenset(Mode)
DECODE_KERNEL = ANY_MODE - {Mode.EXTEND, Mode.DRAFT_EXTEND}
# Finite in every dtype of a cache, and far from what is drawn.
LARGE = 400.0


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Differences of a kernel's arithmetic from a plain dense implementation's.

    Args:
        budget_factor: times the error that a plain implementation is allowed.
        rounds_query: modes in which it rounds the query to FP8 over an FP8 cache.
        scales_query: modes in which it divides the query by a scale that follows from the batch
            before it rounds it so, or rounds it for some of the keys; the oracle cannot repeat
            that, the budget allows for it.
        rounds_weights: modes in which it rounds softmax weights to FP8 over an FP8 cache.
        unrounded_with_sinks: modes in which it rounds neither where there are attention sinks.
        spreads_nan: cache dtypes and modes in which it multiplies masked values by zero instead of
            skipping them, so that a NaN in an unwritten slot of a live page spreads.
        attends_new_keys: forwards that take the batch's own keys and values as they are, not as
            an FP8 cache holds them.
        merges: forwards that round twice more: two partial results, and then their sum.
        source: of these facts.
    """

    budget_factor: float = 1.0
    rounds_query: frozenset[Mode] = frozenset()
    scales_query: frozenset[Mode] = frozenset()
    rounds_weights: frozenset[Mode] = frozenset()
    unrounded_with_sinks: frozenset[Mode] = frozenset()
    spreads_nan: frozenset[KVDtype | Mode] = frozenset()
    attends_new_keys: frozenset[tuple[Mode, Execution]] = frozenset()
    merges: frozenset[tuple[Mode, Execution]] = frozenset()
    source: str = ""

    def of(self, case: Case) -> Numerics:
        """In the forwards of a case, without the roundings over an FP8 cache that these lack."""
        if case.kv_dtype is not KVDtype.FP8:
            plain = ANY_MODE
        else:
            plain = self.unrounded_with_sinks if case.sinks else frozenset[Mode]()
        return replace(
            self,
            rounds_query=self.rounds_query - plain,
            scales_query=self.scales_query - plain,
            rounds_weights=self.rounds_weights - plain,
        )

    def budget(self, case: Case, execution: Execution) -> float:
        """Times the error that a plain implementation is allowed, in a forward.

        Two roundings more are two errors of a row of its kind. All columns of a weighted row are
        alike and round alike: two of bfloat16's are 2 ** -7, four times what a row is allowed.
        """
        if (case.mode, execution) not in self.merges:
            return self.budget_factor
        return self.budget_factor * (4 if case.inputs is Inputs.WEIGHTED else 3)

    def unread(self, case: Case) -> float:
        """Content of slots that no query may see: NaN, or where that spreads, a large number."""
        return LARGE if self.spreads_nan & {case.kv_dtype, case.mode} else math.nan


PLAIN = Numerics()
