"""A fault in any layer, row, request, step, slot or table entry turns a right result red.

Faults are generated from what a forward hands out and leaves behind, so what is added there is
judged, or named below with what judges it instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import pytest
import torch

from fixtures.tables import find
from harness.attention.metadata import Metadata
from harness.core.case import Execution
from harness.differential import judge as judge_module
from harness.differential.expected import expect
from harness.differential.forward import ForwardResult, decoys, run_forward
from harness.differential.inputs import make_trial_inputs
from harness.differential.judge import judge
from harness.differential.trial import run_trial
from harness.graphs.static_inputs import Extent, StaticBuffer
from harness.subjects import SUBJECTS, Subject
from harness.upstream.allocator import PADDING_SLOT
from harness.upstream.forward_batch_info import DraftOutput

pytestmark = pytest.mark.untraced
GRAPH = Execution.GRAPH
ROWS = {
    "mha-multi_step_draft-bs5_ragged_padded_to_8": "trtllm_mha/xqa",
    "mha-target_verify-bs5_ragged_padded_to_8": "trtllm_mha/xqa",
    "mha-target_verify-window_bs5_interleaved": "trtllm_mha/trtllm_gen",
    "mla-draft_extend_v1-bs5_ragged_padded_to_8": "trtllm_mla/trtllm_gen",
    "mla-draft_extend_v2-bs5_ragged_padded_to_8": "trtllm_mla/flash_mla",
}
JUDGED = ("cache_seqlens_int32", "cu_seqlens_q", "cu_seqlens_k", "page_table", "swa_page_table")
JUDGED_BY_THE_OUTPUT = {
    "swa_out_cache_loc": "what it is for is written, and every slot is judged",
    "pad_rows": "a row of queries that is taken from elsewhere is a wrong row",
    "unpad_rows": "likewise",
    "packed_mask": "a key too many or too few is a wrong row",
}
OF_THE_FILL_ALONE = {"filled": "clears what the fill before it left, which the tables show"}


@dataclass(frozen=True)
class Fault:
    """A result that is wrong in one place, which, and how the message of its verdict begins."""

    result: ForwardResult
    wrong: str
    begins: str


@cache
def right(row: str) -> ForwardResult:
    case = find(row)
    with torch.no_grad():
        return run_forward(subject_of(row), make_trial_inputs(case, *decoys(case)), GRAPH)


def subject_of(row: str) -> Subject:
    return SUBJECTS[ROWS[row]]


def outputs(result: ForwardResult) -> Iterator[Fault]:
    """A part of each row of hidden states, of each layer in turn, and each row of logits."""
    case = result.inputs.case
    labels = judge_module._rows(result.inputs.tested)
    for name, parts in (("hidden_states", case.num_layers), ("next_token_logits", 1)):
        tensor = getattr(result.output, name)
        rows = tensor.numel() // tensor.shape[-1]
        for row in range(rows):
            wrong = tensor.clone()
            wrong.view(rows, parts, -1)[row, row % parts] *= 1.5
            output: Any = replace(result.output, **{name: wrong})
            said = f"{name.removeprefix('next_token_')}: 1 of {rows} rows wrong, first at "
            broken = replace(result, output=output)
            yield Fault(broken, f"row of {name} at {labels[row]}", said + labels[row])


def choices(result: ForwardResult) -> Iterator[Fault]:
    """Each token that a draft chose."""
    if isinstance(result.output, DraftOutput):
        tokens, logits = result.output.draft_tokens, result.output.next_token_logits
        for request, step in torch.ones_like(tokens).nonzero().tolist():
            wrong = tokens.clone()
            wrong[request, step] = logits[request, step - 1].argmin()
            output = replace(result.output, draft_tokens=wrong)
            # All but the last are fed to the next step, which is judged along them.
            broken = replace(result, output=output)
            yield Fault(broken, f"draft token {step} of request {request}", "")


def table_entries(result: ForwardResult) -> Iterator[Fault]:
    """Each entry of each request in the metadata of each step, live pages of the tables alone."""
    case = result.inputs.case
    for step, plan in enumerate(result.plans):
        for name in JUDGED:
            tensor = getattr(plan, name)
            if tensor is None:
                continue
            for request in range(case.bs):
                place = (request, 0) if tensor.dim() == 2 else request
                wrong = tensor.clone()
                wrong[place] += 1
                plans = list(result.plans)
                plans[step] = replace(plan, **{name: wrong})
                broken = replace(result, plans=tuple(plans))
                where = f"metadata.{name} of request {request}"
                yield Fault(broken, where, f"{name}[{request}")


FAULTS = {"outputs": outputs, "choices": choices, "table_entries": table_entries}


def messages(result: ForwardResult, row: str) -> list[str]:
    found = judge(result, GRAPH, subject_of(row).numerics("cpu"), workspaces=())
    return [comparison.message for comparison in found if not comparison.passed]


@pytest.fixture
def asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle's answer does not depend on the fault, but for what a draft fed itself."""
    answers: dict[Any, Any] = {}

    def known(inputs: Any, fed_tokens: torch.Tensor | None = None, **options: Any) -> Any:
        key = id(inputs), None if fed_tokens is None else tuple(fed_tokens.flatten().tolist())
        if key not in answers:
            answers[key] = expect(inputs, fed_tokens=fed_tokens, **options)
        return answers[key]

    monkeypatch.setattr(judge_module, "expect", known)


