"""Defects of masks, lengths, tables or positions are reported by the keys that were read or cached."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fixtures.tables import find
from harness.attention.trtllm_mla import TRTLLMMLABackend
from harness.core.case import Case, Execution, Inputs
from harness.differential import diagnose
from harness.differential.dense import dense_rows
from harness.differential.diagnose import KeysRead, _faults, keys_read, rotation
from harness.differential.forward import ForwardResult, decoys, run_forward
from harness.differential.input_types import TrialInputs
from harness.differential.inputs import make_trial_inputs
from harness.differential.probe_model import ProbeModel
from harness.differential.traced_inputs import (
    DECOY,
    SILENT,
    by_distance_from_the_end,
    capacity,
)
from harness.differential.trial import run_trial
from harness.subjects import SUBJECTS, Subject

EAGER, GRAPH = Execution.EAGER, Execution.GRAPH
MHA, XQA, MLA = (
    SUBJECTS[name] for name in ("trtllm_mha/trtllm_gen", "trtllm_mha/xqa", "trtllm_mla/trtllm_gen")
)
RIGHT = "every query read the keys that it should"


def seeing(base: type, change: Any) -> type:
    """A backend whose kernel is handed what ``change`` makes of the plan and the layer."""

    class Seeing(base):
        def _attend(self, q: Any, out_dtype: Any, layer: Any, metadata: Any) -> torch.Tensor:
            return super()._attend(q, out_dtype, *change(layer, metadata))

    return Seeing


def longer(layer, metadata):
    return layer, replace(metadata, cache_seqlens_int32=metadata.cache_seqlens_int32 + 2)


def other_request(layer, metadata):
    return layer, replace(metadata, page_table=metadata.page_table.roll(1, 0))


def padding_page(layer, metadata):
    table = metadata.page_table.clone()
    table[:, 0] = 0
    return layer, replace(metadata, page_table=table)


def open_mask(layer, metadata):
    return layer, replace(metadata, packed_mask=torch.full_like(metadata.packed_mask, -1))


def narrow(layer, metadata):
    window = layer.sliding_window_size
    return replace(layer, sliding_window_size=window - 1 if window > 0 else window), metadata


def wide(layer, metadata):
    return replace(layer, sliding_window_size=-1), metadata


def soft(layer, metadata):
    return replace(layer, scaling=layer.scaling * 0.9), metadata


ROWS = (
    (MHA, longer, "mha-decode-watched_page_edges", EAGER, "query 0 of request 0 (position 31, layer 0) read keys 0..31, expected 0..31: the padding page"),
    (MHA, longer, "mha-target_verify-bs2_ragged", EAGER, "query 0 of request 0 (position 5, layer 0) read keys 0..7, expected 0..5: 2 keys of the future"),
    (MHA, longer, "mha-multi_step_draft-bs2_ragged", GRAPH, "query 0 of request 0 (position 5, layer 0) read keys 0..5, expected 0..5: slots that hold nothing yet"),
    (MHA, other_request, "mha-decode-bs2_ragged", GRAPH, "read keys none, expected 0..5: 6 keys missed, keys 0..5 of request 1"),
    (MHA, padding_page, "mha-decode-page_edge_after", EAGER, "read keys 32..65, expected 0..65: 32 keys missed, the padding page"),
    (XQA, open_mask, "mha-draft_extend_v2-bs2_ragged", GRAPH, "read keys 0..8, expected 0..5: 3 keys of the future"),
    (MHA, narrow, "mha-draft_extend_v1-window_of_one_page", EAGER, "(position 65, layer 1) read keys 35..65, expected 34..65: 1 key missed"),
    (MHA, wide, "mha-decode-watched_window_and_sinks", EAGER, "(position 70, layer 1) read keys 32..70, expected 50..70: 18 keys left of the window, the padding page"),
    (MLA, longer, "mla-target_verify-context_2k", EAGER, "of request 0 (position 2013, layer 0) read keys 0..2015, expected 0..2013: 2 keys of the future"),
    (MLA, other_request, "mla-draft_extend_v2-watched_fp8_cache", EAGER, "65 keys missed, keys 0..64 of request 1"),
    (MHA, soft, "mha-decode-bs2_ragged", EAGER, RIGHT),
)  # fmt: skip


@pytest.mark.parametrize(
    ("subject", "change", "case_id", "execution", "said"),
    [pytest.param(*row, id=f"{row[1].__name__}-{row[2]}-{row[3]}") for row in ROWS],
)
def test_the_message_of_a_red_trial_names_them(
    subject: Subject, change: Any, case_id: str, execution: Execution, said: str
) -> None:
    broken = replace(subject, backend=seeing(subject.backend, change))
    if "multi_step" in case_id:
        steps = type("Steps", (subject.draft_backend,), {"step_backend": broken.backend})
        broken = replace(broken, draft_backend=steps)
    record = run_trial(find(case_id), broken, execution)
    assert record.verdict.is_red
    assert said in record.message


def test_one_wrong_query_is_the_only_one() -> None:
    def of_one_layer(layer, metadata):
        wrong = other_request(layer, metadata)[1].page_table
        table = torch.cat((wrong[:1], metadata.page_table[1:]))
        return layer, replace(metadata, page_table=table) if layer.layer_id else metadata

    broken = replace(MHA, backend=seeing(MHA.backend, of_one_layer))
    said = keys_read(find("mha-decode-bs2_ragged"), broken, EAGER)
    assert said.startswith("query 0 of request 0 (position 5, layer 1) read keys none")
    assert "more like it" not in said


def test_a_draft_s_step_is_not_blamed_for_the_one_before() -> None:
    """The state of a step holds half of the one before, which is taken off before it is read."""
    case = find("mha-multi_step_draft-bs2_ragged")

    def in_the_second_step(layer, metadata):
        table = metadata.page_table.clone()
        if int(metadata.cache_seqlens_int32[0]) == case.prefix_lens[0] + 2:
            table[0] = table[1]
        return layer, replace(metadata, page_table=table)

    backend = seeing(MHA.backend, in_the_second_step)
    steps = type("Steps", (MHA.draft_backend,), {"step_backend": backend})
    said = keys_read(case, replace(MHA, backend=backend, draft_backend=steps), EAGER)
    assert said.startswith("query 1 of request 0 (position 6, layer 0) read keys none")
    is_named = "keys 0..6 of request 1" in said
    assert is_named, "where keys of another request were read, the message names that request"
    assert said.endswith("keys 0..6 of request 1 (1 more like it)")


def test_keys_of_a_batch_that_ran_before_are_named() -> None:
    case = find("mha-decode-bs2_ragged")
    inputs = make_trial_inputs(case, *decoys(case))
    page = inputs.decoys[-1].pages[0][0]

    def stale(layer, metadata):
        return layer, replace(metadata, page_table=torch.full_like(metadata.page_table, page))

    broken = replace(MHA, backend=seeing(MHA.backend, stale))
    assert "6 keys missed, keys of another batch" in keys_read(case, broken, GRAPH)


@pytest.mark.parametrize("execution", Execution)
@pytest.mark.parametrize("shift", [1, -2])
@pytest.mark.parametrize(
    "case_id",
    [
        "mha-draft_extend_v2-fp8_cache",
        "mla-target_verify-bs2_ragged",
        "mha-decode-window_of_one_page",
        "mha-multi_step_draft-bs2_ragged",
    ],
)
def test_keys_rotated_for_other_positions_are_named(
    case_id: str, shift: int, execution: Execution, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = ProbeModel.forward
    monkeypatch.setattr(ProbeModel, "forward", lambda m, ids, at, b: forward(m, ids, at + shift, b))
    case = find(case_id)
    record = run_trial(case, MLA if case.family == "mla" else MHA, execution)
    size = "2 too small" if shift < 0 else "1 too large"
    said = f"keys, also of a draft's own tokens, that are rotated for positions {size} are named"
    assert record.message.startswith(f"keys of request 0 were rotated for positions {size}"), (
        f"{said}: {record.message!r}"
    )


def test_keys_that_are_nearer_to_another_position_but_not_there_are_not_named() -> None:
    case = find("mha-target_verify-bs2_ragged")
    inputs = make_trial_inputs(case)
    result = run_forward(MHA, inputs, EAGER)
    batch = inputs.tested
    slots = torch.tensor(batch.new_slots[1])
    at = torch.arange(case.prefix_lens[1], case.total_lens[1])
    right, next_to_it = (
        dense_rows(inputs.weights, case, batch.new_tokens[1], at + shift, queries=0).k[0].double()
        for shift in (0, 1)
    )
    own = result.pool_state.buffers()["k0"]
    assert not rotation(result)
    for share, said in (
        (1.0, "keys of request 1 were rotated for positions 1 too large"),
        (0.6, ""),
    ):
        own[slots] = (right + share * (next_to_it - right)).to(own.dtype)
        told = f"keys that are {share:.0%} of the way to those of the next position"
        told += f" are told as {said!r}" if said else " are not told as rotated for it"
        assert rotation(result) == said, f"{told}: {rotation(result)!r}"


def test_keys_of_a_later_request_of_a_draft_are_told_by_its_own_tokens() -> None:
    case = find("mha-multi_step_draft-bs2_ragged")
    inputs = make_trial_inputs(case)
    result = run_forward(MHA, inputs, EAGER)
    tokens = result.output.draft_tokens[:, :-1]
    assert not torch.equal(*tokens), "both requests drafted alike, and tell nothing apart"
    at = torch.arange(case.prefix_lens[1], case.total_lens[1]) + 1
    keys = dense_rows(inputs.weights, case, tokens[1], at, queries=0).k[0]
    own = result.pool_state.buffers()["k0"]
    own[torch.tensor(inputs.tested.new_slots[1])] = keys.to(own.dtype)
    told = rotation(result)
    said = "keys of request 1 of a draft are compared with those of the tokens that it drafted"
    assert told == "keys of request 1 were rotated for positions 1 too large", f"{said}: {told!r}"


def test_every_request_whose_keys_were_read_is_named() -> None:
    read = KeysRead(keys={(0, 0), (1, 4), (1, 5), (2, 3), (3, 9)})
    faults = _faults(read, 2, {(2, 3)}, 0, 3)
    assert faults == [
        "keys 0 of request 0",
        "keys 4..5 of request 1",
        "keys 9 of request 3",
    ], f"each request whose keys were read is named, and told were {faults}"


@pytest.mark.parametrize("execution", Execution)
@pytest.mark.parametrize(
    "case_id", ["mha-draft_extend_v1-window_of_one_page", "mla-multi_step_draft-bs2_ragged"]
)
def test_a_subject_without_defect_reads_what_it_should(case_id: str, execution: Execution) -> None:
    case = find(case_id)
    subject = MLA if case.family == "mla" else MHA
    found = keys_read(case, subject, execution)
    said = "a query that read what its mask and window leave it is told without a fault"
    assert found.startswith(RIGHT), f"{said}: {found}"


def test_an_answer_that_is_no_number_is_named() -> None:
    class Broken(TRTLLMMLABackend):
        def _attend(self, *args: Any) -> torch.Tensor:
            return super()._attend(*args) * torch.nan

    said = keys_read(find("mla-decode-bs2_ragged"), replace(MLA, backend=Broken), EAGER)
    assert said.endswith("something that is not finite (3 more like it)")

    class BrokenFirst(TRTLLMMLABackend):
        def _attend(self, q: Any, out_dtype: Any, layer: Any, metadata: Any) -> torch.Tensor:
            factor = torch.nan if layer.layer_id == 0 else 1.0
            return super()._attend(q, out_dtype, layer, metadata) * factor

    said = keys_read(find("mla-decode-bs2_ragged"), replace(MLA, backend=BrokenFirst), EAGER)
    rule = "a layer that is right is not told for the one before it: one fault of each request"
    assert said.endswith("something that is not finite (1 more like it)"), f"{rule}: {said}"


def traced_case(**changes: Any) -> Case:
    return replace(find("mha-decode-bs2_ragged"), inputs=Inputs.TRACED, **changes)


def test_what_does_not_fit_is_traced_from_the_end() -> None:
    case = traced_case(prefix_lens=(400, 3), max_context_len=512)
    keys = by_distance_from_the_end(case)
    assert capacity(case) == 2 * 64 - 4
    assert keys[:4] == [(0, 400), (1, 3), (0, 399), (1, 2)]
    inputs = make_trial_inputs(case)
    assert inputs.traced == tuple(keys[: capacity(case)])
    history = inputs.tested.history[0].tolist()
    assert history[:200] == [SILENT] * 200
    assert len(set(history[300:])) == 100


def test_keys_that_no_pass_traced_are_not_told_as_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnose, "MAX_PASSES", 1)
    case = traced_case(prefix_lens=(400, 3), max_context_len=512)
    assert capacity(case) < sum(case.total_lens), "one pass traces every key"
    found = keys_read(case, MHA, EAGER)
    said = "a query that read all of a long case's traced keys is told without a fault"
    assert found.startswith(RIGHT), f"{said}: {found}"


def test_a_long_case_runs_no_more_passes_than_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []

    def counted(subject: Subject, inputs: TrialInputs, *where: Any) -> ForwardResult:
        runs.append(len(inputs.traced))
        return run_forward(subject, inputs, *where)

    monkeypatch.setattr(diagnose, "run_forward", counted)
    monkeypatch.setattr(diagnose, "MAX_PASSES", 2)
    # 405 keys are four passes of up to 124.
    keys_read(traced_case(prefix_lens=(400, 3), max_context_len=512), MHA, EAGER)
    assert runs == [124, 124], (
        f"a diagnosis ends after MAX_PASSES runs, however long the case: {runs}"
    )


def test_decoys_are_one_token() -> None:
    case = traced_case()
    inputs = make_trial_inputs(case, *decoys(case))
    assert {t for decoy in inputs.decoys for h in decoy.history for t in h.tolist()} == {DECOY}
