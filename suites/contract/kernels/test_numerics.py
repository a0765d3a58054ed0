"""A real kernel's numerics enter the expected answer, the budget and the poison alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fixtures.tables import find
from harness.core.capability import XQA
from harness.core.case import Case, Execution, KVDtype, Mode
from harness.core.numerics import LARGE, PLAIN, Numerics
from harness.core.tolerance import budget
from harness.differential.expected import expect
from harness.differential.inputs import make_trial_inputs
from harness.differential.pool_state import make_pool_state
from harness.oracle import low_precision_attend
from harness.subjects import find_subject

FP8_VERIFY = find("mha-target_verify-fp8_cache")
ROUNDS = Numerics(
    rounds_query=frozenset({Mode.TARGET_VERIFY}), rounds_weights=frozenset({Mode.TARGET_VERIFY})
)


def test_a_stand_in_has_plain_numerics_but_rounds_the_query_it_is_handed() -> None:
    xqa, gen = find_subject("trtllm_mha/xqa"), find_subject("trtllm_mha/trtllm_gen")
    assert xqa.numerics("cpu") == PLAIN
    assert xqa.numerics("cuda").budget_factor > 1
    assert gen.numerics("cpu").rounds_query == gen.numerics("cuda").rounds_query == frozenset(Mode)
    assert find_subject("trtllm_mha/reference").numerics("cuda") == PLAIN


@pytest.mark.parametrize(
    ("subject", "case", "spreads"),
    [
        ("trtllm_mha/xqa", "mha-target_verify-fp8_cache", True),
        ("trtllm_mha/xqa", "mha-target_verify-bs2_ragged", False),
        ("trtllm_mla/flash_mla", "mla-draft_extend_v1-bs2_ragged", True),
        ("trtllm_mla/flash_mla", "mla-draft_extend_v2-bs2_ragged", False),
    ],
)
def test_unread_slots_hold_nan_unless_the_kernel_spreads_it(
    subject: str, case: str, spreads: bool
) -> None:
    found = find_subject(subject).numerics("cuda").unread(find(case))
    assert found == LARGE if spreads else math.isnan(found)
    assert math.isnan(find_subject(subject).numerics("cpu").unread(find(case)))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float16])
def test_what_stands_for_nan_is_finite_and_far_off(dtype: torch.dtype) -> None:
    stored = torch.tensor(LARGE).to(dtype).float()
    assert stored.isfinite()
    assert stored > 300


def test_a_pool_state_is_poisoned_by_the_value_it_is_given() -> None:
    pool_state = make_pool_state(make_trial_inputs(FP8_VERIFY), unread=LARGE)
    assert all(buffer.float().isfinite().all() for buffer in pool_state.buffers().values())
    assert any((buffer.float() == 384).any() for buffer in pool_state.buffers().values())
    for buffer in pool_state.buffers().values():
        padding = buffer[: FP8_VERIFY.page_size].float()
        # 100 lies between 96 and 104 in FP8, and is rounded to the even one.
        assert (padding == 96).all(), "every slot of the padding page holds what padded rows read"


def test_fp8_weights_are_rounded_relative_to_the_largest() -> None:
    # Weights 1 and 0.3: times 448, the second is 134.4, which lies between 128 and 144.
    q, k = torch.ones(1, 1, 1), torch.tensor([[[math.log(0.3)]], [[0.0]]])
    v = torch.tensor([[[1.0]], [[0.0]]])
    given = {"prefix_len": 1, "scale": 1.0, "dtype": torch.float32}
    plain = low_precision_attend(q, k, v, **given)
    rounded = low_precision_attend(q, k, v, weights_dtype=torch.float8_e4m3fn, **given)
    assert plain.item() == pytest.approx(0.3 / 1.3)
    assert rounded.item() == pytest.approx(128 / 448 / 1.3)
    beside = low_precision_attend(
        q, k, v, weights_dtype=torch.float8_e4m3fn, sinks=torch.zeros(1), **given
    )
    # A sink of logit 0 weighs 1: the largest weight is one of 2.3, and the sink gives no value.
    said = "weights beside a sink are rounded relative to the largest of a key"
    assert beside.item() == pytest.approx(128 / 448 / 2.3), said
    # A second head sees two equal keys; its largest weight is half of all.
    q = torch.tensor([[[1.0], [0.0]]])
    two = low_precision_attend(q, k, v, weights_dtype=torch.float8_e4m3fn, **given)
    assert two.flatten().tolist() == pytest.approx([128 / 448 / 1.3, 0.5]), "each row has its own"


def expected(case: Case, numerics: Numerics) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = make_trial_inputs(case)
    found = expect(inputs, numerics=numerics)
    return found.oracle.hidden_states, found.reference.hidden_states


def test_a_rounded_query_is_the_oracles_too_and_rounded_weights_are_not() -> None:
    plain, plain_reference = expected(FP8_VERIFY, PLAIN)
    query, _ = expected(FP8_VERIFY, Numerics(rounds_query=ROUNDS.rounds_query))
    weights, reference = expected(FP8_VERIFY, Numerics(rounds_weights=ROUNDS.rounds_weights))
    assert not torch.equal(query, plain)
    assert torch.equal(weights, plain)
    assert (reference - plain).norm() > 3 * (plain_reference - plain).norm()


def test_a_query_that_is_scaled_in_another_mode_is_rounded_in_the_oracle_of_this_one() -> None:
    others = frozenset(Mode) - {Mode.TARGET_VERIFY}
    rounded, _ = expected(FP8_VERIFY, ROUNDS)
    found, _ = expected(FP8_VERIFY, replace(ROUNDS, scales_query=others))
    said = "the oracle leaves the query as it is in the modes that scale it, and in no other"
    assert torch.equal(found, rounded), said


def test_new_keys_are_attended_as_they_are_in_that_execution_of_that_mode_alone() -> None:
    inputs = make_trial_inputs(FP8_VERIFY)
    numerics = Numerics(attends_new_keys=frozenset({(Mode.TARGET_VERIFY, Execution.EAGER)}))
    cached = expect(inputs).oracle.logits
    eager, replayed = (
        expect(inputs, numerics=numerics, execution=execution).oracle.logits
        for execution in (Execution.EAGER, Execution.GRAPH)
    )
    said = "every query sees its own key, and none of the new ones comes out of the FP8 cache"
    assert (eager != cached).any(-1).all(), said
    assert torch.equal(replayed, cached), "a replay reads what the cache holds, whatever is eager"
    kept = expect(inputs, numerics=numerics, execution=Execution.EAGER).unrounded.logits
    assert torch.equal(kept, cached), "a golden keeps the answer over the cache, for every kernel"
    of_mode = frozenset({Mode.TARGET_VERIFY})
    scaled = replace(numerics, rounds_query=of_mode, scales_query=of_mode)
    asked = expect(inputs, numerics=scaled, execution=Execution.EAGER)
    said = "the oracle rounds no query that is scaled before, beside new keys as beside cached ones"
    assert torch.equal(asked.oracle.logits, eager), said
    plain = expect(inputs, numerics=numerics, execution=Execution.EAGER).reference.logits
    said = "the plain implementation, which budgets measure, rounds it, beside new keys too"
    assert (asked.reference.logits != plain).any(-1).all(), said


@pytest.mark.parametrize("case", ["mha-decode-fp8_cache", "mha-target_verify-bs2_ragged"])
def test_other_modes_and_caches_are_asked_as_before(case: str) -> None:
    assert (find(case).mode in ROUNDS.rounds_query) != (find(case).kv_dtype is KVDtype.FP8)
    for changed, plain in zip(
        expected(find(case), ROUNDS), expected(find(case), PLAIN), strict=True
    ):
        assert torch.equal(changed, plain)


@pytest.mark.parametrize("mode", ["decode", "target_verify", "draft_extend_v2"])
def test_several_queries_meet_sinks_in_a_kernel_that_rounds_neither(mode: str) -> None:
    case = find(f"mha-{mode}-fp8_cache")
    plain = expected(replace(case, sinks=True), PLAIN)
    found = expected(replace(case, sinks=True), XQA.numerics)
    for own, other in zip(found, plain, strict=True):
        told = f"with sinks XQA rounds query and weights in decode alone; this is {mode}"
        assert torch.equal(own, other) == (mode != "decode"), told
    without = expected(case, XQA.numerics)
    told = f"without sinks XQA rounds query and weights over an FP8 cache in {mode}"
    assert not any(map(torch.equal, without, expected(case, PLAIN))), told


def test_a_budget_grows_by_the_factor_in_every_part() -> None:
    own = budget("logits", FP8_VERIFY.dtype)
    wider = own.times(1.25)
    assert (wider.floor, wider.factor, wider.mean_factor) == (
        own.floor * 1.25,
        own.factor * 1.25,
        own.mean_factor * 1.25,
    )


@pytest.mark.parametrize(
    ("edge", "mode", "execution", "times"),
    [
        ("fp8_cache", "draft_extend_v2", Execution.EAGER, 4.5),
        ("weighted_fp8_cache", "draft_extend_v2", Execution.EAGER, 6.0),
        ("weighted_fp8_cache", "draft_extend_v2", Execution.GRAPH, 1.5),
        ("weighted_fp8_cache", "target_verify", Execution.EAGER, 1.5),
    ],
)
def test_a_merge_rounds_twice_more_and_columns_that_are_alike_in_one_direction(
    edge: str, mode: str, execution: Execution, times: float
) -> None:
    merging = Numerics(
        budget_factor=1.5, merges=frozenset({(Mode.DRAFT_EXTEND_V2, Execution.EAGER)})
    )
    assert merging.budget(find(f"mha-{mode}-{edge}"), execution) == times
