"""Multi-step draft backends: one backend per step, planned directly, with no work in the parent."""

from __future__ import annotations

from typing import Any

from harness.attention.captured import BufferSlice
from harness.attention.geometry import Geometry
from harness.attention.metadata import FillInputs, MetadataBuffers
from harness.attention.paged_backend import PagedBackend
from harness.attention.round_plan import DRAFT, RoundPlan
from harness.attention.trtllm_mha import TRTLLMHAAttnBackend
from harness.attention.trtllm_mla import TRTLLMMLABackend
from harness.errors import ContractError, UsageError, rejected
from harness.upstream.base_attn_backend import MultiStepDraftBackend
from harness.upstream.forward_batch_info import ForwardBatch, ForwardMode


class PagedMultiStepDraftBackend(MultiStepDraftBackend):
    """Plans ``speculative_num_steps - 1`` step backends from one draft batch.

    Args:
        topk: drafts a step; 1, because the kernels see a chain and no tree.
        speculative_num_steps: steps of a round.
        round_plan: what graphs of one round's phases share, None to share among the steps alone.
        **arguments: of every step's backend; see ``PagedBackend``.

    Raises:
        UsageError: topk or speculative_num_steps is out of range.
    """

    needs_cpu_seq_lens = False
    step_backend: type[PagedBackend]
    attn_backends: list[PagedBackend]

    def __init__(
        self,
        *,
        speculative_num_steps: int,
        topk: int = 1,
        round_plan: RoundPlan | None = None,
        **arguments: Any,
    ) -> None:
        if topk != 1:
            raise UsageError(rejected("topk", topk, "1: these kernels draft a chain"))
        if speculative_num_steps < 1:
            raise UsageError(rejected("speculative_num_steps", speculative_num_steps, ">= 1"))
        self.topk = topk
        self._round_plan = round_plan
        self._buffers: MetadataBuffers | None = None
        self.speculative_num_steps = speculative_num_steps
        arguments |= {"speculative_num_steps": speculative_num_steps, "skip_prefill": True}
        self.attn_backends = [
            self.step_backend(**arguments, speculative_step_id=step)
            for step in range(speculative_num_steps - 1)
        ]

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Plan every step of an eager draft."""
        for step, backend in enumerate(self.attn_backends):
            backend.init_forward_metadata(self._step_batch(batch, step))
        self._check_phase_order(batch, None)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate every step's buffers; captured steps read one page table."""
        steps, plan = len(self.attn_backends), self._round_plan
        if not steps:
            return
        writer = self.attn_backends[0].writer
        rows = max(max_bs, self._buffers.rows if self._buffers else 0)
        largest = Geometry(forward_mode=ForwardMode.DECODE, bs=rows, num_tokens=rows, max_q_len=1)
        if plan is not None:
            self._buffers = plan.buffers(writer, max_bs)
        elif self._buffers is None or self._buffers.rows < rows:
            self._buffers = writer.new_buffers(largest, phases=steps)
        num_table_keys = steps if plan is None else plan.num_table_keys
        for step, backend in enumerate(self.attn_backends):
            backend.use_shared(
                ForwardMode.DECODE, BufferSlice(self._buffers, largest, step, num_table_keys)
            )

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Choose every step's metadata."""
        for step, backend in enumerate(self.attn_backends):
            backend.init_forward_metadata_out_graph(self._step_batch(batch, step), in_capture)
        if not in_capture:
            self._check_phase_order(batch, batch.seq_lens.shape[0])

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Fill every step's metadata, and what the round shares, at once."""
        if batch.forward_mode.is_idle() or not self.attn_backends:
            return
        phases = [
            backend.planned(self._step_batch(batch, step))
            for step, backend in enumerate(self.attn_backends)
        ]
        for backend in self.attn_backends:
            backend.begin_forward()
        bs = phases[0].geometry.bs
        if self._round_plan is not None:
            phases.append(self._round_plan.verify(bs))
        inputs = FillInputs(
            req_pool_indices=batch.req_pool_indices[:bs],
            seq_lens=batch.seq_lens[:bs],
            query_lens=None,
            out_cache_loc=batch.out_cache_loc,
        )
        self.attn_backends[0].writer.fill(phases, inputs)

    def _check_phase_order(self, batch: ForwardBatch, bucket: int | None) -> None:
        if self._round_plan is not None and not batch.forward_mode.is_idle():
            self._round_plan.check_phase_order(DRAFT, bucket)

    def _step_batch(self, batch: ForwardBatch, step: int) -> ForwardBatch:
        """The batch as one step sees it: its own write locations, out of the step-major ones."""
        steps, slots = len(self.attn_backends), batch.out_cache_loc
        if batch.forward_mode.is_idle():
            return batch
        if slots.shape[0] % steps:
            accepted = f"a multiple of {steps}, one location per step and request"
            raise ContractError(rejected("out_cache_loc rows", slots.shape[0], accepted))
        return batch.with_changes(out_cache_loc=slots.view(steps, -1)[step])


class TRTLLMHAAttnMultiStepDraftBackend(PagedMultiStepDraftBackend):
    """Multi-step draft of MHA models."""

    step_backend = TRTLLMHAAttnBackend


class TRTLLMMLAMultiStepDraftBackend(PagedMultiStepDraftBackend):
    """Multi-step draft of MLA models."""

    step_backend = TRTLLMMLABackend
