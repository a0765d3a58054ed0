"""A slot belongs to one token: tables, pages and pools keep, quantize and translate it exactly."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from fixtures.drivers.fp8_casts import CastsToFP8
from fixtures.toys.toy_attention import PAGE, mha_layer, mha_pool, mla_layer
from harness.errors import CapacityError, ContractError
from harness.upstream.allocator import PADDING_ROW, PADDING_SLOT, PagedAllocator, ReqToTokenPool
from harness.upstream.memory_pool import MHATokenToKVPool, MLATokenToKVPool, quantize
from harness.upstream.radix_attention import RadixAttention

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("pool", "first", "free", "what"),
    [
        (ReqToTokenPool(3, 8), [1, 2], "available", "request"),
        (PagedAllocator(4, PAGE), [1, 2], "available_pages", "page"),
    ],
    ids=["rows", "pages"],
)
def test_what_is_allocated_is_nobody_elses_until_it_is_freed(
    pool: Any, first: list[int], free: str, what: str
) -> None:
    assert getattr(pool, free) == 3, f"all {what}s but the padding's are free at first"
    taken = pool.alloc(2)
    assert taken == first, f"{what}s are handed out from 1 on, 0 being the padding's: {taken}"
    assert getattr(pool, free) == 1, f"a {what} that is allocated is no longer free"
    with pytest.raises(CapacityError, match=rf"{what}s = 2 .* at most 1 free"):
        pool.alloc(2)
    assert getattr(pool, free) == 1, f"an alloc of {what}s that is refused takes none"
    last = first[1] + 1
    taken = pool.alloc(1)
    assert taken == [last], f"no {what} is handed out twice: {last} was free, not {taken}"
    assert pool.alloc(0) == [], f"an alloc of no {what} gives none"
    pool.free(first[:1])
    taken = pool.alloc(1)
    assert taken == first[:1], f"a {what} that was freed, {first[0]}, is handed out again: {taken}"
    pool.free([first[1], first[0]])
    refused = [
        ([first[1]], rf"{what} .*{first[1]} freed twice"),
        ([last, last], rf"{what} .*{last} freed twice"),
        ([last, -1], rf"{what}.* freed = -1 .* 1 to 3"),
        ([last, 4], rf"{what}.* freed = 4 .* 1 to 3"),
    ]
    for given, said in refused:
        told = "nothing"
        try:
            pool.free(given)
        except ContractError as error:
            told = str(error)
        rule = f"free refuses a {what} that is free already, given twice or not one of 1 to 3"
        assert re.search(said, told), f"{rule}: free({given}) told {told}"
        count = getattr(pool, free)
        rule = f"a call that is refused frees nothing: after free({given}) of {what}s"
        assert count == 2, f"{rule} 2 are free, not {count}"
    pool.free([last])


def test_the_padding_page_is_never_allocated_nor_freed() -> None:
    pages = PagedAllocator(5, PAGE)
    assert PADDING_SLOT not in pages.alloc(4)
    with pytest.raises(ContractError, match="padding page freed"):
        pages.free([PADDING_SLOT])
    assert (pages.num_pages, pages.page_size, pages.available_pages) == (5, PAGE, 0)


def test_a_request_table_starts_on_the_padding_slot() -> None:
    table = ReqToTokenPool(3, 8)
    assert (table.req_to_token.dtype, table.req_to_token.shape) == (torch.int32, (4, 8))
    assert not table.req_to_token.any()


def test_the_padding_row_is_never_allocated_nor_freed() -> None:
    table = ReqToTokenPool(3, 8)
    table.free(table.alloc(3))
    assert table.available == 3, "rows that are freed can be allocated again"
    assert PADDING_ROW not in table.alloc(3)
    with pytest.raises(ContractError, match="padding request row freed"):
        table.free([PADDING_ROW])
    assert table.available == 0


# e4m3 holds steps of 2 between 16 and 32 and ends at 448; ties go to even.
VALUES = [0.0, 3.0, 8.5, 9.5, -1000.0, 447.0]
STORED = (
    (1.0, FP8, [0.0, 3.0, 8.0, 10.0, -448.0, 448.0]),
    (0.5, FP8, [0.0, 6.0, 16.0, 20.0, -448.0, 448.0]),
    (4.0, FP8, [0.0, 0.75, 2.0, 2.5, -256.0, 112.0]),
    (0.5, torch.float32, VALUES),
    (0.5, torch.bfloat16, [0.0, 3.0, 8.5, 9.5, -1000.0, 448.0]),
)


@pytest.mark.parametrize(("scale", "dtype", "wanted"), STORED, ids=str)
def test_only_an_fp8_cache_scales_and_saturates(
    scale: float, dtype: torch.dtype, wanted: list[float]
) -> None:
    stored = quantize(torch.tensor(VALUES), scale, dtype)
    assert stored.dtype == dtype
    assert stored.float().tolist() == wanted


def test_what_is_fp8_already_is_stored_as_it_is() -> None:
    given = torch.tensor([8.0, -448.0]).to(FP8)
    assert quantize(given, 0.5, FP8).float().tolist() == [8.0, -448.0], "it was scaled before"


@pytest.mark.parametrize("value", [1e4, -1e4])
def test_no_value_beyond_an_fp8_caches_is_left_to_the_cast(value: float) -> None:
    casts = CastsToFP8()
    with casts:
        quantize(torch.tensor([1.0, value]), 0.5, FP8)
    told = f"values saturate at ±448 before they are cast to FP8, not at {casts.largest}"
    assert casts.largest == torch.finfo(FP8).max, told


def kv(count: int, heads: int = 2, dim: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys count up, values count down, so that no two rows are alike."""
    rows = torch.arange(1.0, count * heads * dim + 1).view(count, heads, dim) / 8
    return rows, -rows.flip(0)


