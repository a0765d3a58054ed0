"""A subject built on the pools of a trial: kernel, backend, forward, graph runners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from harness.core.case import Case, Mode
from harness.differential.forward_batches import FORWARD_MODES, make_batch
from harness.differential.input_types import BatchInputs
from harness.differential.pool_state import PoolState
from harness.differential.probe_model import ProbeModel
from harness.engine.draft import multi_step_draft
from harness.graphs.draft_runner import DraftRunner
from harness.graphs.factory import new_graph
from harness.graphs.graph import GraphFactory
from harness.graphs.runner import GraphRunner
from harness.graphs.target_verify_runner import TargetVerifyRunner
from harness.kernels.interface import Kernel
from harness.subjects import Subject
from harness.upstream.base_attn_backend import AttentionBackend, MultiStepDraftBackend
from harness.upstream.forward_batch_info import DraftOutput, ForwardBatch, LogitsProcessorOutput

ForwardOutput = LogitsProcessorOutput | DraftOutput
Forward = Callable[[ForwardBatch], ForwardOutput]


@dataclass(frozen=True)
class Rig:
    """A subject on the pools of a case.

    Args:
        subject: backend and kernel.
        pool_state: the pools, and the inputs of the case and its decoys.
        kernel: shared by every backend of the rig.
        backend: the subject's for the mode of the case.
        forward: the probe model's, over a planned batch.
    """

    subject: Subject
    pool_state: PoolState
    kernel: Kernel
    backend: AttentionBackend | MultiStepDraftBackend
    forward: Forward

    @property
    def case(self) -> Case:
        """The case under test."""
        return self.pool_state.case

    @cached_property
    def batch(self) -> ForwardBatch:
        """The batch under test."""
        return self.batch_of(self.pool_state.inputs.tested)

    def batch_of(self, batch_inputs: BatchInputs) -> ForwardBatch:
        """A batch on the rig's pools, with host lengths only for a backend that needs them."""
        return make_batch(
            self.pool_state, batch_inputs, host_lengths=self.backend.needs_cpu_seq_lens
        )

    @property
    def planners(self) -> list[AttentionBackend]:
        """The backends that plan: one, or one per draft step."""
        if isinstance(self.backend, AttentionBackend):
            return [self.backend]
        return list(self.backend.attn_backends)

    @property
    def plans(self) -> tuple[Any, ...]:
        """Metadata of every planner; an idle forward has none."""
        plans = (planner.forward_metadata for planner in self.planners)
        return tuple(plan for plan in plans if plan is not None)

    def run_eager(self, batch: ForwardBatch) -> ForwardOutput:
        """Plan a batch and run its forward."""
        self.backend.init_forward_metadata(batch)
        return self.forward(batch)

    def capture(
        self,
        capture_bs: tuple[int, ...],
        graph: GraphFactory | None = None,
        *,
        after_metadata: Callable[[], None] | None = None,
    ) -> GraphRunner[Any, Any]:
        """A captured runner of the case's mode; by default on graphs of the device."""
        new = graph or new_graph(self.pool_state.device)
        runner = _runner(self, capture_bs, new, after_metadata)
        runner.capture()
        return runner


def build(subject: Subject, pool_state: PoolState, padding: float | None = None) -> Rig:
    """The rig of a subject: a new kernel, backend and probe model, with its ``padding``."""
    case, device = pool_state.case, pool_state.device
    kernel = subject.new_kernel(device)
    model = ProbeModel(pool_state.inputs.weights, case, device, padding)
    pools: dict[str, Any] = {
        "kernel": kernel,
        "req_to_token_pool": pool_state.req_to_token_pool,
        "token_to_kv_pool": pool_state.token_to_kv_pool,
        "max_context_len": case.max_context_len,
        "num_draft_tokens": case.num_draft_tokens,
        "speculative_num_steps": case.num_steps,
        "device": device,
    }
    if case.mode is Mode.MULTI_STEP_DRAFT:
        steps = subject.new_draft_backend(case, **pools)
        return Rig(subject, pool_state, kernel, steps, multi_step_draft(model, steps))
    backend = subject.new_backend(case, **pools)

    def forward(batch: ForwardBatch) -> LogitsProcessorOutput:
        served = batch.with_changes(attn_backend=backend)
        return model.forward(batch.input_ids, batch.positions, served)

    return Rig(subject, pool_state, kernel, backend, forward)


def _runner(
    rig: Rig,
    capture_bs: tuple[int, ...],
    graph: GraphFactory,
    after_metadata: Callable[[], None] | None,
) -> GraphRunner[Any, Any]:
    case, pool_state = rig.case, rig.pool_state
    common: dict[str, Any] = {
        "forward": rig.forward,
        "attn_backend": rig.backend,
        "new_graph": graph,
        "capture_bs": capture_bs,
        "after_metadata": after_metadata,
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
        return rig.subject.draft_extend_runner(
            mode=mode, num_tokens_per_req=case.num_draft_tokens, **common
        )
    width = case.num_draft_tokens if case.mode is Mode.TARGET_VERIFY else 1
    return TargetVerifyRunner(mode=mode, num_tokens_per_req=width, **common)
