"""The interface of an attention backend, after SGLang's, which ``golden/upstream`` records."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from harness.upstream.forward_batch_info import ForwardBatch, ForwardMode, SpecInput
from harness.upstream.radix_attention import RadixAttention


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

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None,
        forward_mode: ForwardMode,
        spec_info: SpecInput | None,
    ) -> None:
        """The pair of SGLang <= 0.5.12, in terms of the three phases."""
        batch = self._planning_batch(
            bs, num_tokens, req_pool_indices, seq_lens, forward_mode, spec_info
        )
        self.init_forward_metadata_out_graph(batch, in_capture=True)
        self.init_forward_metadata_in_graph(batch)

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_sum: int | None,
        encoder_lens: torch.Tensor | None,
        forward_mode: ForwardMode,
        spec_info: SpecInput | None,
        seq_lens_cpu: torch.Tensor | None,
    ) -> None:
        """The pair of SGLang <= 0.5.12, in terms of the three phases."""
        batch = self._planning_batch(bs, 0, req_pool_indices, seq_lens, forward_mode, spec_info)
        batch.seq_lens_sum, batch.seq_lens_cpu = seq_lens_sum, seq_lens_cpu
        self.init_forward_metadata_out_graph(batch)
        self.init_forward_metadata_in_graph(batch)

    def _planning_batch(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        forward_mode: ForwardMode,
        spec_info: SpecInput | None,
    ) -> ForwardBatch:
        raise NotImplementedError(f"{type(self).__name__} offers the three-phase contract only")

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """seq_lens of a padded row."""
        return 1

    def get_verify_buffers_to_fill_after_draft(self) -> Sequence[torch.Tensor | None]:
        """[custom mask, positions] that the tree builder writes in place; None where not needed."""
        return [None, None]

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
