"""Row 0 of the request table and slot 0 are padding's: what lands there reaches no request."""

from __future__ import annotations

import pytest
import torch

from fixtures.tables import find
from harness.attention.paged_backend import PagedBackend
from harness.core.case import Execution
from harness.core.record import Verdict
from harness.differential.forward import decoys, run_forward
from harness.differential.inputs import make_trial_inputs
from harness.differential.invariants.classes import INDEX_SPACE, OPERATIONS
from harness.differential.invariants.memory import check_table
from harness.differential.pool_state import make_pool_state
from harness.differential.probe_model import ProbeModel
from harness.differential.trial import run_trial
from harness.subjects import SUBJECTS
from harness.upstream.allocator import PADDING_ROW, PADDING_SLOT
from harness.upstream.forward_batch_info import ForwardBatch, LogitsProcessorOutput
from harness.upstream.radix_attention import RadixAttention

EAGER, GRAPH = Execution.EAGER, Execution.GRAPH
PADDED = "mha-target_verify-bs5_ragged_padded_to_8"
GEN = SUBJECTS["trtllm_mha/trtllm_gen"]


def test_no_request_has_row_0() -> None:
    case = find(PADDED)
    inputs = make_trial_inputs(case, *decoys(case))
    rows = [row for batch in (inputs.tested, *inputs.decoys) for row in batch.req_pool_indices]
    assert PADDING_ROW not in rows
    assert len(set(rows)) == len(rows) <= inputs.req_pool_size
    assert max(rows) <= inputs.req_pool_size
    table = make_pool_state(inputs).req_to_token_pool.req_to_token
    said = "a padded lane has no slot but the padding's, so that it reads no request's keys"
    assert table[PADDING_ROW].unique().tolist() == [PADDING_SLOT], said


@pytest.mark.parametrize("execution", [EAGER, GRAPH])
@pytest.mark.parametrize("row", [PADDING_ROW, 2])
def test_a_forward_that_writes_the_request_table(
    row: int, execution: Execution, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = PagedBackend._kernel_query

    def writing(self: PagedBackend, q: torch.Tensor, layer: RadixAttention) -> torch.Tensor:
        self.req_to_token_pool.req_to_token[row, 3].fill_(7)
        return query(self, q, layer)

    monkeypatch.setattr(PagedBackend, "_kernel_query", writing)
    record = run_trial(find(PADDED), GEN, execution)
    assert record.verdict is Verdict.BROKEN_INVARIANT
    is_counted = f"[{OPERATIONS}]" in record.message
    assert is_counted, "operations that this batch has beyond the formula are counted and told"
    cause = f"req_to_token[{row}, 3] and 0 more: was "
    is_told = cause in record.message
    assert is_told, "what breaks while a subject runs turns the trial red: a write to req_to_token"
    assert record.message.startswith(cause), "a message tells causes before operations"
    assert f", is 7 [{INDEX_SPACE}]; " in record.message
    assert record.message.endswith(f"[{OPERATIONS}]")


def test_a_table_by_hand() -> None:
    written = torch.arange(12, dtype=torch.int32).view(3, 4)
    table = written.clone()
    assert check_table(written, table) == []
    table[1, 2], table[2, 0] = 0, 9
    told = f"req_to_token[1, 2] and 1 more: was 6, is 0 [{INDEX_SPACE}]"
    assert check_table(written, table) == [told], "a forward that writes req_to_token is told"


@pytest.mark.parametrize(
    "name",
    [
        PADDED,
        "mha-decode-bs5_ragged_padded_to_8",
        "mha-draft_extend_v2-bs5_ragged_padded_to_8",
        "mla-draft_extend_v1-bs5_ragged_padded_to_8",
    ],
)
def test_padded_lanes_compute_nan(name: str) -> None:
    case = find(name)
    subject = SUBJECTS[f"trtllm_{case.family}/trtllm_gen"]
    with torch.no_grad():
        result = run_forward(subject, make_trial_inputs(case, *decoys(case)), GRAPH)
    for buffer, cached in result.pool_state.buffers().items():
        told = "padded lanes compute NaN, so that no request can read it and pass"
        is_nan = bool(cached[PADDING_SLOT].isnan().all())
        assert is_nan, f"{told}: their slot {PADDING_SLOT} of {buffer} holds numbers"
    record = run_trial(case, subject, GRAPH)
    told = "NaN of padded lanes reaches no request"
    assert record.verdict is Verdict.PASSED, f"{told}: {record.message}"


def test_a_padded_lane_that_reaches_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = ProbeModel.forward

    def mixing(
        self: ProbeModel, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch
    ) -> LogitsProcessorOutput:
        output = forward(self, input_ids, positions, batch)
        output.next_token_logits[0] += 0 * output.next_token_logits[-1]
        return output

    monkeypatch.setattr(ProbeModel, "forward", mixing)
    assert "logits" not in run_trial(find(PADDED), GEN, EAGER).message
    record = run_trial(find(PADDED), GEN, GRAPH)
    assert record.verdict is Verdict.NON_FINITE
    assert "logits: obtained is not finite in 1 of 20 rows" in record.message
