"""A combination is feasible where some row can have it; one that is not has its reason."""

from __future__ import annotations

import pytest

from fixtures.covering.feasible import Feasibility, Values
from fixtures.covering.rows import case_of
from fixtures.tables.axes import CPU, MACHINES, Value
from harness.core.capability import CAPABILITIES, refusal
from harness.core.case import Dtype, Execution, Family, KVDtype, Mode

SM90 = next(machine for machine in MACHINES if machine.name == "sm90")
ON = {machine: Feasibility(machine) for machine in MACHINES}
VERIFY, EXTEND = Mode.TARGET_VERIFY, Mode.EXTEND

FEASIBLE: tuple[Values, ...] = (
    {"kernel": "xqa", "window": 20, "width": 16},  # in a decode
    {"page": 128, "width": 16},
    {"kernel": "trtllm_gen", "page": 32},
    {"group": 128, "kernel": "trtllm_gen"},  # of MLA
    {"batch": 64, "length": 1024},
    {"batch": 1, "length": 32768, "group": 128},
    {"batch": 64, "group": 128},  # in a decode
    {"kv": KVDtype.FP8, "family": Family.MLA},
)
INFEASIBLE: tuple[tuple[Values, str], ...] = (
    ({"kernel": "flash_mla", "page": 32}, "flash_mla refuses page_size 32: accepts ['64']"),
    ({"kernel": "flash_mla", "kv": KVDtype.FP8}, "flash_mla refuses kv_dtype float8_e4m3fn"),
    (
        {"kernel": "xqa", "mode": VERIFY, "window": 20},
        "xqa refuses window_left 20: accepts -1 where a request has more than 1 query tokens",
    ),
    ({"family": Family.MLA, "window": 20}, "trtllm_gen refuses window_left 20: accepts -1"),
    ({"dim": 576, "sinks": "yes"}, "flash_mla refuses sinks True: accepts False"),
    ({"family": Family.MHA, "group": 128}, "xqa refuses group_size 128: accepts <= 32"),
    (
        {"family": Family.MLA, "kernel": "trtllm_gen", "dtype": Dtype.FP16},
        "trtllm_gen refuses dtype float16: accepts ['bfloat16']",
    ),
    ({"mode": EXTEND, "execution": Execution.GRAPH}, "extend has no graph"),
    ({"mode": EXTEND, "padding": "bucket"}, "extend has no graph"),
    ({"mode": Mode.MULTI_STEP_DRAFT, "width": 2}, "one draft step has no forward of its own"),
    ({"mode": Mode.DECODE, "accept": "one"}, "accept lengths are known in draft extends alone"),
    ({"scale": "fraction", "kv": KVDtype.AUTO}, "an FP8 cache alone is scaled"),
    ({"batch": 64, "length": 4096}, "batch × length > 65536 on cpu"),
    ({"length": 131072}, "batch × length > 65536 on cpu"),
    ({"batch": 2, "length": 32768, "group": 128}, "batch × length × group > 4194304 on cpu"),
    ({"mode": EXTEND, "batch": 64, "group": 32}, "batch × group > 512 on cpu"),
)


@pytest.mark.parametrize("values", FEASIBLE, ids=str)
def test_a_row_has_what_is_feasible(values: dict[str, Value]) -> None:
    row = ON[CPU].completed(values)
    assert row is not None
    assert values.items() <= row.items()
    assert ON[CPU].why_not(values) is None
    case = case_of(row)
    assert refusal(case, CAPABILITIES[case.family, str(row["kernel"])]) is None


@pytest.mark.parametrize(("values", "why"), INFEASIBLE, ids=[str(row[0]) for row in INFEASIBLE])
def test_what_is_not_has_its_reason(values: dict[str, Value], why: str) -> None:
    assert ON[CPU].completed(values) is None
    assert why in str(ON[CPU].why_not(values))


def test_a_gpu_has_its_own_kernels_and_bears_more() -> None:
    assert ON[SM90].why_not({"batch": 64, "length": 4096}) is None
    assert ON[SM90].why_not({"batch": 2, "length": 131072}) is None
    assert ON[SM90].why_not({"kernel": "flash_mla"}) is None
    refused = "trtllm_gen needs compute capability 10.0 or 10.3, this device has 9.0"
    assert ON[SM90].why_not({"kernel": "trtllm_gen"}) == refused
    assert refused in str(ON[SM90].why_not({"family": Family.MLA, "page": 32}))


def test_every_combination_is_asked_about_once() -> None:
    pairs = [dict(pair) for pair in ON[CPU].combinations(2)]
    sizes = [len(values) for values in ON[CPU].axes.values()]
    assert len(pairs) == (sum(sizes) ** 2 - sum(size**2 for size in sizes)) // 2
    assert len({tuple(pair.items()) for pair in pairs}) == len(pairs)
