"""A lease holds whole pages, committed and allocated apart, and frees exactly what it allocated."""

from __future__ import annotations

import pytest
import torch

from harness.engine.kv_lease import Lease, SlotTable
from harness.errors import CapacityError, ContractError, UsageError
from harness.upstream.allocator import PagedAllocator, ReqToTokenPool
from harness.upstream.memory_pool import MHATokenToKVPool, SWAKVPool

PAGE = 4


def kv_pool(num_pages: int, page_size: int = PAGE) -> MHATokenToKVPool:
    return MHATokenToKVPool(
        num_pages=num_pages,
        page_size=page_size,
        num_layers=1,
        num_kv_heads=1,
        head_dim=2,
        dtype=torch.float32,
    )


def swa_pool(pages: int, swa_pages: int, page_size: int = PAGE) -> SWAKVPool:
    return SWAKVPool(
        full_pool=kv_pool(pages),
        swa_pool=kv_pool(swa_pages),
        swa_layer_ids=frozenset({1}),
        num_layers=2,
    )


def table(pages: int = 8, columns: int = 14, rows: int = 2) -> SlotTable:
    return SlotTable(ReqToTokenPool(rows, columns), PagedAllocator(pages, PAGE), kv_pool(pages))


def held(slots: SlotTable, lease: Lease, tokens: int) -> list[int]:
    return slots.req_to_token_pool.req_to_token[lease.row, :tokens].tolist()


@pytest.mark.parametrize(
    ("tokens", "pages"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3), (14, 4)]
)
def test_reserving_takes_whole_pages(tokens: int, pages: int) -> None:
    slots = table()
    lease = slots.open()
    slots.reserve(lease, tokens)
    held_pages, free = len(lease.pages), slots.allocator.available_pages
    said = f"reserving {tokens} tokens takes ceil({tokens} / {PAGE}) = {pages} pages"
    assert held_pages == pages, f"{said}, not {held_pages}"
    assert slots.allocated(lease) == pages * PAGE, f"{said}, whose slots are all allocated"
    assert free == 7 - pages, f"{said} of the pool's 7 and leaves {7 - pages} free, not {free}"
    assert lease.committed == 0, f"what is reserved is not committed: {lease.committed} tokens"


def test_rounds_grow_by_what_was_accepted_not_by_what_was_allocated() -> None:
    """Rounds of 3 tokens that accept 1, 3, 2: pages follow the committed tokens."""
    slots = table()
    lease = slots.open()
    slots.reserve(lease, 5)
    slots.commit(lease, 5)
    grown = []
    for accepted in (1, 3, 2):
        slots.reserve(lease, 3)
        slots.commit(lease, accepted)
        grown.append((lease.committed, slots.allocated(lease)))
    assert grown == [(6, 8), (9, 12), (11, 12)]


def test_the_table_names_the_slots_of_each_page_in_token_order() -> None:
    slots = table()
    slots.allocator.free(list(reversed(slots.allocator.alloc(7))))
    first, second = slots.open(), slots.open()
    slots.reserve(first, 2)
    slots.commit(first, 2)
    slots.reserve(second, 5)
    slots.reserve(first, 3)
    assert (first.pages, second.pages) == ([7, 4], [6, 5])
    assert held(slots, first, 8) == [28, 29, 30, 31, 16, 17, 18, 19]
    assert held(slots, second, 8) == [24, 25, 26, 27, 20, 21, 22, 23]


def test_a_last_page_wider_than_the_table_is_cut() -> None:
    slots = table(columns=14)
    lease = slots.open()
    slots.reserve(lease, 14)
    assert held(slots, lease, 14) == list(range(4, 18))
    with pytest.raises(CapacityError, match=r"tokens of a request = 15 .* at most 14"):
        slots.reserve(lease, 15)


def test_a_last_page_that_comes_later_is_cut_to_the_columns_that_are_left() -> None:
    slots = table(columns=14)
    lease = slots.open()
    slots.reserve(lease, 9)
    slots.commit(lease, 9)
    said = "of a fourth page of 4 tokens the last 2 of 14 columns name the first 2 slots"
    try:
        slots.reserve(lease, 5)
    except RuntimeError as error:
        pytest.fail(f"{said}: {error}")
    found = held(slots, lease, 14)
    assert found == list(range(4, 18)), f"{said}, 16 and 17: {found}"


def test_committing_beyond_the_pages_is_a_broken_contract() -> None:
    slots = table()
    lease = slots.open()
    slots.reserve(lease, 5)
    slots.commit(lease, 6)
    with pytest.raises(ContractError, match=r"committed tokens = 3 .* 0 … 2"):
        slots.commit(lease, 3)
    with pytest.raises(ContractError, match="committed tokens = -1"):
        slots.commit(lease, -1)