@pytest.mark.parametrize("layer_id", [0, 1])
def test_mha_writes_keys_and_values_of_one_layer_to_their_slots_alone(layer_id: int) -> None:
    pool = mha_pool(layers=2)
    before = [buffer.clone() for buffer in (*pool.k_buffer, *pool.v_buffer)]
    (k, v), loc = kv(3), torch.tensor([30, 5, 18])
    pool.set_kv_buffer(mha_layer(layer_id, k_scale=0.5, v_scale=3.0), loc, k, v)
    before[layer_id][loc], before[2 + layer_id][loc] = k, v
    for buffer, wanted in zip((*pool.k_buffer, *pool.v_buffer), before, strict=True):
        assert torch.equal(buffer, wanted)
    keys, values = pool.get_kv_buffer(layer_id)
    assert keys.shape == values.shape == (pool.num_pages, PAGE, 2, 8)
    # Slot 30 is the third of page 7; the pages are the buffer, not a copy.
    assert torch.equal(keys[7, 2], k[0])
    assert torch.equal(values[7, 2], v[0])
    assert keys.data_ptr() == pool.k_buffer[layer_id].data_ptr()


def test_keys_and_values_have_their_own_scales_and_sizes() -> None:
    sizes = {"num_pages": 3, "page_size": PAGE, "num_layers": 1, "num_kv_heads": 2}
    pool = MHATokenToKVPool(**sizes, head_dim=8, v_head_dim=4, dtype=FP8)
    (k, v), loc = (torch.full((2, 2, 8), 6.0), torch.full((2, 2, 4), 6.0)), torch.tensor([9, 4])
    pool.set_kv_buffer(RadixAttention(0, 4, 2, 8, 4, 0.4, k_scale=0.5, v_scale=2.0), loc, k, v)
    assert pool.k_buffer[0][loc].float().unique().tolist() == [12.0]
    assert pool.v_buffer[0][loc].float().unique().tolist() == [3.0]
    assert [buffer.shape for buffer in pool.get_kv_buffer(0)] == [(3, 4, 2, 8), (3, 4, 2, 4)]
    assert MHATokenToKVPool(**sizes, head_dim=8, dtype=FP8).v_buffer[0].shape == (12, 2, 8)


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1.0), (FP8, 0.5)], ids=str)
def test_mla_stores_the_latent_and_the_rotary_key_side_by_side_under_the_keys_scale(
    dtype: torch.dtype, scale: float
) -> None:
    sizes = {"num_pages": 3, "page_size": PAGE, "kv_lora_rank": 16, "qk_rope_head_dim": 4}
    pool = MLATokenToKVPool(**sizes, num_layers=2, dtype=dtype)
    latent, rope, loc = (
        torch.full((2, 1, 16), 3.0),
        torch.full((2, 1, 4), -5.0),
        torch.tensor([6, 9]),
    )
    layer = RadixAttention(1, 4, 1, 20, 16, 0.3, k_scale=0.5, v_scale=7.0)
    pool.set_mla_kv_buffer(layer, loc, latent, rope)
    assert not pool.kv_buffer[0].float().any()
    stored = pool.kv_buffer[1].float()
    assert stored[loc].tolist() == [[3.0 / scale] * 16 + [-5.0 / scale] * 4] * 2
    assert not stored[[i for i in range(12) if i not in (6, 9)]].any()
    assert pool.get_key_buffer(1).shape == (3, PAGE, 20)
    assert torch.equal(pool.get_key_buffer(1)[1, 2].float(), stored[6])


def test_mla_takes_rows_with_or_without_the_head_dimension() -> None:
    pools = []
    for shape in ((2, 1), (2,)):
        sizes = {"num_pages": 3, "page_size": PAGE, "kv_lora_rank": 16, "qk_rope_head_dim": 4}
        pool = MLATokenToKVPool(**sizes, num_layers=1, dtype=torch.float32)
        latent = torch.arange(32.0).view(*shape, 16)
        rope = torch.arange(8.0).view(*shape, 4)
        pool.set_mla_kv_buffer(mla_layer(), torch.tensor([6, 9]), latent, rope)
        pools.append(pool.kv_buffer[0])
    assert torch.equal(*pools)
