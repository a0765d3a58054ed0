"""Draft steps are planned without their parent, and v2 graphs keep a stride and no top-k."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fixtures.drivers.rigs import ragged_rig, replayed
from fixtures.tables.budgets import BUCKET
from harness.core.case import Mode
from harness.errors import ContractError
from harness.upstream.forward_batch_info import EagleDraftExtendInput, EagleDraftInput, ForwardMode
from harness.upstream.older_contracts import OlderContracts

MHA, XQA, MLA = "trtllm_mha/trtllm_gen", "trtllm_mha/xqa", "trtllm_mla/trtllm_gen"


@pytest.mark.parametrize("entry", ["eager", "replay"])
@pytest.mark.parametrize("steps", [2, 5])
@pytest.mark.parametrize("subject", [MHA, MLA])
def test_a_multi_step_draft_plans_each_step_once_and_leaves_its_input_alone(
    subject: str, steps: int, entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ragged_rig(subject, Mode.MULTI_STEP_DRAFT, num_steps=steps)
    name = "init_forward_metadata" + ("_out_graph" if entry == "replay" else "")
    runner = replayed(own, BUCKET) if entry == "replay" else None
    seen: list[tuple[int, Any]] = []
    for i, step in enumerate(own.planners):
        plan = getattr(step, name)

        def planned(batch: Any, *rest: Any, i: int = i, plan: Any = plan) -> None:
            seen.append((i, batch.spec_info))
            plan(batch, *rest)

        monkeypatch.setattr(step, name, planned)
    prepare = runner.prepare if runner else own.backend.init_forward_metadata
    prepare(own.batch)
    assert [i for i, _ in seen] == list(range(steps - 1))
    for spec in (own.batch.spec_info, *(spec for _, spec in seen)):
        assert isinstance(spec, EagleDraftInput)
        assert spec.kv_indptr is None
        assert spec.kv_indices is None


@pytest.mark.parametrize("subject", [MHA, MLA])
def test_the_older_pair_plans_one_more_key_per_draft_step(subject: str) -> None:
    own = ragged_rig(subject, Mode.MULTI_STEP_DRAFT)
    own.backend.init_cuda_graph_state(4, 4)
    rows, lens = own.batch.req_pool_indices, own.batch.seq_lens
    mode, spec = ForwardMode.DECODE, own.batch.spec_info
    for step in own.planners:
        older = OlderContracts(step, step.req_to_token_pool, step.token_to_kv_pool)
        older.init_forward_metadata_capture_cuda_graph(3, 3, rows, lens * 0 + 1, None, mode, spec)
        older.init_forward_metadata_replay_cuda_graph(3, rows, lens, None, None, mode, spec, None)
    keys = [plan.cache_seqlens_int32.tolist() for plan in own.plans]
    assert keys == [[34 + i, 3 + i, 98 + i] for i in range(4)]


@pytest.mark.parametrize(
    ("subject", "mode", "times"),
    [
        (XQA, Mode.DRAFT_EXTEND_V2, 0),
        (MLA, Mode.DRAFT_EXTEND_V2, 0),
        (XQA, Mode.DRAFT_EXTEND, 1),
        (MLA, Mode.DRAFT_EXTEND, 1),
        ("trtllm_mha-dead_topk/xqa", Mode.DRAFT_EXTEND_V2, 1),
    ],
)
def test_topk_is_part_of_the_v1_graph_alone(subject: str, mode: Mode, times: int) -> None:
    own = ragged_rig(subject, mode)
    runner = replayed(own, BUCKET)
    recorded = runner.graphs[BUCKET].operations  # type: ignore[attr-defined]
    for word in ("topk", "softmax"):
        assert sum(n for name, n in recorded.items() if word in name) == times
    output = runner.replay(own.batch)
    assert (output.topk_p is not None) == (output.topk_index is not None) == bool(times)


@pytest.mark.parametrize("accepted", [(1, 3, 2), (2, 2, 2), (4, 1, 1)], ids=str)
@pytest.mark.parametrize("subject", [MHA, MLA])
def test_draft_extend_v2_has_a_uniform_stride_whatever_was_accepted(
    subject: str, accepted: tuple[int, ...]
) -> None:
    own = ragged_rig(subject, Mode.DRAFT_EXTEND_V2, accept_lens=accepted)
    own.backend.init_forward_metadata(own.batch)
    assert own.plans[0].cu_seqlens_q.tolist() == [0, 4, 8, 12]
    replayed(own, BUCKET)
    assert own.plans[0].cu_seqlens_q.tolist() == [0, 4, 8, 12, 16]
    assert own.plans[0].geometry.max_q_len == 4


@pytest.mark.parametrize("subject", [MHA, MLA])
def test_an_unset_stride_of_draft_extend_v2_falls_back_at_capture_alone(subject: str) -> None:
    own = ragged_rig(subject, Mode.DRAFT_EXTEND_V2)
    own.backend.init_cuda_graph_state(4, 16)

    def batch(*counts: int, width: int = 0) -> Any:
        accepted = torch.tensor(counts, dtype=torch.int32)
        spec = EagleDraftExtendInput(None, accepted, num_tokens_per_req=width)
        return own.batch.with_changes(spec_info=spec)

    # A declared stride counts, whatever the captured batch accepted.
    own.backend.init_forward_metadata_out_graph(batch(1, 3, 2, width=4), in_capture=True)
    assert own.plans[0].geometry.max_q_len == 4

    own.backend.init_forward_metadata_out_graph(batch(1, 3, 2), in_capture=True)
    own.backend.init_forward_metadata_in_graph(batch(1, 3, 2))
    assert own.plans[0].cu_seqlens_q.tolist() == [0, 3, 6, 9]
    own.backend.init_forward_metadata_out_graph(batch(2, 1, 1))
    own.backend.init_forward_metadata_in_graph(batch(2, 1, 1))
    assert own.plans[0].cu_seqlens_q.tolist() == [0, 3, 6, 9]
    with pytest.raises(ContractError, match=r"num_tokens_per_req = 0 .* >= 1"):
        own.backend.init_forward_metadata_out_graph(batch(0, 0, 0), in_capture=True)
    with pytest.raises(ContractError, match=r"num_tokens_per_req = 0 .* >= 1"):
        own.backend.init_forward_metadata(batch(1, 3, 2))
