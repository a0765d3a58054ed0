"""Leases of whole pages: a request's committed tokens and allocated tokens are two numbers.

A round of speculation writes further than it commits. The pages after the committed tokens stay
allocated as headroom, because the next round needs them again; they are released with the rest
when the request finishes, is aborted or is retracted.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from harness.errors import CapacityError, ContractError, UsageError, rejected
from harness.upstream.allocator import PADDING_SLOT, PagedAllocator, ReqToTokenPool
from harness.upstream.memory_pool import KVPool, SWAKVPool


@dataclass
class Lease:
    """The row and pages of one request.

    Args:
        row: its row of the request-to-token table.
        committed: tokens whose keys and values count.
        pages: full-pool pages, in token order.
        swa_pages: sliding-window pages, one per full page where the pool is hybrid.
        shared: how many of the first pages belong to a prefix cache.
    """

    row: int
    committed: int = 0
    pages: list[int] = field(default_factory=list)
    swa_pages: list[int] = field(default_factory=list)
    shared: int = 0
    released: bool = False


class SlotTable:
    """Leases over a request-to-token table and one or two page allocators.

    Args:
        req_to_token_pool: the table; target and draft share it, slot for slot.
        allocator: pages of the full pool.
        kv_pool: the target's pool; its full-to-SWA mapping is kept up to date if it has one.
        swa_allocator: pages of the sliding-window pool, given exactly where kv_pool is hybrid.

    Raises:
        UsageError: page sizes differ, or a hybrid pool and its allocator do not come together.
    """

    def __init__(
        self,
        req_to_token_pool: ReqToTokenPool,
        allocator: PagedAllocator,
        kv_pool: KVPool,
        swa_allocator: PagedAllocator | None = None,
    ) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.allocator = allocator
        self.swa_allocator = swa_allocator
        self.page_size = allocator.page_size
        self._mapping = None
        if isinstance(kv_pool, SWAKVPool):
            self._mapping = kv_pool.full_to_swa_index_mapping
        if (self._mapping is None) != (swa_allocator is None):
            raise UsageError(
                rejected("swa_allocator", swa_allocator, "one for a SWAKVPool, else none")
            )
        for other in (kv_pool, swa_allocator):
            if other is not None and other.page_size != self.page_size:
                accepted = f"{self.page_size}, the allocator's"
                raise UsageError(rejected("page_size", other.page_size, accepted))

    def open(self) -> Lease:
        """A lease without tokens.

        Raises:
            CapacityError: no row is free.
        """
        return Lease(row=self.req_to_token_pool.alloc(1)[0])

    @property
    def mapping(self) -> dict[str, torch.Tensor]:
        """The full-to-SWA mapping by its name, where the pool is hybrid."""
        return {} if self._mapping is None else {"full_to_swa_index_mapping": self._mapping}

    @property
    def shared(self) -> dict[str, torch.Tensor]:
        """The memory that leases write and forwards read, by name."""
        return {"req_to_token": self.req_to_token_pool.req_to_token, **self.mapping}

    @property
    def capacity(self) -> int:
        """Most tokens of a request that runs alone."""
        allocators = (self.allocator, self.swa_allocator or self.allocator)
        return min(pages.num_pages - 1 for pages in allocators) * self.page_size

    def allocated(self, lease: Lease) -> int:
        """Tokens that fit the lease's pages."""
        return len(lease.pages) * self.page_size

    def pages_for(self, tokens: int) -> int:
        """Whole pages for so many tokens."""
        return -(-tokens // self.page_size)

    def missing(self, lease: Lease, tokens: int) -> int:
        """Pages that a reservation of so many tokens would allocate."""
        return max(self.pages_for(lease.committed + tokens) - len(lease.pages), 0)

    def share(self, lease: Lease, pages: list[int]) -> None:
        """Begin a lease with pages of a prefix cache; their tokens are committed.

        Raises:
            ContractError: the lease has tokens already.
        """
        if lease.pages:
            raise ContractError(rejected("pages of the lease", len(lease.pages), "none yet"))
        self._write(lease, list(pages))
        lease.shared = len(pages)
        lease.committed = len(pages) * self.page_size

    def reserve(self, lease: Lease, tokens: int) -> None:
        """Allocate pages for the committed tokens and so many more; all of them or none.

        Raises:
            CapacityError: pages or columns of the table do not suffice; nothing has changed.
            ContractError: the lease is released.
        """
        self._require_open(lease)
        wanted = lease.committed + tokens
        columns = self.req_to_token_pool.req_to_token.shape[1]
        if wanted > columns:
            raise CapacityError(rejected("tokens of a request", wanted, f"at most {columns}"))
        count = self.missing(lease, tokens)
        if not count:
            return
        pages = self.allocator.alloc(count)
        if self.swa_allocator is not None:
            try:
                swa_pages = self.swa_allocator.alloc(count)
            except CapacityError:
                self.allocator.free(pages)
                raise
            self._map(pages, swa_pages)
            lease.swa_pages += swa_pages
        self._write(lease, pages)

    def commit(self, lease: Lease, tokens: int) -> None:
        """Commit so many more tokens.

        Raises:
            ContractError: the lease is released, or they do not fit its pages.
        """
        self._require_open(lease)
        most = self.allocated(lease) - lease.committed
        if not 0 <= tokens <= most:
            raise ContractError(rejected("committed tokens", tokens, f"0 … {most}"))
        lease.committed += tokens

    def release(self, lease: Lease, kept: Collection[int] = ()) -> None:
        """Free the row and all pages but shared ones and those that a prefix cache keeps.

        Raises:
            ContractError: the lease is released already.
        """
        self._require_open(lease)
        lease.released = True
        if self.swa_allocator is not None:
            self.swa_allocator.free(lease.swa_pages)
            self._map(lease.pages, None)
        self.allocator.free([page for page in lease.pages[lease.shared :] if page not in kept])
        self.req_to_token_pool.free([lease.row])

    def _require_open(self, lease: Lease) -> None:
        if lease.released:
            raise ContractError(f"the lease of request row {lease.row} is released already")

    def _write(self, lease: Lease, pages: list[int]) -> None:
        table = self.req_to_token_pool.req_to_token
        start = self.allocated(lease)
        slots = self._slots(pages)[: table.shape[1] - start]
        table[lease.row, start : start + len(slots)] = slots.to(table)
        lease.pages += pages

    def _map(self, pages: list[int], swa_pages: list[int] | None) -> None:
        assert self._mapping is not None
        slots = self._slots(pages).to(self._mapping.device)
        if swa_pages is None:
            self._mapping[slots] = PADDING_SLOT
        else:
            self._mapping[slots] = self._slots(swa_pages).to(self._mapping)

    def _slots(self, pages: list[int]) -> torch.Tensor:
        """Slots of pages, token after token, int64 on the host."""
        starts = torch.tensor(pages, dtype=torch.int64)[:, None] * self.page_size
        return (starts + torch.arange(self.page_size)).flatten()
