"""A cached page is found by its tokens and the next one, has one owner and can be evicted."""

from __future__ import annotations

import pytest
import torch

from harness.engine.kv_lease import SlotTable
from harness.engine.kv_manager import KVCacheManager
from harness.engine.plan_stream import SameStream
from harness.engine.prefix_cache import PrefixCache
from harness.engine.request import Request
from harness.errors import CapacityError, ContractError, UsageError
from harness.upstream.allocator import PagedAllocator, ReqToTokenPool
from harness.upstream.memory_pool import MHATokenToKVPool, SWAKVPool

PAGE = 4


def windowless(pages: int) -> MHATokenToKVPool:
    return MHATokenToKVPool(
        num_pages=pages,
        page_size=PAGE,
        num_layers=1,
        num_kv_heads=1,
        head_dim=2,
        dtype=torch.float32,
    )


def hybrid() -> tuple[ReqToTokenPool, PagedAllocator, SWAKVPool, PagedAllocator]:
    pool = SWAKVPool(
        full_pool=windowless(6),
        swa_pool=windowless(3),
        swa_layer_ids=frozenset({1}),
        num_layers=2,
    )
    return ReqToTokenPool(1, 16), PagedAllocator(6, PAGE), pool, PagedAllocator(3, PAGE)


def test_windows_are_not_shared():
    table = SlotTable(*hybrid())
    with pytest.raises(UsageError, match=r"prefix_cache = .* hybrid"):
        KVCacheManager(table, SameStream(), PrefixCache(table.allocator))


def test_the_smaller_pool_of_a_hybrid_one_limits_a_request():
    assert SlotTable(*hybrid()).capacity == 2 * PAGE


@pytest.mark.parametrize("lacks", ["rows", "pages"])
def test_a_request_that_is_not_admitted_holds_no_prefix(lacks):
    pages = 6 if lacks == "rows" else 3
    table, allocator = ReqToTokenPool(1, 16), PagedAllocator(pages, PAGE)
    slots = SlotTable(table, allocator, windowless(pages))
    cache = PrefixCache(allocator)
    cache.insert(range(5), 5, allocator.alloc(1))
    if lacks == "rows":
        slots.open()
    free = allocator.available_pages, table.available
    with pytest.raises(CapacityError, match=lacks):
        KVCacheManager(slots, SameStream(), cache).admit(Request([*range(6)], 1, None), 7)
    assert (allocator.available_pages, table.available) == free
    assert cache.clear() == 1, "its prefix is held by nobody, so that it can be flushed"


def test_a_lease_begins_with_shared_pages_or_not_at_all():
    slots = SlotTable(ReqToTokenPool(1, 16), PagedAllocator(6, PAGE), windowless(6))
    cached = slots.allocator.alloc(2)
    lease = slots.open()
    slots.share(lease, cached[::-1])
    assert (lease.committed, lease.shared) == (8, 2)
    row = slots.req_to_token_pool.req_to_token[lease.row]
    assert row[:8].tolist() == [8, 9, 10, 11, 4, 5, 6, 7]
    with pytest.raises(ContractError, match=r"pages of the lease = 2 .* none yet"):
        slots.share(lease, cached)
    slots.reserve(lease, 3)
    slots.release(lease)
    assert slots.allocator.available_pages == 3


def test_pages_are_known_by_the_token_behind_them():
    cache = PrefixCache(PagedAllocator(8, PAGE))
    assert cache.insert(range(9), 9, [1, 2]) == {1, 2}
    assert [n.page for n in cache.acquire(range(10))] == [1, 2]
    assert [n.page for n in cache.acquire(range(9))] == [1, 2]
    assert [n.page for n in cache.acquire(range(8))] == [1]
    assert [n.page for n in cache.acquire([*range(8), 99])] == [1]
    assert cache.acquire([99, *range(1, 9)]) == []
    assert cache.insert([*range(8), 99], 9, [1, 3]) == {3}
    assert cache.insert(range(9), 7, [4, 5]) == set()
    whole = PrefixCache(PagedAllocator(8, PAGE)).insert(range(9), 8, [1, 2])
    assert whole == {1, 2}, "a page that ends with the last computed token is cached, too"


def test_the_least_recently_wanted_leaf_goes_first():
    allocator = PagedAllocator(6, PAGE)
    cache = PrefixCache(allocator)
    old, fork, new = [*range(9)], [*range(4), 50, 51, 52, 53, 54], [*range(20, 25)]
    cache.insert(old, 9, allocator.alloc(2))
    cache.insert(new, 5, allocator.alloc(1))
    cache.insert(fork, 9, allocator.alloc(2))
    held = cache.acquire(old)
    assert cache.pages == 5, "a cached page is found by its tokens and the one behind it"
    cache.ensure_free(2)
    assert allocator.available_pages == 2, "as many pages are evicted as are asked to be free"
    assert cache.pages == 3, f"3 of 5 cached pages are left after two were evicted: {cache.pages}"
    assert cache.acquire(new) == [], "the leaf that was wanted least recently is evicted first"
    cleared = cache.clear()
    assert cleared == 1, f"clear evicts the one page that nobody holds, not {cleared}"
    cache.release(held)
    cleared = cache.clear()
    assert cleared == 2, f"both pages of a released prefix can be evicted, not {cleared}"
    free = allocator.available_pages
    assert free == 5, f"evicted pages go back to the allocator: 5 are free, not {free}"


