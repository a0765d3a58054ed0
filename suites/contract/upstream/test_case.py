"""A row that cannot be is refused where it is written; what follows from a good one is right."""

from __future__ import annotations

from typing import Any

import pytest

from fixtures.tables import CASES, find
from harness.core.case import Case, Family, Inputs, KVDtype, Mode
from harness.errors import UsageError

GOOD: dict[str, Any] = {
    "id": "row",
    "family": Family.MHA,
    "mode": Mode.DECODE,
    "prefix_lens": (5, 40),
}

REFUSED = (
    ({"extend_lens": (1, 2)}, "extend_lens = (1, 2) is not accepted; accepted: 0 values in mode"),
    ({"mode": Mode.EXTEND, "extend_lens": (3,)}, "accepted: 2 values in mode extend"),
    ({"mode": Mode.DRAFT_EXTEND}, "accept_lens = () is not accepted; accepted: 2 values"),
    ({"mode": Mode.IDLE}, "prefix_lens = (5, 40) is not accepted; accepted: ()"),
    ({"mode": Mode.DRAFT_EXTEND_V2, "accept_lens": (0, 2)}, "accept_lens = (0, 2)"),
    ({"mode": Mode.DRAFT_EXTEND_V2, "accept_lens": (2, 5)}, "1 … num_draft_tokens = 4 each"),
    ({"prefix_lens": (5, 257)}, "accepted: <= max_context_len = 256 each"),
    ({"mode": Mode.EXTEND, "extend_lens": (9, 300)}, "total_lens = (14, 340)"),
    ({"num_q_heads": 3}, "num_q_heads = 3 is not accepted; accepted: a multiple of"),
)


@pytest.mark.parametrize(("change", "cause"), REFUSED, ids=[row[1][:40] for row in REFUSED])
def test_a_row_that_cannot_be_is_refused_by_field_value_and_what_would_do(
    change: dict[str, Any], cause: str
) -> None:
    with pytest.raises(UsageError) as caught:
        Case(**GOOD | change)
    assert cause in str(caught.value)
    assert str(caught.value).startswith("case row: ")


DERIVED = (
    (Mode.EXTEND, {"extend_lens": (7, 2)}, (7, 2)),
    (Mode.DECODE, {}, (1, 1)),
    (Mode.MULTI_STEP_DRAFT, {"num_steps": 4, "num_draft_tokens": 6}, (3, 3)),
    (Mode.TARGET_VERIFY, {"num_steps": 4, "num_draft_tokens": 6}, (6, 6)),
    (Mode.DRAFT_EXTEND, {"accept_lens": (3, 1)}, (3, 1)),
    (Mode.DRAFT_EXTEND_V2, {"accept_lens": (3, 1), "num_draft_tokens": 5}, (5, 5)),
)


@pytest.mark.parametrize(
    ("mode", "fields", "q_lens"), DERIVED, ids=[str(row[0]) for row in DERIVED]
)
def test_query_lengths_follow_from_the_mode(
    mode: Mode, fields: dict[str, Any], q_lens: tuple[int, ...]
) -> None:
    case = Case(**GOOD | fields | {"mode": mode})
    assert case.q_lens == q_lens
    assert case.total_lens == (5 + q_lens[0], 40 + q_lens[1])
    assert case.num_tokens == sum(q_lens)


@pytest.mark.parametrize(
    ("mode", "num_steps", "num_draft_tokens", "most"),
    [(Mode.MULTI_STEP_DRAFT, 7, 4, 256 + 7), (Mode.TARGET_VERIFY, 5, 9, 256 + 9)],
)
def test_a_request_may_reach_a_round_of_steps_or_of_draft_tokens_past_the_context(
    mode: Mode, num_steps: int, num_draft_tokens: int, most: int
) -> None:
    widths = {"num_steps": num_steps, "num_draft_tokens": num_draft_tokens}
    given = GOOD | widths | {"mode": mode, "prefix_lens": (256, 40)}
    said = "the wider of a draft's steps and a verify's tokens fits behind a full context"
    try:
        longest = Case(**given).max_total_len
    except UsageError as error:
        pytest.fail(f"{said}: {error}")
    assert longest == most, f"{said}: up to {most}, not {longest}"


def test_layers_of_an_fp8_cache_differ_in_both_scales() -> None:
    given = GOOD | {"kv_dtype": KVDtype.FP8}
    scaled = Case(**given | {"k_scale": 0.5, "v_scale": 2.0})
    said = "a scale of another layer is another number, of keys and of values"
    assert scaled.kv_scales == ((0.5, 2.0), (0.25, 0.25)), said
    assert Case(**given | {"v_scale": 2.0}).kv_scales == ((1.0, 2.0), (1.0, 0.25)), said
    weighted = Case(**given | {"k_scale": 0.5, "v_scale": 2.0, "inputs": Inputs.WEIGHTED})
    assert weighted.kv_scales == ((0.5, 2.0), (0.5, 2.0))


def test_seeds_depend_on_the_id_alone() -> None:
    case = Case(**GOOD)
    assert case.seed == Case(**GOOD | {"prefix_lens": (6, 40)}).seed
    assert case.seed != Case(**GOOD | {"id": "another"}).seed
    assert len({case.seed for case in CASES.values()}) == len(CASES)


def test_every_mode_and_family_has_at_least_25_rows() -> None:
    for family in Family:
        for mode in set(Mode) - {Mode.IDLE}:
            rows = [c for c in CASES.values() if c.family is family and c.mode is mode]
            assert len(rows) >= 25, (family, mode)


def test_an_unknown_case_id_names_its_nearest() -> None:
    with pytest.raises(UsageError) as caught:
        find("mha-decode-page_edge_onn")
    assert "mha-decode-page_edge_on" in str(caught.value)
    assert "\n" not in str(caught.value)
