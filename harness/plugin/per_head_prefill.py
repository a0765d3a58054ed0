"""Prefill of MLA models over keys and values of each head, which sglang makes of the latents.

An absorbed forward compares 576 numbers per head and key and sums 512, this one 192 and 128.
sglang's ``AttnForwardMethod.MHA_CHUNKED_KV`` calls a backend for the new tokens, and then for every
chunk of the cached ones; it merges the answers by their log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from harness.attention.metadata import Metadata
from harness.kernels.packages import load

Attend = Callable[..., tuple[torch.Tensor, ...]]
"""Of sgl_kernel's ``flash_attn_varlen_func``: rows [T, heads, v_head_dim], their natural
log-sum-exps [heads, T], and what it accumulated in."""


class PerHeadPrefill:
    """Attention of a prefill's new tokens, or of a chunk of cached ones.

    Args:
        attend: the kernel.
    """

    def __init__(self, attend: Attend) -> None:
        self._attend = attend

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        planned: Metadata,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Rows [T, heads, v_head_dim]; where sglang merges them, with log-sum-exps [T, heads].

        Args:
            q: of the new tokens, [T, heads, qk_head_dim].
            k: of the same tokens or of a chunk, [n, heads, qk_head_dim].
            v: of those, [n, heads, v_head_dim].
            layer: sglang's, for its sizes and its softmax scale.
            forward_batch: sglang's; it tells which keys these are.
            planned: of this forward, for the lengths of its queries.
        """
        lengths, longest = planned.cu_seqlens_q, planned.geometry.max_q_len
        of_keys, longest_key = lengths, longest
        if forward_batch.attn_attend_prefix_cache:
            chunk = forward_batch.prefix_chunk_idx
            of_keys = forward_batch.prefix_chunk_cu_seq_lens[chunk]
            longest_key = forward_batch.prefix_chunk_max_seq_lens[chunk]
        heads = layer.tp_q_head_num
        out, log_sums, *_ = self._attend(
            q.view(-1, heads, layer.head_dim),
            k.view(-1, heads, layer.head_dim).to(q.dtype),
            v.view(-1, heads, layer.v_head_dim).to(q.dtype),
            cu_seqlens_q=lengths,
            cu_seqlens_k=of_keys,
            max_seqlen_q=longest,
            max_seqlen_k=longest_key,
            softmax_scale=layer.scaling,
            causal=not forward_batch.attn_attend_prefix_cache,
        )
        return (out, log_sums.T.contiguous()) if forward_batch.mha_return_lse else out


def per_head_prefill() -> PerHeadPrefill:
    """What a backend on FlashMLA prefills with.

    Raises:
        UsageError: sglang-kernel is missing.
    """
    kernels = load("sgl_kernel.flash_attn", "FlashAttention 3")
    return PerHeadPrefill(partial(kernels.flash_attn_varlen_func, return_softmax_lse=True))


def runs_per_head(attention: Any, forward_batch: Any) -> bool:
    """Whether this forward of a DeepSeek attention layer is a prefill that pays for it.

    Args:
        attention: sglang's ``DeepseekV2AttentionMLA``.
        forward_batch: sglang's.
    """
    if not forward_batch.forward_mode.is_extend_without_speculative():
        return False
    cached = sum(forward_batch.extend_prefix_lens_cpu or ())
    least = attention.chunked_prefix_cache_threshold
    return not cached or (cached >= least and not attention.disable_chunked_prefix_cache)
