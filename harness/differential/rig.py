"""A subject built on pools for one case: its kernel, its backend, its forward, its graph runner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from harness.attention.multi_step_draft import PagedMultiStepDraftBackend
from harness.attention.paged_backend import PagedBackend
from harness.core.case import Mode
from harness.differential.forward_batches import FORWARD_MODES
from harness.differential.pool_state import PoolState
from harness.differential.probe_model import ProbeModel
from harness.engine.draft import multi_step_draft
from harness.graphs.draft_runner import DraftRunner
from harness.graphs.factory import new_graph
from harness.graphs.graph import GraphFactory
from harness.graphs.runner import GraphRunner
from harness.graphs.target_verify_runner import TargetVerifyRunner
from harness.kernels.interface import Kernel
from harness.kernels.registry import new_kernel
from harness.subjects import Subject
from harness.upstream.forward_batch_info import DraftOutput, ForwardBatch, LogitsProcessorOutput

Forward = Callable[[ForwardBatch], LogitsProcessorOutput | DraftOutput]


@dataclass(frozen=True)
class Rig:
    """A subject built on a stage for the mode of the stage's case."""

    kernel: Kernel
    backend: PagedBackend | PagedMultiStepDraftBackend
    forward: Forward


def build(subject: Subject, pool_state: PoolState) -> Rig:
    """Provider, backend and probe model of a subject, wired to the stage's pools."""
    case = pool_state.case
    kernel = new_kernel(subject.family, subject.capability, pool_state.device)
    model = ProbeModel(pool_state.inputs.weights, case, pool_state.device)
    pools: dict[str, Any] = {
        "kernel": kernel,
        "req_to_token_pool": pool_state.req_to_token_pool,
        "token_to_kv_pool": pool_state.token_to_kv_pool,
        "max_context_len": case.max_context_len,
        "num_draft_tokens": case.num_draft_tokens,
        "speculative_num_steps": case.num_steps,
        "device": pool_state.device,
    }
    if case.mode is Mode.MULTI_STEP_DRAFT:
        steps = subject.draft_backend(**pools)
        return Rig(kernel, steps, multi_step_draft(model, steps))
    backend = subject.backend(**pools)

    def forward(batch: ForwardBatch) -> LogitsProcessorOutput:
        served = batch.with_changes(attn_backend=backend)
        return model.forward(batch.input_ids, batch.positions, served)

    return Rig(kernel, backend, forward)


def build_runner(
    subject: Subject,
    pool_state: PoolState,
    rig: Rig,
    capture_bs: tuple[int, ...],
    graph: GraphFactory | None = None,
) -> GraphRunner[Any, Any]:
    """The graph runner of the stage's mode, not yet captured; by default on the device's graphs."""
    case = pool_state.case
    common: dict[str, Any] = {
        "forward": rig.forward,
        "attn_backend": rig.backend,
        "new_graph": graph or new_graph(pool_state.device),
        "capture_bs": capture_bs,
        "req_to_token_pool": pool_state.req_to_token_pool,
        "token_to_kv_pool": pool_state.token_to_kv_pool,
        "hidden_size": pool_state.inputs.weights.hidden_size,
        "hidden_dtype": getattr(torch, case.dtype),
        "device": pool_state.device,
    }
    if case.mode is Mode.MULTI_STEP_DRAFT:
        return DraftRunner(num_tokens_per_req=case.num_steps - 1, **common)
    mode = FORWARD_MODES[case.mode]
    if case.mode in (Mode.DRAFT_EXTEND, Mode.DRAFT_EXTEND_V2):
        return subject.draft_extend_runner(
            mode=mode, num_tokens_per_req=case.num_draft_tokens, **common
        )
    width = case.num_draft_tokens if case.mode is Mode.TARGET_VERIFY else 1
    return TargetVerifyRunner(mode=mode, num_tokens_per_req=width, **common)