def test_release_returns_the_pools_to_where_they_were() -> None:
    slots = table()
    leases = [slots.open(), slots.open()]
    for lease, tokens in zip(leases, (5, 9), strict=True):
        slots.reserve(lease, tokens)
        slots.commit(lease, tokens - 2)
    for lease in leases:
        slots.release(lease)
    pages, rows = slots.allocator.available_pages, slots.req_to_token_pool.available
    assert pages == 7, f"all 7 pages of the pool are free after every release, not {pages}"
    assert rows == 2, f"both rows of req_to_token are free after every release, not {rows}"
    given = sorted(slots.allocator.alloc(7))
    assert given == list(range(1, 8)), f"released pages are handed out once each: {given}"


def test_a_released_lease_is_dead() -> None:
    slots = table()
    lease = slots.open()
    slots.reserve(lease, 5)
    slots.release(lease)
    uses = {
        "release": lambda: slots.release(lease),
        "reserve": lambda: slots.reserve(lease, 1),
        "commit": lambda: slots.commit(lease, 0),
    }
    for name, use in uses.items():
        told = "nothing"
        try:
            use()
        except ContractError as error:
            told = str(error)
        rule = f"{name} of a lease that is released already is refused as such"
        assert "row 1 is released already" in told, f"{rule}, and told is: {told}"
    free = slots.allocator.available_pages
    assert free == 7, f"a refused use of a released lease leaves all 7 pages free, not {free}"


def test_a_reservation_that_does_not_fit_changes_nothing() -> None:
    slots = table(pages=3)
    lease = slots.open()
    slots.reserve(lease, 4)
    with pytest.raises(CapacityError, match=r"pages = 2 .* at most 1 free"):
        slots.reserve(lease, 12)
    assert (len(lease.pages), slots.allocator.available_pages) == (1, 1)


def test_rows_run_out() -> None:
    slots = table(rows=1)
    slots.open()
    with pytest.raises(CapacityError, match="free rows"):
        slots.open()


def test_window_pages_are_mapped_and_unmapped_with_full_ones() -> None:
    pool = swa_pool(6, 5)
    swa = PagedAllocator(5, PAGE)
    swa.free(list(reversed(swa.alloc(4))))
    slots = SlotTable(ReqToTokenPool(1, 16), PagedAllocator(6, PAGE), pool, swa)
    before = pool.full_to_swa_index_mapping.clone()
    lease = slots.open()
    slots.reserve(lease, 6)
    assert (lease.pages, lease.swa_pages) == ([1, 2], [4, 3])
    mapped = pool.translate_loc_from_full_to_swa(torch.arange(4, 12, dtype=torch.int32))
    assert mapped.tolist() == [16, 17, 18, 19, 12, 13, 14, 15]
    slots.release(lease)
    assert torch.equal(pool.full_to_swa_index_mapping, before)
    said = "a request that ends gives back its pages and its window pages"
    assert (slots.allocator.available_pages, swa.available_pages) == (5, 4), said


def test_all_window_pages_of_a_long_request_are_unmapped() -> None:
    pool, pages = swa_pool(40, 40), PagedAllocator(40, PAGE)
    slots = SlotTable(ReqToTokenPool(1, 160), pages, pool, PagedAllocator(40, PAGE))
    before = pool.full_to_swa_index_mapping.clone()
    lease = slots.open()
    slots.reserve(lease, 36 * PAGE)
    slots.release(lease)
    assert torch.equal(pool.full_to_swa_index_mapping, before)


def test_full_pages_go_back_when_window_pages_run_out() -> None:
    slots = SlotTable(
        ReqToTokenPool(1, 16), PagedAllocator(6, PAGE), swa_pool(6, 2), PagedAllocator(2, PAGE)
    )
    lease = slots.open()
    with pytest.raises(CapacityError, match=r"pages = 2 .* at most 1 free"):
        slots.reserve(lease, 5)
    assert slots.allocator.available_pages == 5
    assert lease.pages == lease.swa_pages == []


@pytest.mark.parametrize(
    ("pool", "swa", "message"),
    [
        (swa_pool(6, 3), None, "swa_allocator = None .* one for a SWAKVPool"),
        (kv_pool(6), PagedAllocator(3, PAGE), "swa_allocator = .* else none"),
        (kv_pool(6, page_size=8), None, "page_size = 8 .* 4, the allocator's"),
        (swa_pool(6, 3), PagedAllocator(3, 2), "page_size = 2 .* 4, the allocator's"),
    ],
    ids=["missing", "superfluous", "kv_page_size", "swa_page_size"],
)
def test_parts_that_do_not_fit_are_refused(
    pool: MHATokenToKVPool | SWAKVPool, swa: PagedAllocator | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        SlotTable(ReqToTokenPool(1, 16), PagedAllocator(6, PAGE), pool, swa)
