"""The EAGLE worker, spec v1 and v2: draft, verify, accept, extend."""

from __future__ import annotations

import torch

from harness.engine.acceptance import Acceptance, build_chain, fill_full_mask, verify_greedy
from harness.engine.batch_builder import BatchBuilder
from harness.engine.batch_state import BatchState, DraftState, StepOutput
from harness.engine.draft_extend import DraftExtend
from harness.engine.phases import EaglePhases
from harness.engine.plan_stream import PlanStream, SameStream
from harness.engine.prefill import Prefill
from harness.engine.spec_config import SpecConfig, SpecVersion
from harness.errors import UsageError, rejected
from harness.upstream.allocator import ReqToTokenPool
from harness.upstream.base_attn_backend import AttentionBackend, decide_needs_cpu_seq_lens
from harness.upstream.forward_batch_info import (
    EagleDraftInput,
    EagleVerifyInput,
    ForwardBatch,
    ForwardMode,
)
from harness.upstream.memory_pool import KVPool
from harness.upstream.verify_mask import TreeMaskMode


class EagleWorker:
    """Speculative greedy decoding over chains.

    Args:
        phases: its forwards.
        spec_config: how far it speculates.
        req_to_token_pool: slots of each request's tokens; target and draft use the same.
        target_pool: the target's keys and values.
        draft_pool: the draft's, with as many slots.
        streams: the queues of an overlapping v2 worker, None for no overlap.
        chunk_size: most prompt tokens per request and forward, None for whole prompts.

    Raises:
        UsageError: a plan stream under v1, steps without a draft phase, pools of unequal size.
    """

    def __init__(
        self,
        phases: EaglePhases,
        spec_config: SpecConfig,
        req_to_token_pool: ReqToTokenPool,
        target_pool: KVPool,
        draft_pool: KVPool,
        *,
        streams: PlanStream | None = None,
        chunk_size: int | None = None,
    ) -> None:
        _check(phases, spec_config, target_pool, draft_pool, streams)
        self.streams: PlanStream = streams or SameStream()
        self.headroom = max(spec_config.num_draft_tokens, spec_config.num_steps)
        self._overlap = streams is not None
        self._phases = phases
        self._spec_config = spec_config
        self._target = BatchBuilder(req_to_token_pool, target_pool)
        self._draft = BatchBuilder(req_to_token_pool, draft_pool)
        self._needs_cpu_seq_lens = decide_needs_cpu_seq_lens(phases.backends())
        self._round = 0
        self._extend = DraftExtend(
            phases.draft_extend,
            self._draft,
            spec_config.version,
            self._needs_cpu_seq_lens,
            self.streams,
        )
        self.prefill = Prefill(
            phases.target_extend,
            self._target,
            phases.draft_prefill,
            self._draft,
            chunk_size,
            self._needs_cpu_seq_lens,
            self.streams,
        )

    def step(self, state: BatchState) -> tuple[BatchState, StepOutput]:
        """One round. Verify never depends on draft tokens for its metadata: it is planned first."""
        streams, verify = self.streams, self._phases.target_verify
        self._round += 1
        now, then = f"state {self._round}", f"state {self._round + 1}"
        batch = streams.main(
            "lay out verify",
            lambda: self._verify_batch(state),
            reads=(now, "req_to_token"),
            writes=("verify batch",),
        )
        streams.plan_waits()
        streams.plan(
            "plan verify",
            lambda: verify.prepare(batch),
            reads=("verify batch", "req_to_token"),
            writes=("verify metadata",),
        )
        streams.main(
            "draft",
            lambda: self._write_chain(batch, state, self._drafts(state)),
            reads=(now, "req_to_token"),
            writes=("chain", "round metadata"),
        )
        streams.main_waits()
        accepted, hidden = streams.main(
            "verify",
            lambda: self._verify(batch, state),
            reads=(
                "chain",
                "verify batch",
                "verify metadata",
                "round metadata",
                "req_to_token",
                now,
            ),
            writes=("verified", then),
        )
        draft_state = self._extend(state, accepted, hidden)
        seq_lens = state.seq_lens + accepted.accept_lens
        after = BatchState(
            state.rows, seq_lens, accepted.bonus, self._ahead(state, seq_lens), draft_state
        )
        return after, StepOutput(accepted.accept_lens, accepted.predicted)

    def _verify_batch(self, state: BatchState) -> ForwardBatch:
        """A verify batch whose chain is still to be written."""
        width = self._spec_config.num_draft_tokens
        chain = torch.zeros(state.bs * width, dtype=torch.int64, device=self._target.device)
        spec_info = EagleVerifyInput(chain, width)
        batch = self._target.uniform(
            ForwardMode.TARGET_VERIFY, state, chain, width, spec_info=spec_info
        )
        # A batch beyond what graphs hold is verified eagerly, by kernels that are causal anyway.
        mask = self._verify_backend.verify_mask
        if mask is not None and mask.fits(state.bs):
            spec_info.custom_mask = mask.buffer
        return batch

    def _drafts(self, state: BatchState) -> torch.Tensor:
        """[bs, num_steps] draft tokens."""
        steps, draft_state = self._spec_config.num_steps, _required(state.draft_state)
        if self._phases.draft is None or steps == 1:
            return draft_state.topk_index
        positions = self._draft.positions(state, steps - 1)
        batch = self._draft.batch(
            ForwardMode.DECODE,
            rows=state.rows,
            seq_lens=state.seq_lens,
            ids=draft_state.topk_index[:, 0],
            positions=state.seq_lens,
            slots=self._draft.slots(state.rows[:, None], positions).T.flatten(),
            seq_lens_cpu=state.seq_lens_cpu,
            spec_info=EagleDraftInput(
                draft_state.topk_index, draft_state.topk_p, draft_state.hidden_states, steps
            ),
        )
        self._phases.draft.prepare(batch)
        return self._phases.draft.run(batch).draft_tokens

    def _write_chain(self, batch: ForwardBatch, state: BatchState, drafts: torch.Tensor) -> None:
        """Write the chain, and the mask if there is one, into the verify batch in place."""
        spec_info = batch.spec_info
        assert isinstance(spec_info, EagleVerifyInput)
        chain = build_chain(state.bonus, drafts, spec_info.draft_token_num)
        spec_info.draft_token.copy_(chain.flatten())
        if spec_info.custom_mask is not None:
            mask, history = self._verify_backend.verify_mask, state.seq_lens
            if mask is not None and mask.mode is TreeMaskMode.QLEN_ONLY:
                history = torch.zeros_like(history)
            fill_full_mask(spec_info.custom_mask, history, spec_info.draft_token_num)

    def _verify(self, batch: ForwardBatch, state: BatchState) -> tuple[Acceptance, torch.Tensor]:
        """What the target accepts, and its hidden states."""
        verify, spec_info = self._phases.target_verify, batch.spec_info
        assert isinstance(spec_info, EagleVerifyInput)
        self._verify_backend.update_verify_buffers_to_fill_after_draft(
            spec_info, verify.graph_bs(batch)
        )
        output = verify.run(batch)
        chain = spec_info.draft_token.view(state.bs, spec_info.draft_token_num)
        return verify_greedy(chain, output.next_token_logits), output.hidden_states

    def _ahead(self, state: BatchState, seq_lens: torch.Tensor) -> torch.Tensor | None:
        """seq_lens on the host; under overlap an upper bound, since the round may still run."""
        if not self._needs_cpu_seq_lens:
            return None
        if self._overlap:
            return state.seq_lens.cpu() + self._spec_config.num_draft_tokens
        return seq_lens.cpu()

    @property
    def _verify_backend(self) -> AttentionBackend:
        backend = self._phases.target_verify.backend
        assert isinstance(backend, AttentionBackend)
        return backend


def _required(draft_state: DraftState | None) -> DraftState:
    assert draft_state is not None
    return draft_state


def _check(
    phases: EaglePhases,
    spec_config: SpecConfig,
    target_pool: KVPool,
    draft_pool: KVPool,
    streams: PlanStream | None,
) -> None:
    if spec_config.version is SpecVersion.V1 and streams is not None:
        raise UsageError(rejected("streams", type(streams).__name__, "None under spec v1"))
    if spec_config.num_steps > 1 and phases.draft is None:
        raise UsageError(rejected("phases.draft", None, "a phase where num_steps > 1"))
    target, draft = ((p.num_pages, p.page_size) for p in (target_pool, draft_pool))
    if target != draft:
        raise UsageError(
            rejected("draft pool (pages, page size)", draft, f"{target}, the target's")
        )
