"""Windowed layers live in a pool of their own, whose slots full slots are translated to."""

from __future__ import annotations

import pytest
import torch

from fixtures.toys.toy_attention import PAGE, mha_layer, mha_pool, swa_pool
from harness.errors import UsageError
from harness.upstream.memory_pool import MHATokenToKVPool, SWAKVPool


def hybrid(swa: MHATokenToKVPool) -> SWAKVPool:
    """Layer 0 full, layer 1 in the SWA pool; nothing is mapped yet."""
    swa_layers = frozenset({1})
    return SWAKVPool(full_pool=mha_pool(), swa_pool=swa, swa_layer_ids=swa_layers, num_layers=2)


def test_layers_of_a_hybrid_model_live_in_their_own_pool_under_their_own_index() -> None:
    pool = SWAKVPool(
        full_pool=mha_pool(layers=2),
        swa_pool=mha_pool(layers=2, num_pages=6),
        swa_layer_ids=frozenset({1, 2}),
        num_layers=4,
    )
    layers = [(layer.is_swa, layer.index) for layer in pool.layers_mapping]
    assert layers == [(False, 0), (True, 0), (True, 1), (False, 1)]
    k = torch.arange(1.0, 33.0).view(2, 2, 8)
    v, loc = -k, torch.tensor([21, 4])
    parts = {False: pool.full_pool, True: pool.swa_pool}
    for layer_id, layer in enumerate(pool.layers_mapping):
        before = {swa: [b.clone() for b in part.k_buffer] for swa, part in parts.items()}
        pool.set_kv_buffer(mha_layer(layer_id), loc, k + layer_id, v)
        before[layer.is_swa][layer.index][loc] = k + layer_id
        for swa, part in parts.items():
            assert all(map(torch.equal, part.k_buffer, before[swa]))
        keys, values = pool.get_kv_buffer(layer_id)
        own = parts[layer.is_swa]
        assert keys.data_ptr() == own.k_buffer[layer.index].data_ptr()
        assert torch.equal(values[5, 1], v[0])
        assert values.data_ptr() == own.v_buffer[layer.index].data_ptr()
    assert (pool.page_size, pool.num_pages, pool.dtype) == (PAGE, 18, torch.float32)


def test_each_part_of_a_hybrid_pool_quantizes_by_its_own_dtype() -> None:
    pool = SWAKVPool(
        full_pool=mha_pool(),
        swa_pool=mha_pool(dtype=torch.float8_e4m3fn),
        swa_layer_ids=frozenset({1}),
        num_layers=2,
    )
    k, loc = torch.full((1, 2, 8), 6.0), torch.tensor([9])
    for layer_id, wanted in ((0, (6.0, 6.0)), (1, (12.0, 3.0))):
        pool.set_kv_buffer(mha_layer(layer_id, k_scale=0.5, v_scale=2.0), loc, k, k)
        stored = tuple(part.float()[2, 1].unique().item() for part in pool.get_kv_buffer(layer_id))
        assert stored == wanted


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_full_slots_translate_to_swa_slots_of_another_page(dtype: torch.dtype) -> None:
    # Page p lives in (5 p) mod 17: slot 7 * 4 + 2 in page 1, slot 2 * 4 + 3 in page 10.
    translated = swa_pool().translate_loc_from_full_to_swa(torch.tensor([30, 11, 0], dtype=dtype))
    assert translated.dtype == torch.int64
    assert translated.tolist() == [1 * 4 + 2, 10 * 4 + 3, 0]


def test_a_fresh_hybrid_pool_maps_everything_to_padding() -> None:
    fresh = hybrid(mha_pool(num_pages=6))
    mapping = fresh.full_to_swa_index_mapping
    rule = "every full slot has an entry, however few slots the SWA pool has"
    assert (mapping.dtype, mapping.shape) == (torch.int64, (18 * PAGE,)), rule
    assert not mapping.any()


def test_both_parts_of_a_hybrid_pool_share_a_page_size() -> None:
    other = MHATokenToKVPool(
        num_pages=4, page_size=8, num_layers=1, num_kv_heads=2, head_dim=8, dtype=torch.float32
    )
    with pytest.raises(UsageError, match=r"swa page_size = 8 .* 4, the full pool's"):
        hybrid(other)
