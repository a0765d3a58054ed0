"""Each optimization saves what the baseline that undoes it spends, and changes no answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fixtures.drivers.forward_cost import cost
from fixtures.drivers.rigs import ragged_rig, replayed
from fixtures.tables.budgets import BUCKET
from harness.attention import baselines
from harness.attention.multi_step_draft import (
    TRTLLMHAAttnMultiStepDraftBackend,
    TRTLLMMLAMultiStepDraftBackend,
)
from harness.attention.trtllm_mha import TRTLLMHAAttnBackend
from harness.attention.trtllm_mla import TRTLLMMLABackend
from harness.core.case import Execution, Mode
from harness.differential.rig import Rig
from harness.graphs.effects import observe
from harness.subjects import SUBJECTS
from harness.upstream.base_attn_backend import AttentionBackend, decide_needs_cpu_seq_lens
from harness.upstream.verify_mask import TreeMaskMode

EAGER, GRAPH = Execution.EAGER, Execution.GRAPH
MHA, XQA = "trtllm_mha/trtllm_gen", "trtllm_mha/xqa"
MLA, FLASH_MLA = "trtllm_mla/trtllm_gen", "trtllm_mla/flash_mla"
BACKENDS: tuple[type[AttentionBackend], ...] = (
    TRTLLMHAAttnBackend,
    TRTLLMMLABackend,
    baselines.HostLengthsMLABackend,
    baselines.ContextKernelMHABackend,
    baselines.VerifyFixUpMHABackend,
)
# baseline, the subject it undoes an optimization of, modes, and the count it must exceed
UNDONE = (
    ("trtllm_mla-host_lengths/trtllm_gen", MLA, "host_syncs"),
    ("trtllm_mla-host_lengths/flash_mla", FLASH_MLA, "host_syncs"),
    ("trtllm_mla-kv_indices/trtllm_gen", MLA, "planning"),
    ("trtllm_mla-kv_indices/flash_mla", FLASH_MLA, "planning"),
    ("trtllm_mha-context_kernel/trtllm_gen", MHA, "context_kernels"),
    ("trtllm_mha-context_kernel/xqa", XQA, "context_kernels"),
    ("trtllm_mha-dead_topk/xqa", XQA, "topk"),
)


def answers(own: Rig, execution: Execution) -> dict[str, torch.Tensor]:
    """What the forward returns, without the top-k that only some graphs compute."""
    with torch.no_grad():
        if execution is EAGER:
            output = own.run_eager(own.batch)
        else:
            output = replayed(own, BUCKET).replay(own.batch)
    tensors = {k: v for k, v in vars(output).items() if isinstance(v, torch.Tensor)}
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("topk")}


SAVINGS = [
    pytest.param(baseline, own, name, mode, id=f"{baseline}-{mode}")
    for baseline, own, name in UNDONE
    for mode in sorted(SUBJECTS[baseline].modes)
]


@pytest.mark.parametrize(("baseline", "own", "name", "mode"), SAVINGS)
def test_the_baseline_pays_what_the_optimization_saves(
    baseline: str, own: str, name: str, mode: Mode
) -> None:
    wasted = cost(ragged_rig(baseline, mode), GRAPH, BUCKET).counts[name]
    spent = cost(ragged_rig(own, mode), GRAPH, BUCKET).counts[name]
    assert spent < wasted
    assert spent == 0 or name == "planning"


@pytest.mark.parametrize("execution", [EAGER, GRAPH])
@pytest.mark.parametrize(
    ("baseline", "own", "mode"),
    [
        pytest.param(baseline, own, mode, id=f"{baseline}-{mode}")
        for baseline, own in (*(row[:2] for row in UNDONE), ("trtllm_mha-verify_fix_up/xqa", XQA))
        for mode in sorted(SUBJECTS[baseline].modes)
    ],
)
def test_the_baseline_gives_the_same_answers(
    baseline: str, own: str, mode: Mode, execution: Execution
) -> None:
    optimized, plain = (
        answers(ragged_rig(own, mode), execution),
        answers(ragged_rig(baseline, mode), execution),
    )
    assert optimized.keys() == plain.keys()
    for name, tensor in optimized.items():
        torch.testing.assert_close(tensor, plain[name], rtol=1e-2, atol=1e-2, msg=name)


# 1: MLA without the wait for lengths


def test_lengths_are_copied_only_where_a_backend_reads_them() -> None:
    free = (*BACKENDS[:2], TRTLLMMLAMultiStepDraftBackend, TRTLLMHAAttnMultiStepDraftBackend)
    needing = [kind.__name__ for kind in free if kind.needs_cpu_seq_lens is not False]
    assert not needing, f"needs_cpu_seq_lens is False of backends that read none: not {needing}"
    base = AttentionBackend.needs_cpu_seq_lens
    assert base is True, f"needs_cpu_seq_lens of a backend that says nothing is True, not {base}"
    needs: Any = baselines.HostLengthsMLABackend
    rule = "decide_needs_cpu_seq_lens is True where any backend needs them, else False"
    for order in ([needs, *free], [*free, needs]):
        assert decide_needs_cpu_seq_lens(order) is True, rule  # type: ignore[arg-type]
    assert decide_needs_cpu_seq_lens(free) is False, rule  # type: ignore[arg-type]
    assert decide_needs_cpu_seq_lens([]) is False, rule


@pytest.mark.parametrize("mode", [Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND, Mode.DECODE])
def test_an_mla_replay_neither_has_nor_misses_seq_lens_cpu(mode: Mode) -> None:
    own = ragged_rig(MLA, mode)
    assert own.batch.seq_lens_cpu is None
    assert own.batch.seq_lens_sum is None
    runner = replayed(own, BUCKET)
    with observe() as effects:
        runner.replay(own.batch)
    assert effects.host_syncs == []


def test_the_mask_is_one_buffer_of_exactly_the_largest_verify() -> None:
    own = ragged_rig(MLA, Mode.TARGET_VERIFY).backend
    assert own.cuda_graph_custom_mask is None, "no mask before init_cuda_graph_state"
    assert own.verify_mask is None, "no mask before init_cuda_graph_state"
    own.init_cuda_graph_state(2, 8)
    mask = own.verify_mask
    # 2 requests of 4 rows, each of 256 tokens of context and 4 draft tokens.
    told = f"2080 bools for two requests, not {list(mask.buffer.shape)} in {mask.buffer.dtype}"
    assert (mask.buffer.dtype, mask.buffer.shape) == (torch.bool, (2 * 4 * 260,)), told
    told = "verify_mask and cuda_graph_custom_mask are one buffer"
    assert mask.buffer is own.cuda_graph_custom_mask, told
    assert mask.mode is TreeMaskMode.FULL_MASK, f"a mask of the history, too, not {mask.mode.name}"
    fits = [mask.fits(bs) for bs in (1, 2, 3)]
    told = f"verify_mask for max_bs = 2 fits 1 and 2 requests, and not 3: {fits}"
    assert fits == [True, True, False], told


def test_draft_steps_and_targets_without_drafts_hold_no_mask() -> None:
    steps = ragged_rig(MLA, Mode.MULTI_STEP_DRAFT)
    steps.backend.init_cuda_graph_state(4, 4)
    assert [step.cuda_graph_custom_mask for step in steps.planners] == [None] * 4
    verify = ragged_rig(MHA, Mode.TARGET_VERIFY).backend
    verify.init_cuda_graph_state(4, 16)
    assert verify.verify_mask is None


# 3: verify and draft_extend_v2 on the decode kernel, draft_extend_v1 and extend on the context one

KERNELS = (
    (Mode.TARGET_VERIFY, {"decode_kernels": 2, "context_kernels": 0}),
    (Mode.DRAFT_EXTEND_V2, {"decode_kernels": 2, "context_kernels": 0}),
    (Mode.DRAFT_EXTEND, {"decode_kernels": 0, "context_kernels": 2}),
)


@pytest.mark.parametrize("execution", [EAGER, GRAPH])
@pytest.mark.parametrize(
    ("mode", "kernels"), KERNELS, ids=lambda x: x if isinstance(x, Mode) else ""
)
@pytest.mark.parametrize("subject", [MHA, XQA])
def test_uniform_phases_run_on_the_decode_kernel(
    subject: str, mode: Mode, kernels: dict[str, int], execution: Execution
) -> None:
    counts = cost(ragged_rig(subject, mode), execution, BUCKET).counts
    assert counts | kernels == counts


# 4: nothing is redone once the draft tokens are known


@pytest.mark.parametrize("kind", BACKENDS)
def test_every_backend_has_the_hook_after_drafting(kind: type[AttentionBackend]) -> None:
    name = "update_verify_buffers_to_fill_after_draft"
    inherits = getattr(kind, name) is getattr(AttentionBackend, name)
    assert inherits == (kind is not baselines.VerifyFixUpMHABackend)


@pytest.mark.parametrize("subject", [MHA, XQA, MLA, "trtllm_mha-verify_fix_up/xqa"])
@pytest.mark.parametrize("execution", [EAGER, GRAPH])
def test_the_hook_of_a_planned_target_verify_writes_nothing(
    subject: str, execution: Execution
) -> None:
    own = ragged_rig(subject, Mode.TARGET_VERIFY)
    if execution is EAGER:
        own.backend.init_forward_metadata(own.batch)
    else:
        replayed(own, BUCKET).prepare(own.batch)
    tensors = [v for v in vars(own.plans[0]).values() if isinstance(v, torch.Tensor)]
    versions = [tensor._version for tensor in tensors]
    with observe() as effects:
        own.backend.update_verify_buffers_to_fill_after_draft(own.batch.spec_info, BUCKET)
    is_baseline = "fix_up" in subject
    assert bool(effects.operations) is is_baseline
    assert ([tensor._version for tensor in tensors] != versions) is is_baseline
    assert effects.host_syncs == []


@pytest.mark.parametrize("subject", [MHA, XQA, MLA])
def test_target_verify_answers_alike_whether_or_not_the_hook_is_called(subject: str) -> None:
    outputs = []
    for calls in range(3):
        own = ragged_rig(subject, Mode.TARGET_VERIFY)
        runner = replayed(own, BUCKET)
        runner.prepare(own.batch)
        for _ in range(calls):
            own.backend.update_verify_buffers_to_fill_after_draft(own.batch.spec_info, BUCKET)
        outputs.append(runner.run(own.batch).next_token_logits)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
