"""The interface of an attention backend, after SGLang 0.5.23's, which ``golden/upstream`` records.

Hooks that older releases call instead are in ``older_contracts``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch

from harness.upstream.forward_batch_info import ForwardBatch, ForwardMode, SpecInput
from harness.upstream.radix_attention import RadixAttention
from harness.upstream.verify_mask import VerifyMask


class SharedReadEnds(Enum):
    """When a forward has read what the scheduler writes: request-to-token table and SWA mapping.

    The scheduler may write the next batch's entries from then on, while the forward still runs.

    PRE_REPLAY: after ``init_forward_metadata_out_graph``. IN_REPLAY: after
    ``init_forward_metadata_in_graph``. POST_REPLAY: with the replay. UNKNOWN: nobody has looked, so
    whoever writes waits for the whole forward.
    """

    PRE_REPLAY = 1
    IN_REPLAY = 2
    POST_REPLAY = 3
    UNKNOWN = 4


class AttentionBackend(ABC):
    """A backend plans metadata once per forward and then serves every layer of it.

    Metadata has three entries. ``init_forward_metadata`` is the eager one and runs the other two.
    ``init_forward_metadata_out_graph`` runs on the host before capture and before every replay.
    ``init_forward_metadata_in_graph`` is recorded: fixed shapes, no host sync, no data-dependent
    allocation.
    """

    needs_cpu_seq_lens: bool = True
    forward_metadata: Any

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Plan an eager forward."""
        self.init_forward_metadata_out_graph(batch)
        self.init_forward_metadata_in_graph(batch)

    @abstractmethod
    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Host side of planning: pick or allocate the metadata this forward uses."""

    @abstractmethod
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Device side of planning: fill that metadata in place; recordable."""

    @abstractmethod
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate every buffer a captured graph of up to max_bs requests will read."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """seq_lens of a padded row."""
        return 1

    def shared_read_ends(self, fm: ForwardMode) -> SharedReadEnds:
        """When a replay of a mode has read what the scheduler writes; UNKNOWN unless audited."""
        if fm.is_decode() or fm.is_target_verify():
            return SharedReadEnds.IN_REPLAY
        return SharedReadEnds.UNKNOWN

    def resolve_prefill_shared_read_ends(
        self, batch: ForwardBatch, *, num_qo_tokens: int, build_snapshot: bool = True
    ) -> SharedReadEnds:
        """When an eager prefill that is planned has read what the scheduler writes.

        Args:
            batch: the planned prefill; any other mode is UNKNOWN.
            num_qo_tokens: its query tokens.
            build_snapshot: whether what would be read late may be copied now.
        """
        if not batch.forward_mode.is_extend():
            return SharedReadEnds.UNKNOWN
        if build_snapshot:
            return self._snapshot_prefill_shared_reads(batch, num_qo_tokens=num_qo_tokens)
        return self.shared_read_ends(batch.forward_mode)

    def _snapshot_prefill_shared_reads(
        self, batch: ForwardBatch, *, num_qo_tokens: int
    ) -> SharedReadEnds:
        """Copy what a prefill would read late, if anything; then, when its reads end."""
        return self.shared_read_ends(batch.forward_mode)

    @property
    def verify_mask(self) -> VerifyMask | None:
        """The mask that the tree builder writes in place after a draft, by default none."""
        return None

    def update_verify_buffers_to_fill_after_draft(
        self, spec_info: SpecInput, cuda_graph_bs: int | None
    ) -> None:
        """Redo whatever verify metadata depends on draft tokens; nothing does by default."""
        return

    def on_after_cuda_graph_warmup(self) -> None:
        """Undo what the warm-up before a capture changed; nothing by default."""
        return

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention of one layer: [T, heads * v_head_dim] in the query's dtype.

        Args:
            q: [T, heads, head_dim]; MLA: the absorbed part [T, heads, kv_lora_rank], with
                ``q_rope=`` [T, heads, qk_rope_head_dim] beside it.
            k: [T, kv_heads, head_dim]; MLA: the latent [T, 1, kv_lora_rank], with ``k_rope=``
                [T, 1, qk_rope_head_dim] beside it.
            v: [T, kv_heads, v_head_dim]; MLA: the latent again.
            layer: the layer.
            batch: the batch that was planned.
            save_kv_cache: whether k and v are written to out_cache_loc first.
            **kwargs: q_rope and k_rope (MLA).
        """
        if batch.forward_mode.is_idle():
            return q.new_zeros(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        serve = self.forward_decode if batch.forward_mode.is_decode() else self.forward_extend
        return serve(q, k, v, layer, batch, save_kv_cache=save_kv_cache, **kwargs)

    @abstractmethod
    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """One query per request."""

    @abstractmethod
    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Several queries per request: prefill, verify and both draft extends."""


class MultiStepDraftBackend(ABC):
    """One backend per draft step, planned together.

    Attributes:
        attn_backends: speculative_num_steps - 1 backends; step i sees seq_lens + i + 1 keys.
    """

    needs_cpu_seq_lens: bool = True
    attn_backends: Sequence[AttentionBackend]
    speculative_num_steps: int
    topk: int

    @abstractmethod
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Plan every step of an eager draft."""

    @abstractmethod
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what captured drafts of up to max_bs requests will read."""

    @abstractmethod
    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Host side of planning every step."""

    @abstractmethod
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Device side of planning every step; recordable."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """seq_lens of a padded row."""
        return self.attn_backends[0].get_cuda_graph_seq_len_fill_value()

    def on_after_cuda_graph_warmup(self) -> None:
        """Undo what the warm-up before a capture changed, in every step."""
        for backend in self.attn_backends:
            backend.on_after_cuda_graph_warmup()


def decide_needs_cpu_seq_lens(
    backends: Sequence[AttentionBackend | MultiStepDraftBackend],
) -> bool:
    """Whether a worker must copy seq_lens to the host: as soon as one of its backends reads it."""
    return any(backend.needs_cpu_seq_lens for backend in backends)
