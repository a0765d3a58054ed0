"""Multi-step draft backends: one backend a step, planned directly, with no work in the parent."""

from __future__ import annotations

from typing import Any

from harness.backends.base import PagedBackend
from harness.backends.mha import TRTLLMHAAttnBackend
from harness.backends.mla import TRTLLMMLABackend
from harness.errors import ContractError, UsageError, rejected
from harness.upstream.batch import ForwardBatch
from harness.upstream.interface import MultiStepDraftBackend


class PagedMultiStepDraftBackend(MultiStepDraftBackend):
    """Plans ``speculative_num_steps - 1`` step backends from one draft batch.

    Args:
        topk: drafts a step; 1, because the kernels see a chain and no tree.
        speculative_num_steps: steps of a round.
        **arguments: of every step's backend; see ``PagedBackend``.

    Raises:
        UsageError: topk or speculative_num_steps is out of range.
    """

    needs_cpu_seq_lens = False
    step_backend: type[PagedBackend]
    attn_backends: list[PagedBackend]

    def __init__(self, *, speculative_num_steps: int, topk: int = 1, **arguments: Any) -> None:
        if topk != 1:
            raise UsageError(rejected("topk", topk, "1: these kernels draft a chain"))
        if speculative_num_steps < 1:
            raise UsageError(rejected("speculative_num_steps", speculative_num_steps, ">= 1"))
        self.topk = topk
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

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate every step's buffers."""
        for backend in self.attn_backends:
            backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Choose every step's metadata."""
        for step, backend in enumerate(self.attn_backends):
            backend.init_forward_metadata_out_graph(self._step_batch(batch, step), in_capture)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Fill every step's metadata."""
        for step, backend in enumerate(self.attn_backends):
            backend.init_forward_metadata_in_graph(self._step_batch(batch, step))

    def _step_batch(self, batch: ForwardBatch, step: int) -> ForwardBatch:
        """The batch as one step sees it: its own write locations, out of the step-major ones."""
        steps, slots = len(self.attn_backends), batch.out_cache_loc
        if batch.forward_mode.is_idle():
            return batch
        if slots.shape[0] % steps:
            accepted = f"a multiple of {steps}, one location a step and request"
            raise ContractError(rejected("out_cache_loc rows", slots.shape[0], accepted))
        return batch.with_changes(out_cache_loc=slots.view(steps, -1)[step])


class TRTLLMHAAttnMultiStepDraftBackend(PagedMultiStepDraftBackend):
    """Multi-step draft of MHA models."""

    step_backend = TRTLLMHAAttnBackend


class TRTLLMMLAMultiStepDraftBackend(PagedMultiStepDraftBackend):
    """Multi-step draft of MLA models."""

    step_backend = TRTLLMMLABackend
