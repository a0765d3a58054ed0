"""The KV cache manager: leases of requests and the prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.engine.kv_lease import Lease, SlotTable
from harness.engine.plan_stream import PlanStream
from harness.engine.prefix_cache import PrefixCache
from harness.engine.request import Request
from harness.errors import CapacityError, UsageError, rejected


@dataclass(frozen=True, kw_only=True)
class KVUsage:
    """Numbers of free, cached and held pages, which add up to the total.

    Args:
        total_pages: without the padding page.
        free_pages: in the allocator.
        cached_pages: in the prefix cache.
        held_pages: of running requests, without those shared with the prefix cache.
        held_rows: running requests.
    """

    total_pages: int
    free_pages: int
    cached_pages: int
    held_pages: int
    held_rows: int


class KVCacheManager:
    """Gives requests leases, which begin with pages of the prefix cache.

    Args:
        slots: makes the leases.
        streams: the queues; what forwards read is written on the scheduler's.
        cache: over the slots' allocator; without one every prompt is computed whole.

    Raises:
        UsageError: a prefix cache for a hybrid pool, whose sliding windows have their own slots.
    """

    def __init__(self, slots: SlotTable, streams: PlanStream, cache: PrefixCache | None) -> None:
        if cache is not None and slots.swa_allocator is not None:
            raise UsageError(rejected("prefix_cache", "one of a hybrid pool", "none for it"))
        self._slots, self._streams, self._cache = slots, streams, cache

    def admit(self, request: Request, headroom: int) -> None:
        """Give a waiting request a lease for all its tokens and one round.

        Raises:
            CapacityError: rows or pages do not suffice; nothing has changed.
        """
        lease = self._slots.open()
        prefix = self._cache.acquire(request.tokens) if self._cache else []
        request.lease, request.prefix = lease, prefix
        if prefix:
            pages = [node.page for node in prefix]
            self._write("share", lambda: self._slots.share(lease, pages))
        try:
            self.reserve(lease, len(request.tokens) - lease.committed + headroom)
        except CapacityError:
            self._release(request, lease, set())
            raise

    def reserve(self, lease: Lease, tokens: int) -> None:
        """Reserve pages for the committed tokens and so many more, evicting where needed.

        Raises:
            CapacityError: eviction does not suffice; nothing has changed.
        """
        if self._cache:
            self._cache.ensure_free(self._slots.missing(lease, tokens))
        self._write("reserve", lambda: self._slots.reserve(lease, tokens))

    def release(self, request: Request) -> None:
        """End a request's lease; its whole committed pages stay in the prefix cache."""
        lease, kept = request.held, set[int]()
        if self._cache:
            kept = self._cache.insert(request.tokens, lease.committed, lease.pages)
        self._release(request, lease, kept)

    def clear(self) -> int:
        """Evict every prefix without users; how many pages were freed."""
        return self._cache.clear() if self._cache else 0

    def usage(self, running: Sequence[Request]) -> KVUsage:
        """Page counts while these requests run."""
        leases = [request.held for request in running]
        return KVUsage(
            total_pages=self._slots.allocator.num_pages - 1,
            free_pages=self._slots.allocator.available_pages,
            cached_pages=self._cache.pages if self._cache else 0,
            held_pages=sum(len(lease.pages) - lease.shared for lease in leases),
            held_rows=len(leases),
        )

    def _release(self, request: Request, lease: Lease, kept: set[int]) -> None:
        if self._cache:
            self._cache.release(request.prefix)
        written = self._slots.mapping
        self._streams.schedule("release", lambda: self._slots.release(lease, kept), writes=written)
        request.lease, request.prefix = None, []

    def _write(self, name: str, write: Callable[[], None]) -> None:
        self._streams.schedule(name, write, writes=self._slots.shared)
