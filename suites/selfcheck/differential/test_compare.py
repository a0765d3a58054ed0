"""A comparison says what is wrong first, where and by how much; nothing invalid ever passes."""

from __future__ import annotations

import pytest
import torch

from harness.core.record import Quantity, Verdict
from harness.core.tolerance import Budget
from harness.differential.compare import compare, compare_exact

BUDGET = Budget(floor=0.01, why="by hand")
EXPECTED = torch.tensor([[3.0, 4.0], [0.0, 10.0], [6.0, 8.0]], dtype=torch.float64)


def judged(obtained, expected=EXPECTED, reference=None, **given):
    reference = expected.float() if reference is None else reference
    return compare("logits", obtained, expected, reference, BUDGET, **given)


def test_rows_are_measured_by_their_own_norm():
    obtained = EXPECTED.float()
    obtained[0, 0] += 0.04
    passed = judged(obtained)
    assert (passed.verdict, passed.where, passed.rows) == (Verdict.PASSED, "row 0", 3)
    assert passed.error == pytest.approx(0.04 / 5, rel=1e-4)
    assert (passed.allowed, passed.message, passed.bad_rows) == (0.01, "", 0)
    assert passed.passed
    obtained[0, 0] += 0.02
    red = judged(obtained, locate=["request 0 position 7", "", ""])
    assert (red.verdict, red.where) == (Verdict.WRONG_NUMBERS, "request 0 position 7")
    assert red.message == (
        "logits: 1 of 3 rows wrong, first at request 0 position 7: error 1.20e-02, allowed 1.00e-02"
    )
    quantity = red.to_quantity()
    assert quantity == Quantity(name="logits", error=red.error, allowed=0.01, where=red.where)


def test_the_first_bad_row_is_named_and_all_are_counted():
    obtained = EXPECTED.float()
    obtained[1:] *= torch.tensor([[1.02], [1.5]])
    red = judged(obtained, locate=lambda row: f"position {row * 10}")
    assert (red.bad_rows, red.where) == (2, "position 10")
    assert red.error == pytest.approx(0.02, rel=1e-4)


def test_each_row_is_allowed_twice_its_reference_error():
    reference = EXPECTED.float()
    reference[2] *= 1.1
    obtained = EXPECTED.float() * torch.tensor([[1.0], [1.0], [1.06]])
    assert judged(obtained, reference=reference).allowed == pytest.approx(0.2, rel=1e-4)
    assert judged(obtained, reference=reference).passed
    # An error of 0.8 % of 1 % is nearer to its limit than one of 6 % of 20 %.
    near = judged(obtained * torch.tensor([[1.008], [1.0], [1.0]]), reference=reference)
    said = "where no row is wrong the one that is nearest to its limit is named"
    assert (near.passed, near.where) == (True, "row 0"), said
    assert (near.error, near.allowed) == (pytest.approx(0.008, rel=1e-3), 0.01), said
    obtained[0] *= 1.06
    assert judged(obtained, reference=reference).bad_rows == 1


def test_the_mean_has_a_budget_of_its_own():
    obtained, reference = EXPECTED.float() * 1.018, EXPECTED.float() * 1.01
    red = judged(obtained, reference=reference)
    said = "a mean error over rows of 1.8 % is red above 1.5 times the plain implementation's 1 %"
    told = f"{said}: {red.verdict}, allowed {red.allowed:.3f}"
    assert (red.verdict, red.where, red.bad_rows) == (
        Verdict.WRONG_NUMBERS,
        "mean over rows",
        0,
    ), told
    assert red.error == pytest.approx(0.018, rel=1e-3)
    assert red.allowed == pytest.approx(0.015, rel=1e-3)
    assert "every row is in its budget, but their mean is not" in red.message
    assert judged(EXPECTED.float() * 1.014, reference=reference).passed
    # Errors of 1, 1 and 4 % of the plain implementation: 2 % on average, of which 1.5 times is 3 %.
    reference = EXPECTED.float() * torch.tensor([[1.01], [1.01], [1.04]])
    red = judged(EXPECTED.float() * torch.tensor([[1.019], [1.019], [1.079]]), reference=reference)
    said = "the mean over rows is compared with the mean of the plain implementation's errors"
    assert (red.where, red.allowed) == ("mean over rows", pytest.approx(0.03, rel=1e-3)), said


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("broken", ["obtained", "expected", "reference"])
def test_what_is_not_finite_never_passes(value, broken):
    given = {
        "expected": EXPECTED.clone(),
        "obtained": EXPECTED.float(),
        "reference": EXPECTED.float(),
    }
    given[broken][1, 0] = value
    red = judged(**given)
    assert (red.verdict, red.where, red.error) == (Verdict.NON_FINITE, "row 1", torch.inf)
    assert red.message == f"logits: {broken} is not finite in 1 of 3 rows, first at row 1"


