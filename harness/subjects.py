"""The composition root: names become providers, backends, models and graph runners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from harness.attention.baselines import (
    ContextKernelMHABackend,
    HostLengthsMLABackend,
    KVIndicesMLAMultiStepDraftBackend,
    VerifyFixUpMHABackend,
)
from harness.attention.multi_step_draft import (
    PagedMultiStepDraftBackend,
    TRTLLMHAAttnMultiStepDraftBackend,
    TRTLLMMLAMultiStepDraftBackend,
)
from harness.attention.paged_backend import PagedBackend
from harness.attention.trtllm_mha import TRTLLMHAAttnBackend
from harness.attention.trtllm_mla import TRTLLMMLABackend
from harness.core.capability import CAPABILITIES, Capability, refusal
from harness.core.case import Case, Execution, Family, Mode
from harness.core.environment import compute_capability
from harness.core.numerics import Numerics
from harness.differential.forward_batches import FORWARD_MODES
from harness.differential.pool_state import Stage
from harness.differential.probe_model import ProbeModel
from harness.engine.draft import multi_step_draft
from harness.errors import UsageError, rejected
from harness.graphs.draft_extend_runner import DraftExtendRunner, UnoptimizedDraftExtendRunner
from harness.graphs.draft_runner import DraftRunner
from harness.graphs.runner import GraphFactory, GraphRunner
from harness.graphs.target_verify_runner import TargetVerifyRunner
from harness.kernels.interface import Provider
from harness.kernels.registry import new_graph, new_provider, real_kernel
from harness.upstream.forward_batch_info import DraftOutput, ForwardBatch, LogitsProcessorOutput

Forward = Callable[[ForwardBatch], LogitsProcessorOutput | DraftOutput]

ALL_MODES = frozenset(Mode)
GRAPH_MODES = ALL_MODES - {Mode.EXTEND, Mode.IDLE}


@dataclass(frozen=True)
class Subject:
    """One backend on one kernel.

    Args:
        name: "backend/kernel", as in test ids and reports.
        family: the attention family.
        kernel: name of the capability the reference kernel is held to.
        backend: serves every mode but the multi-step draft.
        draft_backend: serves the multi-step draft.
        draft_extend_runner: captures both draft extends.
        modes: what this subject is run on; an unoptimized peer only where it differs.
    """

    name: str
    family: Family
    kernel: str
    backend: type[PagedBackend]
    draft_backend: type[PagedMultiStepDraftBackend]
    draft_extend_runner: type[DraftExtendRunner] = DraftExtendRunner
    modes: frozenset[Mode] = ALL_MODES

    @property
    def is_peer(self) -> bool:
        """Whether it stands for one optimization undone, in the modes where that shows."""
        return self.modes != ALL_MODES

    @property
    def capability(self) -> Capability:
        """What the subject's kernel accepts."""
        return CAPABILITIES[self.family, self.kernel]

    def numerics(self, device: torch.device | str) -> Numerics:
        """Of the real kernel, or of the reference in its place, which rounds what it is told to."""
        if real_kernel(self.family, self.kernel, device) is not None:
            return self.capability.numerics
        casts = self.capability.casts_query_to_kv_dtype
        return Numerics(rounds_query=ALL_MODES if casts else frozenset())

    def refusal(
        self, case: Case, execution: Execution, device: torch.device | str = "cpu"
    ) -> str | None:
        """Why this subject does not run this case on this device, or None if it does."""
        if execution is Execution.GRAPH and case.mode not in GRAPH_MODES:
            return f"{case.mode} has no graph"
        if execution is Execution.GRAPH and case.padded_rows:
            return "DP padding behind the plan is an eager case; graphs pad by bucket"
        return refusal(case, self.capability, compute_capability(device))


Kind = tuple[Family, type[PagedBackend], type[PagedMultiStepDraftBackend]]
MHA: Kind = (Family.MHA, TRTLLMHAAttnBackend, TRTLLMHAAttnMultiStepDraftBackend)
MLA: Kind = (Family.MLA, TRTLLMMLABackend, TRTLLMMLAMultiStepDraftBackend)


