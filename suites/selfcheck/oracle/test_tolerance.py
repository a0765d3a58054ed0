"""Every dtype has a budget for every quantity, ordered as the dtypes are, with a reason."""

from __future__ import annotations

import itertools

import pytest

from harness.core.case import Dtype, KVDtype
from harness.core.tolerance import BUDGETS, UNJUDGED_SHARES, budget, tie_margin, unjudged_share
from harness.errors import UsageError

QUANTITIES = ("hidden_states", "logits", "kv_cache")


def test_the_table_is_complete():
    assert set(BUDGETS) == set(itertools.product(Dtype, KVDtype, QUANTITIES))
    assert all(row.why and 1 < row.mean_factor < row.factor == 2 for row in BUDGETS.values())


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_floors_shrink_with_the_dtype(quantity):
    floors = [budget(quantity, dtype).floor for dtype in (Dtype.BF16, Dtype.FP16, Dtype.FP32)]
    assert floors == sorted(set(floors), reverse=True)


def test_no_floor_hides_a_scale_that_is_off_by_one_percent():
    floors = [(row.floor, key) for key, row in BUDGETS.items() if key[2] != "kv_cache"]
    floors.append((budget("kv_cache", Dtype.BF16).floor, (Dtype.BF16, KVDtype.AUTO, "kv_cache")))
    floor, (dtype, kv_dtype, quantity) = max(floors)
    said = (
        f"errors below a floor pass: that of {quantity} ({dtype}, cache {kv_dtype}) is below 0.5 %"
    )
    assert floor < 0.005, f"{said}, not {floor:.1%}"


def test_the_cache_alone_decides_the_floor_of_fp8():
    floors = {budget("kv_cache", dtype, KVDtype.FP8).floor for dtype in Dtype}
    assert max(floors) < 0.02, "keys of an FP8 cache are at most 2 % wrong"
    assert len(floors) == 1


@pytest.mark.parametrize("dtype", Dtype)
def test_a_tie_is_four_deviations_of_a_gap(dtype):
    deviation = 2 * budget("logits", dtype).floor * 2**0.5
    assert tie_margin(dtype) == pytest.approx(4 * deviation, rel=0.02)


def test_no_token_of_a_float32_text_goes_unjudged_and_few_of_any():
    assert UNJUDGED_SHARES.keys() == set(Dtype)
    assert unjudged_share(Dtype.FP32) == 0 < unjudged_share(Dtype.BF16) <= 0.02


def test_an_unknown_quantity_is_refused():
    with pytest.raises(UsageError, match=r"quantity = 'loss' is not accepted; accepted: .*logits"):
        budget("loss", Dtype.BF16)
