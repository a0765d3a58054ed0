"""Choices of tokens, first tokens and dirty semaphores are judged too."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from fixtures.tables import find
from harness.core.case import Execution, KVDtype
from harness.core.conventions import OURS
from harness.core.numerics import ANY_MODE, Numerics
from harness.core.record import Verdict
from harness.core.tolerance import tie_margin
from harness.differential import trial
from harness.differential.compare import Comparison
from harness.differential.forward import ForwardResult, decoys, run_forward
from harness.differential.inputs import make_trial_inputs
from harness.differential.judge import TOPK_P_ERROR, _choices, judge
from harness.differential.rig import Rig
from harness.differential.trial import run_trial
from harness.kernels import workspace
from harness.subjects import SUBJECTS
from harness.upstream.forward_batch_info import (
    DraftOutput,
    EagleDraftInput,
    ForwardBatch,
    LogitsProcessorOutput,
)

EAGER, GRAPH = Execution.EAGER, Execution.GRAPH
MHA, XQA = SUBJECTS["trtllm_mha/trtllm_gen"], SUBJECTS["trtllm_mha/xqa"]


def test_a_draft_that_feeds_another_requests_token(monkeypatch: pytest.MonkeyPatch) -> None:
    batch_of = Rig.batch_of

    def rolled(*args: Any) -> ForwardBatch:
        batch = batch_of(*args)
        assert isinstance(batch.spec_info, EagleDraftInput)
        first = batch.spec_info.topk_index.roll(1, 0)
        return batch.with_changes(spec_info=replace(batch.spec_info, topk_index=first))

    monkeypatch.setattr(Rig, "batch_of", rolled)
    record = run_trial(find("mha-multi_step_draft-bs2_ragged"), MHA, EAGER)
    told = f"{record.verdict} {record.message}"
    said = "a draft that does not begin with its request's topk_index is wrong_tokens"
    assert record.verdict is Verdict.WRONG_TOKENS, f"{said}: {told}"
    found = re.fullmatch(
        r"draft_tokens: first tokens \[(\d+), (\d+)\], expected \[(\d+), (\d+)\]", record.message
    )
    assert found, f"{said} and told with its first tokens: {told}"
    assert found[1] != found[2]
    assert (found[1], found[2]) == (found[4], found[3]), f"{said}, each request's: {told}"


def test_the_first_token_of_every_request_is_judged() -> None:
    case = find("mha-multi_step_draft-bs2_ragged")
    right = run_forward(MHA, make_trial_inputs(case, *decoys(case)), EAGER)
    assert isinstance(right.output, DraftOutput)
    drafted = right.output.draft_tokens.clone()
    drafted[1, 0] += 1
    wrong = replace(right, output=replace(right.output, draft_tokens=drafted))
    found = judge(wrong, EAGER, MHA.numerics("cpu"), workspaces=())
    told = [c.message for c in found if c.quantity == "draft_tokens"]
    said = "a draft of the last request alone that begins with another token than its topk_index"
    assert told[0].startswith(f"draft_tokens: first tokens {drafted[:, 0].tolist()}"), said


@pytest.mark.parametrize("execution", [EAGER, GRAPH])
def test_a_draft_that_proposes_another_token_than_its_best(execution: Execution) -> None:
    case = find("mha-multi_step_draft-bs2_ragged")
    right = run_forward(MHA, make_trial_inputs(case, *decoys(case)), execution)
    assert isinstance(right.output, DraftOutput)
    proposed = right.output.draft_tokens.clone()
    # The last is proposed and never fed, so nothing but the choice itself is wrong.
    proposed[1, -1] = right.output.next_token_logits[1, -1].argmin()
    wrong = replace(right, output=replace(right.output, draft_tokens=proposed))
    found = judge(wrong, execution, MHA.numerics("cpu"), workspaces=())
    assert [(c.quantity, c.verdict) for c in found if not c.passed] == [
        ("draft_tokens", Verdict.WRONG_TOKENS)
    ]
    message = f"draft_tokens: token {int(proposed[1, -1])} at request 1, position "
    assert found[-1].message.startswith(message)


def test_a_draft_that_hands_out_too_few_tokens_is_told_its_shape() -> None:
    case = find("mha-multi_step_draft-bs2_ragged")
    right = run_forward(MHA, make_trial_inputs(case), EAGER)
    assert isinstance(right.output, DraftOutput)
    short = replace(right.output, draft_tokens=right.output.draft_tokens[:, :-1])
    said = "a draft that lacks a token is told that, and not judged by others than it fed itself"
    try:
        found = judge(replace(right, output=short), EAGER, MHA.numerics("cpu"), workspaces=())
    except RuntimeError as error:
        pytest.fail(f"{said}, and the judge ends with no {error!r}")
    told = [(c.verdict, c.message) for c in found if not c.passed]
    due = [(Verdict.WRONG_SHAPE, "draft_tokens: obtained shape [2, 4], expected [2, 5]")]
    assert told == due, f"{said}: {told}"


def test_a_draft_of_another_shape_is_told_between_its_invariants_and_its_operations() -> None:
    case = find("mha-multi_step_draft-bs2_ragged")
    right = run_forward(MHA, make_trial_inputs(case), EAGER)
    assert isinstance(right.output, DraftOutput)
    short = replace(right.output, draft_tokens=right.output.draft_tokens[:, :-1])
    wrong = replace(right, output=short, violations=("invariant",), operations=("operations",))
    found = judge(wrong, EAGER, MHA.numerics("cpu"), workspaces=())
    told = [c.message for c in found if not c.passed]
    said = "an invariant names the cause and comes first, operations are the last cause to name"
    due = ["invariant", "draft_tokens: obtained shape [2, 4], expected [2, 5]", "operations"]
    assert told == due, f"{said}: {told}"


def test_the_tie_of_a_drafted_token_is_wider_where_the_query_is_scaled_alone() -> None:
    case = find("mha-multi_step_draft-fp16_fp8_cache")
    result = run_forward(XQA, make_trial_inputs(case, *decoys(case)), EAGER)
    plain, coarse = XQA.numerics("cpu"), XQA.capability.numerics
    scaled = replace(coarse, scales_query=frozenset({case.mode}))
    in_others = replace(coarse, scales_query=ANY_MODE - {case.mode})
    assert case.mode in coarse.rounds_query
    for numerics in (plain, coarse, in_others):
        said = "where no query of the case's own mode is scaled, the tie is its dtype's"
        assert tie_of(result, numerics) == tie_margin(case.dtype), said
    assert tie_of(result, scaled) > 2 * tie_margin(case.dtype)
    found = judge(result, EAGER, scaled, workspaces=())
    logits = next(c.allowed for c in found if c.quantity == "logits")
    said = "two logits change places that are each off by their budget, so the tie is twice that"
    assert tie_of(result, scaled) == 2 * logits, said


def tie_of(result: ForwardResult, numerics: Numerics) -> float:
    found = judge(result, EAGER, numerics, workspaces=())
    return next(c.allowed for c in found if c.quantity == "draft_tokens")


@pytest.mark.parametrize("kv_dtype", KVDtype)
def test_no_query_is_scaled_that_is_not_rounded(kv_dtype: KVDtype) -> None:
    case = replace(find("mha-multi_step_draft-sinks"), kv_dtype=kv_dtype)
    result = run_forward(MHA, make_trial_inputs(case, *decoys(case)), EAGER)
    draft = frozenset({case.mode})
    # So wide a budget that twice of it exceeds every tie.
    numerics = Numerics(
        budget_factor=100.0, rounds_query=draft, scales_query=draft, unrounded_with_sinks=draft
    )
    said = "a query that stays as it is, over another cache or beside sinks, has its dtype's tie"
    assert tie_of(result, numerics) == tie_margin(case.dtype), said


@pytest.mark.parametrize("request_id", [0, 1])
def test_a_probability_of_the_top_1_is_judged_in_every_request(request_id: int) -> None:
    case = find("mha-draft_extend_v1-accept_1_3")
    right = run_forward(MHA, make_trial_inputs(case, *decoys(case)), GRAPH)
    assert isinstance(right.output, LogitsProcessorOutput)
    assert right.output.topk_p is not None
    handed_out = right.output.topk_p.clone()
    handed_out[request_id] += 1.5 * TOPK_P_ERROR
    wrong = replace(right, output=replace(right.output, topk_p=handed_out))
    found = judge(wrong, GRAPH, MHA.numerics("cpu"), workspaces=())
    is_told = [(c.quantity, c.verdict) for c in found if not c.passed]
    said = f"a probability is wrong in request {request_id} alone, whatever the others are"
    assert is_told == [("topk", Verdict.WRONG_NUMBERS)], said


def test_a_wrong_top_1_is_told_with_the_row_of_its_request() -> None:
    case = find("mha-draft_extend_v1-accept_1_3")
    right = run_forward(MHA, make_trial_inputs(case, *decoys(case)), GRAPH)
    assert isinstance(right.output, LogitsProcessorOutput)
    assert right.output.topk_index is not None
    # Of the accepted rows 0 and 1..3 the second request's last is row 3.
    last = right.output.next_token_logits[3]
    handed_out = right.output.topk_index.clone()
    handed_out[1] = worst = int(last.argmin())
    wrong = replace(right, output=replace(right.output, topk_index=handed_out))
    found = judge(wrong, GRAPH, MHA.numerics("cpu"), workspaces=())
    told = [c.message for c in found if not c.passed]
    said = "a wrong top-1 is told with the token, the row of its request and the oracle's token"
    due = f"topk: token {worst} at row 1, expected {int(last.argmax())}"
    assert told == [due], f"{said}: {told}"


@pytest.mark.parametrize("field", ["topk_p", "topk_index"])
def test_a_graph_that_hands_out_half_of_its_top_1_is_told(field: str) -> None:
    case = find("mha-draft_extend_v1-accept_1_3")
    right = run_forward(MHA, make_trial_inputs(case, *decoys(case)), GRAPH)
    nothing: dict[str, Any] = {field: None}
    wrong = replace(right, output=replace(right.output, **nothing))
    said = f"a captured draft extend without {field} is told, whatever else it hands out"
    try:
        found = judge(wrong, GRAPH, MHA.numerics("cpu"), workspaces=())
    except TypeError as error:
        pytest.fail(f"{said}, and the judge ends with no {error!r}")
    told = [(c.verdict, c.message) for c in found if not c.passed]
    assert told == [(Verdict.WRONG_SHAPE, "topk: none")], f"{said}: {told}"


@pytest.mark.parametrize("field", ["topk_p", "topk_index"])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_graph_that_hands_out_the_top_1_of_other_requests_is_told_its_shape(
    rows: int, field: str
) -> None:
    case = find("mha-draft_extend_v1-accept_1_3")
    right = run_forward(MHA, make_trial_inputs(case, *decoys(case)), GRAPH)
    # Of the first request alone, or of the bucket's padded rows, too.
    handed_out = getattr(right.output, field)[[0, 1, 0, 0][:rows]]
    wrong = replace(right, output=replace(right.output, **{field: handed_out}))
    said = f"{field} of {rows} requests is told its shape, and compared with none of two"
    try:
        found = judge(wrong, GRAPH, MHA.numerics("cpu"), workspaces=())
    except (IndexError, RuntimeError) as error:
        pytest.fail(f"{said}, and the judge ends with no {error!r}")
    told = [(c.verdict, c.message) for c in found if not c.passed]
    due = f"{field}: obtained shape [{rows}, 1], expected [2, 1]"
    assert told == [(Verdict.WRONG_SHAPE, due)], f"{said}: {told}"


def test_a_draft_whose_steps_have_tables_of_their_own_owes_later_pages_to_later_steps() -> None:
    # The first request of 31 has its first step's key on its one page, and the next on another.
    case = find("mha-multi_step_draft-watched_page_edges")
    right = run_forward(MHA, make_trial_inputs(case, *decoys(case)), GRAPH)
    first, *later = right.plans
    table = first.page_table.clone()
    assert table[0, 1] == right.inputs.tested.pages[0][1], "the shared table holds the next page"
    table[0, 1] = 0
    own = replace(right, plans=(replace(first, page_table=table), *later))
    for shares, broken in ((True, 1), (False, 0)):
        conventions = replace(OURS, shares_draft_table=shares, zero_table_tail=False)
        found = judge(own, GRAPH, MHA.numerics("cpu"), (), conventions)
        told = [c.message for c in found if not c.passed]
        holds = "also" if shares else "no page of them"
        said = f"a first step's table holds later steps' pages where it serves them: {holds}"
        assert len(told) == broken, f"{said}: {told}"
        assert all(line.startswith("page_table[0] has live pages") for line in told), told


def test_a_message_names_the_first_three_quantities(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = partial(Comparison, verdict=Verdict.BROKEN_INVARIANT)
    found = [broken(quantity=name, message=f"{name} is off") for name in "abcde"]
    monkeypatch.setattr(trial, "judge", lambda *_: found)
    record = run_trial(find("mha-decode-bs2_ragged"), MHA, EAGER)
    assert record.message == "a is off; b is off; c is off"


def test_semaphores_that_a_kernel_left_dirty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_SHARED", {})
    # Another kernel's, which is clean, was asked for before.
    workspace.workspace("prefill", torch.device("cpu"))
    workspace.workspace("xqa", torch.device("cpu")).semaphores[6] = 1
    record = run_trial(find("mha-decode-bs2_ragged"), XQA, EAGER)
    is_broken = record.verdict is Verdict.BROKEN_INVARIANT
    assert is_broken, "a kernel that leaves its workspace's semaphores dirty turns the trial red"
    assert record.message.startswith("semaphores of xqa on cpu: byte 6 ")


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize(("tie", "verdict"), [(0.67, Verdict.PASSED), (0.66, Verdict.WRONG_TOKENS)])
def test_a_tie_is_measured_by_the_rms_of_its_row(
    scale: float, tie: float, verdict: Verdict
) -> None:
    # The root mean square is 3, and the second token is 2 behind the first.
    logits = torch.tensor([[3.0, 1.0, 1.0, -5.0]], dtype=torch.float64) * scale
    found = _choices("topk", torch.tensor([1]), logits, tie, None)
    assert found.verdict is verdict
    assert found.error == pytest.approx(2 / 3)
    # A larger row beside it, whose choice is right.
    found = _choices("topk", torch.tensor([1, 0]), torch.cat((logits, logits * 100)), tie, None)
    said = "each row's tie is measured by its own root mean square, by no other row's"
    assert (found.verdict, found.error) == (verdict, pytest.approx(2 / 3)), said
