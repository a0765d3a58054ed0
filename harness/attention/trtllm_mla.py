"""The absorbed MLA backend; none of its metadata comes from the host."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from harness.attention.metadata import Metadata
from harness.attention.paged_backend import PagedBackend
from harness.errors import ContractError, rejected
from harness.kernels.interface import ContextCall, DecodeCall
from harness.upstream.forward_batch_info import ForwardBatch, ForwardMode
from harness.upstream.memory_pool import MLATokenToKVPool
from harness.upstream.radix_attention import RadixAttention
from harness.upstream.verify_mask import TreeMaskMode, VerifyMask, tree_mask_numel


class TRTLLMMLABackend(PagedBackend):
    """Every phase but plain prefill on the decode kernel.

    draft_extend v1 is ragged and that kernel is uniform: its queries are padded to the longest by
    index tensors, and its lengths grow by the same amount, which keeps each row's causal limit.

    Attributes:
        cuda_graph_custom_mask: flat bool FULL_MASK of the largest verify, written in place by the
            tree builder; None until ``init_cuda_graph_state``, and where nothing is verified.
    """

    padded_modes = frozenset({ForwardMode.DRAFT_EXTEND})
    cuda_graph_custom_mask: torch.Tensor | None = None

    @property
    def _verifies(self) -> bool:
        return bool(self.num_draft_tokens) and not self.skip_prefill

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate metadata buffers, and the custom mask where this backend verifies."""
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        entries = max_num_tokens * (self.max_context_len + self.num_draft_tokens)
        mask = self.cuda_graph_custom_mask
        if self._verifies and (mask is None or mask.numel() < entries):
            self.cuda_graph_custom_mask = torch.zeros(entries, dtype=torch.bool, device=self.device)

    @property
    def verify_mask(self) -> VerifyMask | None:
        """``cuda_graph_custom_mask`` as a FULL_MASK of as many requests as it holds."""
        buffer = self.cuda_graph_custom_mask
        if buffer is None:
            return None
        mode = TreeMaskMode.FULL_MASK
        per_request = tree_mask_numel(mode, 1, self.num_draft_tokens, self.max_context_len)
        return VerifyMask(buffer, mode, max_bs=buffer.numel() // per_request)

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
        """Attention of every planned query row; rows of padding after them come out zero."""
        metadata, pool = self.planned(batch), self.token_to_kv_pool
        assert isinstance(pool, MLATokenToKVPool)
        _check_layer(layer)
        for name in ("q_rope", "k_rope"):
            if kwargs.get(name) is None:
                raise ContractError(rejected(name, None, "the rotary part, beside the latent"))
        tokens = metadata.geometry.num_tokens
        if save_kv_cache:
            loc, k_rope = batch.out_cache_loc[:tokens], kwargs["k_rope"]
            pool.set_mla_kv_buffer(layer, loc, k[:tokens], k_rope[:tokens])
        heads = (-1, layer.tp_q_head_num)
        latent = q.reshape(*heads, layer.v_head_dim)
        rotary = kwargs["q_rope"].reshape(*heads, layer.head_dim - layer.v_head_dim)
        rows = torch.cat((latent[:tokens], rotary[:tokens]), -1)
        out = self._attend(self._kernel_query(rows, layer), q.dtype, layer, metadata)
        return self._with_padding(out, latent.shape[0])

    forward_decode = forward_extend

    def _attend(
        self,
        q: torch.Tensor,
        out_dtype: torch.dtype,
        layer: RadixAttention,
        metadata: Metadata,
    ) -> torch.Tensor:
        pool, geometry = self.token_to_kv_pool, metadata.geometry
        assert isinstance(pool, MLATokenToKVPool)
        # The value is a part of the cached key, so it carries the key's scale.
        k_scale, _ = self._kv_scales(layer)
        common: dict[str, Any] = {
            "caches": (pool.get_key_buffer(layer.layer_id),),
            "kv_lora_rank": pool.kv_lora_rank,
            "block_tables": metadata.page_table,
            "seq_lens": metadata.cache_seqlens_int32,
            "max_seq_len": self.max_total_len,
            "bmm1_scale": k_scale * layer.scaling,
            "bmm2_scale": k_scale,
            "out_dtype": out_dtype,
        }
        if geometry.forward_mode.is_extend():
            return self.kernel.mla_context(
                ContextCall(
                    q=q,
                    cu_seqlens_q=metadata.cu_seqlens_q,
                    cu_seqlens_k=metadata.cu_seqlens_k,
                    max_q_len=geometry.max_q_len,
                    forward=self._eager_forward,
                    **common,
                )
            )
        rows = q[metadata.pad_rows] if geometry.pads_queries else q
        out = self.kernel.mla_decode(
            DecodeCall(q=rows, q_len_per_req=geometry.max_q_len, forward=self._forward, **common)
        )
        if not geometry.pads_queries:
            return out
        return pad(out, (0, 0, 0, 0, 0, 1))[metadata.unpad_rows]


def _check_layer(layer: RadixAttention) -> None:
    """Refuse what no MLA kernel computes, rather than leave it out."""
    if layer.sliding_window_size >= 0:
        accepted = "-1: every key is seen"
        raise ContractError(rejected("sliding_window_size", layer.sliding_window_size, accepted))
    if layer.sinks is not None:
        raise ContractError(rejected("sinks", "a tensor", "None: an MLA kernel takes none"))
