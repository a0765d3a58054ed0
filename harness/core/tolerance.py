"""Error budgets: the allowed distance of each quantity from the oracle.

``allowed = max(floor, factor * error of a plain dense implementation at the same dtype)``, for
every row by itself; the mean over the rows has ``mean_factor`` in place of ``factor``. Errors are
relative L2 distances of a row (one query token, one cache slot), because attention outputs shrink
with the square root of the length: an absolute tolerance that fits a short text passes zeros on a
long one. ``suites/selfcheck/oracle/test_calibration.py`` shows which faults these budgets catch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.core.case import Dtype, KVDtype
from harness.errors import UsageError, rejected


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Allowed error of one quantity at one dtype.

    Args:
        floor: relative L2 error that no row is refused for.
        factor: of the plain dense implementation's error, row by row.
        mean_factor: of its mean error, for the mean over the rows.
        why: origin of the floor.
    """

    floor: float
    factor: float = 2.0
    mean_factor: float = 1.5
    why: str

    def times(self, factor: float) -> Budget:
        """The budget of a kernel whose roundings a plain implementation does not have."""
        factors = (self.factor * factor, self.mean_factor * factor)
        return replace(self, floor=self.floor * factor, factor=factors[0], mean_factor=factors[1])


ONE_ROUNDING = "one rounding of every element to the dtype"
HEAD_PRODUCT = "one rounding of the hidden state, doubled by cancellation in the head's product"
FLOAT32_SUM = "float32 sums of some ten thousand terms in another order"
FLOAT32_HEAD_PRODUCT = "the same, and the head's product on top"
FP8_TIES = "a rounding of the element before it is cast moves one in sixty across an FP8 tie"

BUDGETS = {
    (Dtype.BF16, KVDtype.AUTO, "hidden_states"): Budget(floor=2.0e-3, why=ONE_ROUNDING),
    (Dtype.BF16, KVDtype.AUTO, "logits"): Budget(floor=4.0e-3, why=HEAD_PRODUCT),
    (Dtype.BF16, KVDtype.AUTO, "kv_cache"): Budget(floor=2.0e-3, why=ONE_ROUNDING),
    (Dtype.FP16, KVDtype.AUTO, "hidden_states"): Budget(floor=2.5e-4, why=ONE_ROUNDING),
    (Dtype.FP16, KVDtype.AUTO, "logits"): Budget(floor=5.0e-4, why=HEAD_PRODUCT),
    (Dtype.FP16, KVDtype.AUTO, "kv_cache"): Budget(floor=2.5e-4, why=ONE_ROUNDING),
    (Dtype.FP32, KVDtype.AUTO, "hidden_states"): Budget(floor=1.0e-5, why=FLOAT32_SUM),
    (Dtype.FP32, KVDtype.AUTO, "logits"): Budget(floor=2.0e-5, why=FLOAT32_HEAD_PRODUCT),
    (Dtype.FP32, KVDtype.AUTO, "kv_cache"): Budget(floor=1.0e-6, why=ONE_ROUNDING),
    (Dtype.BF16, KVDtype.FP8, "hidden_states"): Budget(floor=2.0e-3, why=ONE_ROUNDING),
    (Dtype.BF16, KVDtype.FP8, "logits"): Budget(floor=4.0e-3, why=HEAD_PRODUCT),
    (Dtype.BF16, KVDtype.FP8, "kv_cache"): Budget(floor=1.6e-2, why=FP8_TIES),
    (Dtype.FP16, KVDtype.FP8, "hidden_states"): Budget(floor=2.5e-4, why=ONE_ROUNDING),
    (Dtype.FP16, KVDtype.FP8, "logits"): Budget(floor=5.0e-4, why=HEAD_PRODUCT),
    (Dtype.FP16, KVDtype.FP8, "kv_cache"): Budget(floor=1.6e-2, why=FP8_TIES),
    (Dtype.FP32, KVDtype.FP8, "hidden_states"): Budget(floor=1.0e-5, why=FLOAT32_SUM),
    (Dtype.FP32, KVDtype.FP8, "logits"): Budget(floor=2.0e-5, why=FLOAT32_HEAD_PRODUCT),
    (Dtype.FP32, KVDtype.FP8, "kv_cache"): Budget(floor=1.6e-2, why=FP8_TIES),
}

# A row of logits with relative error e moves the gap between two of them by about e * sqrt(2)
# root mean squares of the row; each limit is four such deviations at twice the logits' floor.
TIE_MARGINS = {Dtype.BF16: 4.5e-2, Dtype.FP16: 5.7e-3, Dtype.FP32: 2.3e-4}

# The oracle follows a text wherever it goes, so every token has an answer. In float32 none may be
# without one; in 16 bits, where most texts part from the oracle's own, one in fifty.
UNJUDGED_SHARES = {Dtype.BF16: 0.02, Dtype.FP16: 0.02, Dtype.FP32: 0.0}


def budget(quantity: str, dtype: Dtype, kv_dtype: KVDtype = KVDtype.AUTO) -> Budget:
    """The row of the table.

    Raises:
        UsageError: there is no such quantity.
    """
    found = BUDGETS.get((dtype, kv_dtype, quantity))
    if found is None:
        names = sorted({name for _, _, name in BUDGETS})
        raise UsageError(rejected("quantity", quantity, names))
    return found


def tie_margin(dtype: Dtype) -> float:
    """Largest top-1 minus top-2 margin, in units of the row's RMS, at which either may win."""
    return TIE_MARGINS[dtype]


def unjudged_share(dtype: Dtype) -> float:
    """Largest share of a text's tokens that may be without the oracle's judgement."""
    return UNJUDGED_SHARES[dtype]
