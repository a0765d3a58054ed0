"""What both families share: planning, queries and scales as kernels want them, the older pair."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from harness.attention.planned_tmp import PlannedBackend
from harness.errors import ContractError, rejected
from harness.kernels.shape_checks import FP8
from harness.upstream.forward_batch_info import ForwardBatch, ForwardMode, SpecInput
from harness.upstream.memory_pool import quantize
from harness.upstream.radix_attention import RadixAttention


class PagedBackend(PlannedBackend):
    """Hands paged metadata, queries and scales to kernels; see ``PlannedBackend``."""

    def _kernel_query(self, q: torch.Tensor) -> torch.Tensor:
        """Contiguous, which a slice of a fused projection is not; FP8 where the kernel wants it."""
        if self._is_fp8 and self.provider.capability.casts_query_to_kv_dtype:
            q = quantize(q, 1.0, FP8)
        return q.contiguous()

    @property
    def _is_fp8(self) -> bool:
        return self.token_to_kv_pool.dtype == FP8

    def _kv_scales(self, layer: RadixAttention) -> tuple[float, float]:
        """Scales of cached keys and values; only an FP8 cache was written with any."""
        return (layer.k_scale, layer.v_scale) if self._is_fp8 else (1.0, 1.0)

    @staticmethod
    def _with_padding(out: torch.Tensor, rows: int) -> torch.Tensor:
        """[rows, heads * value dim]: the planned rows, and zeros behind them."""
        return pad(out.flatten(1), (0, 0, 0, rows - out.shape[0]))

    def _planning_batch(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        forward_mode: ForwardMode,
        spec_info: SpecInput | None,
    ) -> ForwardBatch:
        if self._swa_pool is not None:
            accepted = "any but an SWA pool: the older pair carries no write locations"
            raise ContractError(rejected("token_to_kv_pool", "SWAKVPool", accepted))
        rows = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
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