def test_every_page_of_a_long_prefix_is_held():
    allocator = PagedAllocator(40, PAGE)
    cache = PrefixCache(allocator)
    tokens = range(36 * PAGE + 1)
    cache.insert(tokens, len(tokens), allocator.alloc(36))
    held = cache.acquire(tokens)
    assert (len(held), cache.clear()) == (36, 0)
    cache.release(held)
    assert (cache.clear(), cache.pages, allocator.available_pages) == (36, 0, 39)


def test_a_prefix_that_was_wanted_again_outlives_one_that_was_not():
    allocator = PagedAllocator(4, PAGE)
    cache = PrefixCache(allocator)
    first, second, third = ([start, *range(20, 24)] for start in (1, 2, 3))
    for tokens in (first, second, third):
        cache.insert(tokens, 5, allocator.alloc(1))
    cache.release(cache.acquire(first))
    for gone in (second, third, first):
        room = allocator.available_pages + 1
        cache.ensure_free(room)
        told = "ensure_free evicts released prefixes until as many pages are free as are needed"
        assert allocator.available_pages == room, told
        assert cache.acquire(gone) == []
    assert cache.pages == 0


def test_a_prefix_is_not_evicted_while_a_request_reads_it():
    allocator = PagedAllocator(3, PAGE)
    cache = PrefixCache(allocator)
    read, unread = [*range(5)], [*range(20, 25)]
    cache.insert(read, 5, allocator.alloc(1))
    held = cache.acquire(read)
    cache.insert(unread, 5, allocator.alloc(1))
    cache.ensure_free(1)
    assert cache.acquire(read) == held, "what a request reads stays, however long ago it was wanted"
    assert cache.acquire(unread) == []


def test_a_prefix_whose_request_ends_outlives_one_that_nobody_used_since():
    allocator = PagedAllocator(4, PAGE)
    cache = PrefixCache(allocator)
    ended, unused = [*range(5)], [*range(20, 25)]
    pages = allocator.alloc(1)
    cache.insert(ended, 5, pages)
    cache.insert(unused, 5, allocator.alloc(1))
    assert cache.insert(ended, 5, pages) == set()
    cache.ensure_free(allocator.available_pages + 1)
    assert cache.acquire(unused) == []
    assert len(cache.acquire(ended)) == 1


def test_cached_tokens_take_no_pages_of_a_lease_again():
    """Nine tokens, eight of them cached, and a round of three: one page more than the cache's."""
    slots = SlotTable(ReqToTokenPool(1, 24), PagedAllocator(4, PAGE), windowless(4))
    cache = PrefixCache(slots.allocator)
    cache.insert(range(9), 8, slots.allocator.alloc(2))
    request = Request([*range(9)], 1, None)
    KVCacheManager(slots, SameStream(), cache).admit(request, 3)
    assert (request.held.committed, len(request.held.pages)) == (8, 3)
    assert slots.allocator.available_pages == 0


def test_nothing_is_evicted_for_room_that_cannot_be_made():
    allocator = PagedAllocator(6, PAGE)
    cache = PrefixCache(allocator)
    cache.insert(range(9), 9, allocator.alloc(2))
    allocator.alloc(2)
    said = "ensure_free evicts until so many pages are free, or nothing where that does not suffice"
    cache.ensure_free(4)
    found = allocator.available_pages, cache.pages
    assert found == (1, 2), f"{said}: of 4 wanted and 3 to be had, (free, cached) is {found}"
    cache.ensure_free(1)
    assert cache.pages == 2, f"{said}: 1 was wanted and free, and 2 - {cache.pages} are evicted"
    cache.ensure_free(3)
    found = allocator.available_pages, cache.pages
    assert found == (3, 0), f"{said}: of 3 wanted, (free, cached) is {found}"


def test_room_that_a_lease_holds_already_evicts_nothing():
    """Two pages for three tokens and a round of five; a round of four fits them once more."""
    slots = SlotTable(ReqToTokenPool(1, 24), PagedAllocator(4, PAGE), windowless(4))
    cache = PrefixCache(slots.allocator)
    manager, request = KVCacheManager(slots, SameStream(), cache), Request([1, 2, 3], 9, None)
    cache.insert(range(20, 25), 4, slots.allocator.alloc(1))
    manager.admit(request, 5)
    slots.commit(request.held, 3)
    manager.reserve(request.held, 4)
    said = "a round that fits the pages of its lease evicts no prefix"
    assert (slots.allocator.available_pages, cache.pages) == (0, 1), said


def test_a_prefix_that_was_wanted_is_wanted_from_its_first_page():
    """A prompt that is not admitted wants its prefix, too, and caches nothing that would tell."""
    allocator = PagedAllocator(4, PAGE)
    cache = PrefixCache(allocator)
    wanted, read = [*range(9)], [*range(20, 25)]
    cache.insert(wanted, 9, allocator.alloc(2))
    cache.insert(read, 5, allocator.alloc(1))
    held = cache.acquire(read)
    cache.release(cache.acquire(wanted))
    cache.ensure_free(1)
    cache.release(held)
    cache.ensure_free(2)
    kept = [len(cache.acquire(tokens)) for tokens in (wanted, read)]
    said = "pages of a prefix are as recent as its last use, the first as well as the last"
    assert kept == [1, 0], f"{said}: of both prefixes {kept} pages are left, not [1, 0]"