def test_nan_met_by_nan_does_not_pass():
    nan = torch.full((2, 2), torch.nan)
    assert judged(nan, nan.double(), nan).verdict is Verdict.NON_FINITE


def test_shape_is_judged_before_dtype_and_dtype_before_numbers():
    wrong = torch.full((2, 2), torch.nan, dtype=torch.float16)
    red = judged(wrong)
    assert red.verdict is Verdict.WRONG_SHAPE
    assert red.message == "logits: obtained shape [2, 2], expected [3, 2]"
    red = judged(torch.full((3, 2), torch.nan, dtype=torch.float16))
    assert red.verdict is Verdict.WRONG_DTYPE
    assert red.message == "logits: obtained dtype torch.float16, expected torch.float32"
    assert judged(EXPECTED.float(), reference=wrong).verdict is Verdict.WRONG_SHAPE
    red = judged(None)
    assert red.message == "logits: obtained NoneType, expected a tensor"


def test_zero_rows_are_met_by_zeros_or_by_what_is_negligible():
    expected = torch.zeros(2, 4, dtype=torch.float64)
    assert judged(torch.zeros(2, 4), expected).passed, "a row of zeros is met by zeros"
    dirty = torch.zeros(2, 4)
    dirty[1, 3] = 1e-30
    red = judged(dirty, expected)
    said = f"where all expected rows are zeros, 1e-30 is wrong: {red.verdict} in {red.where}"
    assert (red.verdict, red.where, red.error) == (
        Verdict.WRONG_NUMBERS,
        "row 1",
        torch.inf,
    ), said
    expected[0] = 1.0
    said = "an error in a row of zeros beside a row of ones is"
    found = judged(torch.tensor([[1.0] * 4, [1e-9] * 4]), expected)
    assert found.passed, f"{said} negligible at 1e-9: {found.message}"
    found = judged(torch.tensor([[1.0] * 4, [1e-6] * 4]), expected)
    assert not found.passed, f"{said} too large to be negligible at 1e-6"


def test_nothing_compared_is_nothing_wrong():
    empty = judged(torch.zeros(0, 4), torch.zeros(0, 4, dtype=torch.float64))
    assert (empty.verdict, empty.rows, empty.allowed) == (Verdict.PASSED, 0, 0.01)


@pytest.mark.parametrize("shape", [(), (3,), (3, 2, 2)])
def test_rows_of_any_rank(shape):
    expected = torch.ones(shape, dtype=torch.float64)
    assert judged(torch.ones(shape), expected).passed
    assert not judged(torch.ones(shape) * 1.02, expected).passed


def test_fp8_values_are_compared_as_numbers():
    expected = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    stored = expected.to(torch.float8_e4m3fn)
    assert judged(stored, expected, stored).passed
    assert not judged((expected * 1.2).to(torch.float8_e4m3fn), expected, stored).passed


def test_labels_that_run_out_do_not_hide_the_failure():
    assert judged(EXPECTED.float() * 1.1, locate=[]).where == "row 0"


def test_exact_data_tells_index_and_dtype():
    table = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    assert compare_exact("page_table", table.clone(), table).passed
    of_int64 = compare_exact("page_table", table.long(), table)
    assert not of_int64.passed, "exact data of another dtype does not pass: int64 for int32"
    other = table.clone()
    other[1, 0] = 7
    red = compare_exact("page_table", other, table)
    assert red.verdict is Verdict.BROKEN_INVARIANT
    assert red.message == "page_table: Value of root['values'][1][0] changed from 3 to 7."
    assert "torch.int64" in of_int64.message
    red = compare_exact("lens", {"q": (1, 2)}, {"q": [1, 3]}, Verdict.WRONG_GOLDEN)
    assert (red.verdict, red.bad_rows) == (Verdict.WRONG_GOLDEN, 1)
    assert not compare_exact("flag", 1, True).passed
    said = "tuples are compared as lists are, tensors in them by index"
    assert compare_exact("tables", (table.clone(), 5), [table, 5]).passed, said
    red = compare_exact("tables", (table, other), (table, table))
    assert red.message == "tables: Value of root[1]['values'][1][0] changed from 3 to 7.", said


def test_many_differences_are_one_line():
    red = compare_exact("lens", list(range(1, 10)), list(range(9)))
    assert "\n" not in red.message, f"differences are told in one line: {red.message!r}"
    said = "of nine differences those that are not shown are counted"
    assert "; and " in red.message, f"{said}: {red.message!r}"
    for count, more in ((4, ""), (5, "; and 1 more")):
        red = compare_exact("lens", [7] * count, list(range(count)))
        said = f"bad_rows counts all of {count} differences, not {red.bad_rows}"
        assert red.bad_rows == count, said
        rest = red.message.partition("root[3] changed from 3 to 7.")[2]
        said = f"of {count} differences four are shown and only others are counted behind them"
        assert rest == more, f"{said}: {more!r}, not {rest!r}"
