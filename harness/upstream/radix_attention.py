"""One attention layer as a backend sees it, after SGLang's ``radix_attention.py``."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RadixAttention:
    """One attention layer of a model.

    Args:
        layer_id: index into the KV pool.
        tp_q_head_num: query heads on this rank.
        tp_k_head_num: KV heads on this rank; 1 for MLA.
        head_dim: query/key size per head; for absorbed MLA kv_lora_rank + qk_rope_head_dim.
        v_head_dim: value size per head; for absorbed MLA kv_lora_rank.
        scaling: softmax scale.
        sliding_window_size: keys seen to the left besides the query itself, -1 for all.
        k_scale: per-tensor scale of cached keys.
        v_scale: per-tensor scale of cached values.
        sinks: [tp_q_head_num] float32 attention sinks, or None.
    """

    layer_id: int
    tp_q_head_num: int
    tp_k_head_num: int
    head_dim: int
    v_head_dim: int
    scaling: float
    sliding_window_size: int = -1
    k_scale: float = 1.0
    v_scale: float = 1.0
    sinks: torch.Tensor | None = None