def test_every_tensor_of_the_metadata_is_judged_or_says_by_what() -> None:
    names = {field.name for field in fields(Metadata)} - {"geometry"}
    assert names == {*JUDGED, *JUDGED_BY_THE_OUTPUT, *OF_THE_FILL_ALONE}


@pytest.mark.usefixtures("asked_once")
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("row", ROWS)
def test_a_fault_in_one_place_is_red(row: str, kind: str) -> None:
    result = right(row)
    assert messages(result, row) == []
    for fault in FAULTS[kind](result):
        found = messages(fault.result, row)
        assert found, f"a wrong {fault.wrong} turns the trial red"
        assert found[0].startswith(fault.begins)


@pytest.mark.usefixtures("asked_once")
@pytest.mark.parametrize("row", ROWS)
def test_a_fault_in_one_slot_of_the_cache_is_red(row: str) -> None:
    result = right(row)
    inputs, size = result.inputs, result.inputs.case.page_size
    for name, buffer in result.pool_state.buffers().items():
        new = [slot for slots in inputs.tested.new_slots for slot in slots]
        old = [pages[0] * size + 1 for pages in inputs.tested.pages]
        if name.startswith("swa."):
            new, old = inputs.swa_slots(new), inputs.swa_slots(old)
        strays = {PADDING_SLOT + 1, size - 1, len(buffer) - 1, *old} - {PADDING_SLOT, *new}
        for slot in (*new, *strays):
            kept = buffer[slot].clone()
            buffer[slot] = 7.0
            found = messages(result, row)
            buffer[slot] = kept
            padding = "the padding page beyond the padded lanes' slot 0"
            others = "a slot of others" if slot >= size else padding
            does = f"overwrites {others}" if slot in strays else "writes a wrong KV row"
            assert found, f"a forward that {does} turns the trial red: slot {slot} of {name}"
            stray = f"{name} slot {slot} (page {slot // size}) and 0 more: was overwritten"
            assert found[0].startswith(stray if slot in strays else "kv_cache.")
    assert messages(result, row) == []


PADDED = {row: name for row, name in ROWS.items() if "padded" in row}


@pytest.mark.parametrize("row", PADDED)
def test_every_static_input_is_padded_again(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pad, names = StaticBuffer.pad, set[str]()

    def message(spared: str) -> str:
        def all_but(buffer: StaticBuffer, extent: Extent, real: int) -> None:
            names.add(buffer.field.name)
            if buffer.field.name != spared:
                pad(buffer, extent, real)

        monkeypatch.setattr(StaticBuffer, "pad", all_but)
        return run_trial(find(row), subject_of(row), GRAPH).message

    assert message("none of them") == ""
    for name in sorted(names):
        said = message(name)
        # Padded queries of a ragged phase may be more than a kernel takes: it refuses them.
        assert f"{name}[" in said or said.startswith("KernelRefusal: "), name


def test_decoys_fill_a_larger_bucket_and_then_the_cases_own() -> None:
    case = find("mha-target_verify-bs5_ragged_padded_to_8")
    sizes = [decoy.bs for decoy in decoys(replace(case, capture_bs=(16, 4, 32, 8)))]
    assert sizes == [16, 8]
    assert [decoy.bs for decoy in decoys(replace(case, capture_bs=(8, 2)))] == [8]
