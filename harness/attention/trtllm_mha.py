"""The MHA and GQA backend; verify and draft_extend_v2 run on the decode kernel."""

from __future__ import annotations

from typing import Any

import torch

from harness.attention.metadata import Metadata
from harness.attention.paged_backend import PagedBackend
from harness.kernels.interface import ContextCall, DecodeCall
from harness.upstream.forward_batch_info import ForwardBatch, ForwardMode
from harness.upstream.memory_pool import MLATokenToKVPool
from harness.upstream.radix_attention import RadixAttention


class TRTLLMHAAttnBackend(PagedBackend):
    """Uniform phases on the multi-query decode kernel, ragged ones on the context kernel.

    Verify metadata never depends on draft tokens, so the base class's hook after drafting, which
    does nothing, is right.
    """

    decode_kernel_modes = frozenset(
        {ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2}
    )

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
        metadata = self.planned(batch)
        if save_kv_cache:
            self._write(k, v, layer, batch, metadata)
        tokens = metadata.geometry.num_tokens
        rows = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
        out = self._attend(self._kernel_query(rows[:tokens], layer), q.dtype, layer, metadata)
        return self._with_padding(out, rows.shape[0])

    forward_decode = forward_extend

    def _write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        batch: ForwardBatch,
        metadata: Metadata,
    ) -> None:
        pool, tokens = self.token_to_kv_pool, metadata.geometry.num_tokens
        assert not isinstance(pool, MLATokenToKVPool)
        loc = batch.out_cache_loc[:tokens]
        if self._is_swa(layer) and metadata.swa_out_cache_loc is not None:
            loc = metadata.swa_out_cache_loc
        keys = k.reshape(-1, layer.tp_k_head_num, layer.head_dim)[:tokens]
        values = v.reshape(-1, layer.tp_k_head_num, layer.v_head_dim)[:tokens]
        pool.set_kv_buffer(layer, loc, keys, values)

    def _attend(
        self,
        q: torch.Tensor,
        out_dtype: torch.dtype,
        layer: RadixAttention,
        metadata: Metadata,
    ) -> torch.Tensor:
        pool, geometry = self.token_to_kv_pool, metadata.geometry
        assert not isinstance(pool, MLATokenToKVPool)
        k_scale, v_scale = self._kv_scales(layer)
        table = metadata.swa_page_table if self._is_swa(layer) else metadata.page_table
        common: dict[str, Any] = {
            "q": q,
            "caches": pool.get_kv_buffer(layer.layer_id),
            "block_tables": table,
            "seq_lens": metadata.cache_seqlens_int32,
            "max_seq_len": self.max_total_len,
            "bmm1_scale": k_scale * layer.scaling,
            "bmm2_scale": v_scale,
            "out_dtype": out_dtype,
            "window_left": layer.sliding_window_size,
            "sinks": layer.sinks,
        }
        if geometry.forward_mode in self.decode_kernel_modes:
            return self.kernel.decode(
                DecodeCall(
                    q_len_per_req=geometry.max_q_len,
                    packed_mask=metadata.packed_mask,
                    forward=self._forward,
                    **common,
                )
            )
        return self.kernel.context(
            ContextCall(
                cu_seqlens_q=metadata.cu_seqlens_q,
                cu_seqlens_k=metadata.cu_seqlens_k,
                max_q_len=geometry.max_q_len,
                forward=self._eager_forward,
                **common,
            )
        )

    def _is_swa(self, layer: RadixAttention) -> bool:
        return self._swa_pool is not None and self._swa_pool.layers_mapping[layer.layer_id].is_swa
