"""A server's KV pools behind our interface: its memory and its writes, our quantisation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from harness.upstream.memory_pool import (
    LayerIndex,
    MHATokenToKVPool,
    MLATokenToKVPool,
    SWAKVPool,
    quantize,
)
from harness.upstream.radix_attention import RadixAttention


class ServedMHAPool(MHATokenToKVPool):
    """Keys and values in a server's ``MHATokenToKVPool``."""

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs
        self.page_size, self.dtype = theirs.page_size, theirs.dtype
        self.num_pages = theirs.size // theirs.page_size + 1  # page 0 is not counted in its size

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values by page: [num_pages, page_size, kv_heads, head_dim] each."""
        keys, values = self._theirs.get_kv_buffer(layer_id)
        pages = (-1, self.page_size)
        return keys.unflatten(0, pages), values.unflatten(0, pages)

    def set_kv_buffer(
        self, layer: RadixAttention, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Write k and v [T, kv_heads, head_dim] to slots loc [T] int64."""
        keys = quantize(k, layer.k_scale, self.dtype)
        values = quantize(v, layer.v_scale, self.dtype)
        self._theirs.set_kv_buffer(layer, loc, keys, values)


class ServedMLAPool(MLATokenToKVPool):
    """Latents in a server's ``MLATokenToKVPool``."""

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs
        self.page_size, self.dtype = theirs.page_size, theirs.dtype
        self.num_pages = theirs.size // theirs.page_size + 1
        self.kv_lora_rank = theirs.kv_lora_rank

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """The cache by page: [num_pages, page_size, kv_lora_rank + qk_rope_head_dim]."""
        buffer: torch.Tensor = self._theirs.get_key_buffer(layer_id)
        return buffer.view(-1, self.page_size, buffer.shape[-1])

    def set_mla_kv_buffer(
        self, layer: RadixAttention, loc: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor
    ) -> None:
        """Write latent [T, kv_lora_rank] and rotary key [T, qk_rope_head_dim] to loc [T] int64."""
        rows = (-1, 1)
        latent = quantize(k_nope.reshape(*rows, self.kv_lora_rank), layer.k_scale, self.dtype)
        rope = quantize(k_rope.reshape(*rows, k_rope.shape[-1]), layer.k_scale, self.dtype)
        self._theirs.set_mla_kv_buffer(layer, loc, latent, rope)


class ServedSWAPool(SWAKVPool):
    """Full and sliding-window layers in a server's ``SWAKVPool``."""

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs
        self.full_pool = ServedMHAPool(theirs.full_kv_pool)
        self.swa_pool = ServedMHAPool(theirs.swa_kv_pool)
        self.page_size, self.dtype = self.full_pool.page_size, self.full_pool.dtype
        self.num_pages = self.full_pool.num_pages
        self.layers_mapping = [
            LayerIndex(is_swa, index)
            for _, (index, is_swa) in sorted(theirs.layers_mapping.items())
        ]

    @property
    def full_to_swa_index_mapping(self) -> torch.Tensor:  # type: ignore[override]
        """[full slots], the SWA slot of a full slot; its allocator may exchange it."""
        mapping: torch.Tensor = self._theirs.full_to_swa_index_mapping
        return mapping

    def set_kv_buffer(
        self, layer: RadixAttention, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Write to ``loc``, which is in the index space of the pool that holds the layer."""
        own, pool = self.layers_mapping[layer.layer_id], self.pool_of(layer.layer_id)
        pool.set_kv_buffer(replace(layer, layer_id=own.index), loc, k, v)


def served_pool(theirs: Any) -> ServedMHAPool | ServedMLAPool | ServedSWAPool:
    """The pool of a model that is served."""
    if hasattr(theirs, "swa_kv_pool"):
        return ServedSWAPool(theirs)
    return ServedMLAPool(theirs) if hasattr(theirs, "kv_lora_rank") else ServedMHAPool(theirs)