def _subject(name: str, of: Kind, **changes: Any) -> Subject:
    family, backend, draft_backend = of
    fields: dict[str, Any] = {"backend": backend, "draft_backend": draft_backend} | changes
    return Subject(name=name, family=family, kernel=name.split("/")[1], **fields)


SUBJECTS = {
    subject.name: subject
    for subject in (
        _subject("trtllm_mha/reference", MHA),
        _subject("trtllm_mha/xqa", MHA),
        _subject("trtllm_mha/trtllm_gen", MHA),
        _subject("trtllm_mla/reference", MLA),
        _subject("trtllm_mla/flash_mla", MLA),
        _subject("trtllm_mla/trtllm_gen", MLA),
        # Peers: one optimization undone each.
        _subject(
            "trtllm_mla-host_lengths/trtllm_gen",
            MLA,
            backend=HostLengthsMLABackend,
            modes=frozenset({Mode.DECODE, Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND_V2}),
        ),
        _subject(
            "trtllm_mla-kv_indices/trtllm_gen",
            MLA,
            draft_backend=KVIndicesMLAMultiStepDraftBackend,
            modes=frozenset({Mode.MULTI_STEP_DRAFT}),
        ),
        _subject(
            "trtllm_mha-context_kernel/trtllm_gen",
            MHA,
            backend=ContextKernelMHABackend,
            modes=frozenset({Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND_V2}),
        ),
        _subject(
            "trtllm_mha-verify_fix_up/xqa",
            MHA,
            backend=VerifyFixUpMHABackend,
            modes=frozenset({Mode.TARGET_VERIFY}),
        ),
        _subject(
            "trtllm_mha-dead_topk/xqa",
            MHA,
            draft_extend_runner=UnoptimizedDraftExtendRunner,
            modes=frozenset({Mode.DRAFT_EXTEND_V2}),
        ),
    )
}


def find_subject(name: str) -> Subject:
    """The subject of that name.

    Raises:
        UsageError: there is none; the message lists them.
    """
    if name not in SUBJECTS:
        raise UsageError(rejected("subject", name, ", ".join(SUBJECTS)))
    return SUBJECTS[name]


@dataclass(frozen=True)
class Rig:
    """A subject built on a stage for the mode of the stage's case."""

    provider: Provider
    backend: PagedBackend | PagedMultiStepDraftBackend
    forward: Forward


def build(subject: Subject, stage: Stage) -> Rig:
    """Provider, backend and probe model of a subject, wired to the stage's pools."""
    case = stage.case
    provider = new_provider(subject.family, subject.capability, stage.device)
    model = ProbeModel(stage.world.weights, case, stage.device)
    pools: dict[str, Any] = {
        "provider": provider,
        "req_to_token_pool": stage.req_to_token_pool,
        "token_to_kv_pool": stage.token_to_kv_pool,
        "max_context_len": case.max_context_len,
        "num_draft_tokens": case.num_draft_tokens,
        "speculative_num_steps": case.num_steps,
        "device": stage.device,
    }
    if case.mode is Mode.MULTI_STEP_DRAFT:
        steps = subject.draft_backend(**pools)
        return Rig(provider, steps, multi_step_draft(model, steps))
    backend = subject.backend(**pools)

    def forward(batch: ForwardBatch) -> LogitsProcessorOutput:
        served = batch.with_changes(attn_backend=backend)
        return model.forward(batch.input_ids, batch.positions, served)

    return Rig(provider, backend, forward)


def build_runner(
    subject: Subject,
    stage: Stage,
    rig: Rig,
    capture_bs: tuple[int, ...],
    graph: GraphFactory | None = None,
) -> GraphRunner[Any, Any]:
    """The graph runner of the stage's mode, not yet captured; by default on the device's graphs."""
    case = stage.case
    common: dict[str, Any] = {
        "forward": rig.forward,
        "attn_backend": rig.backend,
        "new_graph": graph or new_graph(stage.device),
        "capture_bs": capture_bs,
        "req_to_token_pool": stage.req_to_token_pool,
        "token_to_kv_pool": stage.token_to_kv_pool,
        "hidden_size": stage.world.weights.hidden_size,
        "hidden_dtype": getattr(torch, case.dtype),
        "device": stage.device,
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
