"""Real KV pools of sglang over the memory of ours: what a backend writes, a trial sees."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch

from harness.sglang.process import load
from harness.upstream.memory_pool import KVPool, MHATokenToKVPool, MLATokenToKVPool, SWAKVPool


def alias_pool(pool: KVPool, device: torch.device | str) -> Any:
    """The pool of sglang whose buffers are those of ``pool``."""
    if isinstance(pool, SWAKVPool):
        return _swa_pool(pool, device)
    return (
        _mha_pool(pool, device) if isinstance(pool, MHATokenToKVPool) else _mla_pool(pool, device)
    )


def _sizes(pool: MHATokenToKVPool | MLATokenToKVPool, device: torch.device | str) -> dict[str, Any]:
    # sglang allocates one page more than its size: page 0, which belongs to padding.
    return {
        "size": (pool.num_pages - 1) * pool.page_size,
        "page_size": pool.page_size,
        "dtype": pool.dtype,
        "device": str(device),
        "enable_memory_saver": False,
    }


def _mha_pool(pool: MHATokenToKVPool, device: torch.device | str) -> Any:
    keys = pool.k_buffer[0]
    made = load("srt.mem_cache.memory_pool").MHATokenToKVPool(
        head_num=keys.shape[1],
        head_dim=keys.shape[2],
        layer_num=len(pool.k_buffer),
        enable_alt_stream=False,
        **_sizes(pool, device),
    )
    _alias(made, "k_buffer", pool.k_buffer)
    _alias(made, "v_buffer", pool.v_buffer)
    return made


def _mla_pool(pool: MLATokenToKVPool, device: torch.device | str) -> Any:
    columns = pool.kv_buffer[0].shape[1]
    made = load("srt.mem_cache.memory_pool").MLATokenToKVPool(
        kv_lora_rank=pool.kv_lora_rank,
        qk_rope_head_dim=columns - pool.kv_lora_rank,
        layer_num=len(pool.kv_buffer),
        **_sizes(pool, device),
    )
    _alias(made, "kv_buffer", [buffer[:, None] for buffer in pool.kv_buffer])
    return made


def _swa_pool(pool: SWAKVPool, device: torch.device | str) -> Any:
    keys, layers = pool.full_pool.k_buffer[0], pool.layers_mapping
    sizes = _sizes(pool.full_pool, device)
    swa_size = _sizes(pool.swa_pool, device)["size"]
    kind = load("srt.mem_cache.swa_memory_pool").SWAKVPool
    if "enable_kvcache_transpose" in signature(kind).parameters:  # 0.5.12 alone; for other devices
        sizes["enable_kvcache_transpose"] = False
    made = kind(
        size_swa=swa_size,
        head_num=keys.shape[1],
        head_dim=keys.shape[2],
        swa_attention_layer_ids=[i for i, layer in enumerate(layers) if layer.is_swa],
        full_attention_layer_ids=[i for i, layer in enumerate(layers) if not layer.is_swa],
        enable_alt_stream=False,
        **sizes,
    )
    for inner, own in ((made.full_kv_pool, pool.full_pool), (made.swa_kv_pool, pool.swa_pool)):
        _alias(inner, "k_buffer", own.k_buffer)
        _alias(inner, "v_buffer", own.v_buffer)
    made.register_mapping(pool.full_to_swa_index_mapping)
    return made


def _alias(made: Any, name: str, buffers: list[torch.Tensor]) -> None:
    """Put our memory in the place of what the pool allocated, which has the same layout."""
    allocated = getattr(made, name)
    for layer, buffer in enumerate(buffers):
        ours = buffer.view(allocated[layer].dtype)
        if ours.shape != allocated[layer].shape or ours.stride() != allocated[layer].stride():
            layouts = f"{tuple(ours.shape)} and {tuple(allocated[layer].shape)}"
            raise AssertionError(f"{type(made).__name__}.{name} is laid out otherwise: {layouts}")
        allocated[layer] = ours
