"""Hooks that older releases of SGLang call on a backend, in terms of the newest contract's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from harness.errors import ContractError, rejected
from harness.upstream.allocator import ReqToTokenPool
from harness.upstream.base_attn_backend import AttentionBackend
from harness.upstream.forward_batch_info import ForwardBatch, ForwardMode, SpecInput
from harness.upstream.memory_pool import KVPool, SWAKVPool
from harness.upstream.verify_mask import TreeMaskMode


@dataclass(frozen=True)
class OlderContracts:
    """A backend as older releases call it.

    Args:
        backend: the backend.
        req_to_token_pool: its request-to-token table.
        token_to_kv_pool: its KV pool.
    """

    backend: AttentionBackend
    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool: KVPool

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
        """Plan a capture (SGLang <= 0.5.12).

        Raises:
            ContractError: the pool is an SWA pool.
        """
        batch = self._batch(bs, num_tokens, req_pool_indices, seq_lens, forward_mode, spec_info)
        self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        self.backend.init_forward_metadata_in_graph(batch)

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
        """Plan a replay (SGLang <= 0.5.12); nothing of it is left for the graph to record.

        Raises:
            ContractError: the pool is an SWA pool.
        """
        batch = self._batch(bs, 0, req_pool_indices, seq_lens, forward_mode, spec_info)
        batch.seq_lens_sum = seq_lens_sum
        batch.seq_lens_cpu = None if seq_lens_cpu is None else seq_lens_cpu[:bs]
        self.backend.init_forward_metadata_out_graph(batch)
        self.backend.init_forward_metadata_in_graph(batch)

    def get_verify_buffers_to_fill_after_draft(self) -> Sequence[torch.Tensor | None]:
        """[custom mask, positions] that the tree builder writes in place (SGLang < 0.5.18).

        It is told no layout and writes a FULL_MASK. No backend here has a buffer of positions.

        Raises:
            ContractError: the mask is of another layout.
        """
        mask = self.backend.verify_mask
        if mask is not None and mask.mode is not TreeMaskMode.FULL_MASK:
            raise ContractError(rejected("verify_mask.mode", mask.mode.name, "FULL_MASK"))
        return [None if mask is None else mask.buffer, None]

    def _batch(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        forward_mode: ForwardMode,
        spec_info: SpecInput | None,
    ) -> ForwardBatch:
        if isinstance(self.token_to_kv_pool, SWAKVPool):
            accepted = "any but an SWA pool: the older pair carries no write locations"
            raise ContractError(rejected("token_to_kv_pool", "SWAKVPool", accepted))
        rows = torch.zeros(num_tokens, dtype=torch.int64, device=seq_lens.device)
        return ForwardBatch(
            forward_mode=forward_mode,
            batch_size=bs,
            input_ids=rows,
            positions=rows,
            req_pool_indices=req_pool_indices[:bs],
            seq_lens=seq_lens[:bs],
            out_cache_loc=rows,
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool=self.token_to_kv_pool,
            spec_info=spec_info,
        )
