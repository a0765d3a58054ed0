"""Baselines: each undoes one optimization and must give the same answers."""

from __future__ import annotations

from typing import Any

import torch

from harness.attention.metadata import Metadata
from harness.attention.multi_step_draft import TRTLLMMLAMultiStepDraftBackend
from harness.attention.trtllm_mha import TRTLLMHAAttnBackend
from harness.attention.trtllm_mla import TRTLLMMLABackend
from harness.errors import CapacityError, ContractError, rejected
from harness.upstream.base_attn_backend import SharedReadEnds
from harness.upstream.forward_batch_info import (
    EagleDraftInput,
    ForwardBatch,
    ForwardMode,
    SpecInput,
)


class HostLengthsMLABackend(TRTLLMMLABackend):
    """Reads the longest length on the host before every forward, and plans graphs outside them."""

    needs_cpu_seq_lens = True
    shares_rounds = False

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._buckets: dict[tuple[ForwardMode, int], list[Metadata]] = {}

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Plan an eager forward, once the host knows its lengths."""
        self._check_longest(batch)
        super().init_forward_metadata(batch)

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Choose metadata and fill it, all on the host's time."""
        self._check_longest(batch)
        super().init_forward_metadata_out_graph(batch, in_capture)
        if self.forward_metadata is None:
            return
        held = self._buckets.setdefault((batch.forward_mode, batch.seq_lens.shape[0]), [])
        if in_capture:
            held.append(self.forward_metadata)
        # Which runner replays is not told: graphs of an earlier one read what was theirs.
        for metadata in held:
            self.forward_metadata = metadata
            super().init_forward_metadata_in_graph(batch)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Nothing is left to record."""
        return

    def shared_read_ends(self, fm: ForwardMode) -> SharedReadEnds:
        """Everything is read before a replay."""
        return SharedReadEnds.PRE_REPLAY

    def _check_longest(self, batch: ForwardBatch) -> None:
        # Under overlap the mirror is an upper bound, which can pass a batch but refuse none.
        for lengths in (batch.seq_lens_cpu, batch.seq_lens):
            if lengths is not None and max(lengths.tolist(), default=0) <= self.max_total_len:
                return
        told = f"<= {self.max_total_len} each"
        raise CapacityError(rejected("seq_lens", batch.seq_lens.tolist(), told))


class KVIndicesMLAMultiStepDraftBackend(TRTLLMMLAMultiStepDraftBackend):
    """Generates kv indices of every step in the parent, though paged steps read none of them."""

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Generate, then plan every step of an eager draft."""
        super().init_forward_metadata(self._with_kv_indices(batch))

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Generate, then fill every step's metadata."""
        super().init_forward_metadata_in_graph(self._with_kv_indices(batch))

    def _with_kv_indices(self, batch: ForwardBatch) -> ForwardBatch:
        """The batch with the slots of all keys of all steps, request after request."""
        spec, table = batch.spec_info, batch.req_to_token_pool.req_to_token
        if not isinstance(spec, EagleDraftInput) or not self.attn_backends:
            return batch
        columns = torch.arange(table.shape[1], device=table.device)
        bs, steps = batch.seq_lens.shape[0], len(self.attn_backends)
        kv_indptr = table.new_zeros(steps, bs + 1)
        # One entry more than any batch fills: what lies after a request's end is dropped there.
        kv_indices = table.new_zeros(steps, bs * table.shape[1] + 1)
        for step in range(steps):
            lengths = batch.seq_lens + step + 1
            kv_indptr[step, 1:].copy_(lengths.cumsum(0))
            place = kv_indptr[step, :-1, None] + columns
            inside = columns < lengths[:, None]
            last = torch.full_like(place, kv_indices.shape[1] - 1)
            slots = table[batch.req_pool_indices]
            kv_indices[step].scatter_(
                0, place.where(inside, last).flatten().long(), slots.flatten()
            )
        changed = EagleDraftInput(
            spec.topk_index, spec.topk_p, spec.hidden_states, spec.num_steps, kv_indptr, kv_indices
        )
        return batch.with_changes(spec_info=changed)


class ContextKernelMHABackend(TRTLLMHAAttnBackend):
    """Verifies and extends v2 on the context kernel, as prefill does."""

    decode_kernel_modes = frozenset({ForwardMode.DECODE})


class VerifyFixUpMHABackend(TRTLLMHAAttnBackend):
    """Fills verify metadata a second time once the draft tokens are known."""

    shares_rounds = False
    _verify_batch: ForwardBatch | None = None

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Plan an eager forward and remember it."""
        self._verify_batch = batch
        super().init_forward_metadata(batch)

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Choose metadata and remember for which batch."""
        self._verify_batch = batch
        super().init_forward_metadata_out_graph(batch, in_capture)

    def update_verify_buffers_to_fill_after_draft(
        self, spec_info: SpecInput, cuda_graph_bs: int | None
    ) -> None:
        """Fill the last planned verify again; an idle round has nothing to fill.

        Raises:
            ContractError: none is planned.
        """
        batch = self._verify_batch
        if batch is not None and batch.forward_mode.is_idle():
            return
        if batch is None or not batch.forward_mode.is_target_verify():
            planned = None if batch is None else batch.forward_mode.name
            raise ContractError(rejected("planned mode", planned, "TARGET_VERIFY before a fix-up"))
        self._fill(batch)
