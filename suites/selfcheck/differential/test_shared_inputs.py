"""Trials of a row share requests, histories and the oracle's answer; no trial writes to them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch

from fixtures.tables import find
from harness.attention.trtllm_mha import TRTLLMHAAttnBackend
from harness.attention.trtllm_mla import TRTLLMMLABackend
from harness.core.case import Execution
from harness.core.record import Verdict
from harness.differential import expected, inputs, pool_state
from harness.differential.trial import run_trial
from harness.subjects import SUBJECTS
from harness.upstream.forward_batch_info import ForwardBatch

SHARED = (
    (inputs, "_requests"),
    (inputs, "_weights"),
    (pool_state, "_shared_rows"),
    (expected, "_expected"),
)
# What is float32 as it was drawn needs no cast on its way to the batch.
ROWS = (
    ("trtllm_mha/xqa", "mha-decode-fp8_cache"),
    ("trtllm_mha/reference", "mha-multi_step_draft-fp32_window_sinks"),
    ("trtllm_mha/reference", "mha-draft_extend_v2-fp32"),
    ("trtllm_mla/trtllm_gen", "mla-target_verify-bs2_ragged"),
    ("trtllm_mla/reference", "mla-draft_extend_v1-fp32"),
)


def tensors(thing: Any) -> Iterator[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, tuple | list):
        for one in thing:
            yield from tensors(one)
    elif is_dataclass(thing):
        for field in fields(thing):
            yield from tensors(getattr(thing, field.name))


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[torch.Tensor, int]]:
    """What trials share from now on, with the version that each tensor had when it was shared."""
    seen: dict[int, tuple[torch.Tensor, int]] = {}
    for module, name in SHARED:
        made = getattr(module, name)
        made.cache_clear()

        def watched(*args: Any, made: Any = made, **kwargs: Any) -> Any:
            answer = made(*args, **kwargs)
            for tensor in tensors(answer):
                seen.setdefault(id(tensor), (tensor, tensor._version))
            return answer

        monkeypatch.setattr(module, name, watched)
    return seen


class WritesToItsInputs:
    """A backend that clears, once it has answered, whatever tensor it was handed."""

    def forward(self, q: Any, k: Any, v: Any, layer: Any, batch: ForwardBatch, **more: Any) -> Any:
        answer = super().forward(q, k, v, layer, batch, **more).clone()  # type: ignore[misc]
        if layer.layer_id == 1:
            handed = (q, k, v, *more.values(), batch.input_ids, batch.spec_info)
            for tensor in tensors(handed):
                tensor.zero_()
        return answer


class WritingMHA(WritesToItsInputs, TRTLLMHAAttnBackend):
    pass


class WritingMLA(WritesToItsInputs, TRTLLMMLABackend):
    pass


@pytest.mark.parametrize(("subject", "case_id"), ROWS)
def test_no_trial_writes_to_what_others_read(subject, case_id, shared):
    case, given = find(case_id), SUBJECTS[subject]
    writing = replace(given, backend=WritingMHA if "mha" in subject else WritingMLA)
    ran = [run_trial(case, writing, one) for one in Execution]
    assert {record.verdict for record in ran} != {Verdict.REFUSED}
    ran = [run_trial(case, given, one) for one in Execution]
    assert {record.verdict for record in ran} <= {Verdict.PASSED, Verdict.REFUSED}
    assert len(shared) > 10
    assert [tensor.shape for tensor, version in shared.values() if tensor._version > version] == []


def test_trials_of_a_row_share_them(shared):
    case, subject = find("mha-target_verify-bs2_ragged"), SUBJECTS["trtllm_mha/xqa"]
    run_trial(case, subject, Execution.EAGER)
    first = {key for key, (tensor, _) in shared.items()}
    run_trial(case, SUBJECTS["trtllm_mha/trtllm_gen"], Execution.EAGER)
    assert {*shared} == first
