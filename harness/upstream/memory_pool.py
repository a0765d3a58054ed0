"""KV pools: pages for MHA, for MLA and for layers with a window."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harness.errors import UsageError, rejected
from harness.upstream.radix_attention import RadixAttention


def quantize(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """The cache's values: ``x / scale``, saturated, where FP8 is made of a wider dtype."""
    if dtype == x.dtype:
        return x
    if dtype == torch.float8_e4m3fn:
        limit = torch.finfo(dtype).max
        return (x.float() / scale).clamp(-limit, limit).to(dtype)
    return x.to(dtype)


class MHATokenToKVPool:
    """Keys and values of every layer.

    Attributes:
        k_buffer, v_buffer: a layer each, [num_pages * page_size, kv_heads, head_dim].
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.dtype = dtype
        slots = num_pages * page_size

        def layers(dim: int) -> list[torch.Tensor]:
            shape = (slots, num_kv_heads, dim)
            return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]

        self.k_buffer = layers(head_dim)
        self.v_buffer = layers(v_head_dim or head_dim)

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values by page: [num_pages, page_size, kv_heads, head_dim] each."""
        return (
            self.k_buffer[layer_id].unflatten(0, (self.num_pages, self.page_size)),
            self.v_buffer[layer_id].unflatten(0, (self.num_pages, self.page_size)),
        )

    def set_kv_buffer(
        self, layer: RadixAttention, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Write k and v [T, kv_heads, head_dim] to slots loc [T] int64."""
        self.k_buffer[layer.layer_id][loc] = quantize(k, layer.k_scale, self.dtype)
        self.v_buffer[layer.layer_id][loc] = quantize(v, layer.v_scale, self.dtype)


class MLATokenToKVPool:
    """The latent and the rotary key of every layer, side by side.

    Attributes:
        kv_buffer: a layer each, [num_pages * page_size, kv_lora_rank + qk_rope_head_dim].
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_layers: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.kv_lora_rank = kv_lora_rank
        self.dtype = dtype
        shape = (num_pages * page_size, kv_lora_rank + qk_rope_head_dim)
        self.kv_buffer = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """The cache by page: [num_pages, page_size, kv_lora_rank + qk_rope_head_dim]."""
        buffer = self.kv_buffer[layer_id]
        return buffer.view(self.num_pages, self.page_size, buffer.shape[1])

    def set_mla_kv_buffer(
        self, layer: RadixAttention, loc: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor
    ) -> None:
        """Write latent [T, kv_lora_rank] and rotary key [T, qk_rope_head_dim] to loc [T] int64."""
        row = torch.cat((k_nope.flatten(1), k_rope.flatten(1)), dim=-1)
        self.kv_buffer[layer.layer_id][loc] = quantize(row, layer.k_scale, self.dtype)


@dataclass(frozen=True)
class LayerIndex:
    """The pool of a layer of a hybrid model, and its index there."""

    is_swa: bool
    index: int


class SWAKVPool:
    """Full layers in one pool, sliding-window layers in a smaller one with its own slots.

    Attributes:
        full_to_swa_index_mapping: [full slots] int64, the SWA slot of a full slot; the scheduler
            owns it and may rewrite it as soon as a forward has read it.
    """

    def __init__(
        self,
        *,
        full_pool: MHATokenToKVPool,
        swa_pool: MHATokenToKVPool,
        swa_layer_ids: frozenset[int],
        num_layers: int,
    ) -> None:
        if full_pool.page_size != swa_pool.page_size:
            raise UsageError(
                rejected(
                    "swa page_size", swa_pool.page_size, f"{full_pool.page_size}, the full pool's"
                )
            )
        self.full_pool = full_pool
        self.swa_pool = swa_pool
        self.page_size = full_pool.page_size
        self.num_pages = full_pool.num_pages
        self.dtype = full_pool.dtype
        self.layers_mapping: list[LayerIndex] = []
        counts = {False: 0, True: 0}
        for layer_id in range(num_layers):
            is_swa = layer_id in swa_layer_ids
            self.layers_mapping.append(LayerIndex(is_swa, counts[is_swa]))
            counts[is_swa] += 1
        self.full_to_swa_index_mapping = torch.zeros(
            full_pool.num_pages * full_pool.page_size,
            dtype=torch.int64,
            device=full_pool.k_buffer[0].device,
        )

    def translate_loc_from_full_to_swa(self, loc: torch.Tensor) -> torch.Tensor:
        """SWA slots (int64) of full slots (any integer dtype)."""
        return self.full_to_swa_index_mapping[loc.long()]

    def pool_of(self, layer_id: int) -> MHATokenToKVPool:
        """The pool that holds the layer."""
        return self.swa_pool if self.layers_mapping[layer_id].is_swa else self.full_pool

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the layer by page, from whichever pool holds it."""
        return self.pool_of(layer_id).get_kv_buffer(self.layers_mapping[layer_id].index)

    def set_kv_buffer(
        self,
        layer: RadixAttention,
        loc: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        """Write to ``loc``, which is in the index space of the pool that holds the layer."""
        own, pool = self.layers_mapping[layer.layer_id], self.pool_of(layer.layer_id)
        pool.k_buffer[own.index][loc] = quantize(k, layer.k_scale, pool.dtype)
        pool.v_buffer[own.index][loc] = quantize(v, layer.v_scale, pool.dtype)


KVPool = MHATokenToKVPool | MLATokenToKVPool | SWAKVPool
