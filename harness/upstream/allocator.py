"""Allocators: the request-to-token table, and pages of KV slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from harness.errors import CapacityError, ContractError, rejected

PADDING_SLOT = 0
PADDING_ROW = 0


class ReqToTokenPool:
    """Row r, column t: the KV slot of token t of the request in row r.

    Row 0 is the padding's, as in SGLang since 0.5.12: padded requests of a graph read it, and no
    request is ever given it.

    Attributes:
        req_to_token: [1 + size, max_context_len] int32. ``max_context_len`` must hold the context
            and one round of draft tokens.
    """

    def __init__(self, size: int, max_context_len: int, device: torch.device | str = "cpu") -> None:
        self.req_to_token = torch.zeros(1 + size, max_context_len, dtype=torch.int32, device=device)
        self._free = [row for row in range(1 + size) if row != PADDING_ROW]

    @property
    def available(self) -> int:
        """Free rows."""
        return len(self._free)

    def alloc(self, count: int) -> list[int]:
        """Take rows.

        Raises:
            CapacityError: fewer than ``count`` rows are free.
        """
        if count > len(self._free):
            raise CapacityError(rejected("requests", count, f"at most {len(self._free)} free rows"))
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def free(self, rows: Sequence[int]) -> None:
        """Release rows.

        Raises:
            ContractError: a row is free already, the padding's or none; nothing is freed then.
        """
        self._free = _freed("request row", rows, self._free, len(self.req_to_token))


class PagedAllocator:
    """Hands out whole pages; page 0 belongs to padding and is never handed out."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(1, num_pages))

    @property
    def available_pages(self) -> int:
        """Free pages."""
        return len(self._free)

    def alloc(self, count: int) -> list[int]:
        """Take pages.

        Raises:
            CapacityError: fewer than ``count`` pages are free.
        """
        if count > len(self._free):
            raise CapacityError(rejected("pages", count, f"at most {len(self._free)} free pages"))
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def free(self, pages: Sequence[int]) -> None:
        """Release pages.

        Raises:
            ContractError: a page is free already, the padding's or none; nothing is freed then.
        """
        self._free = _freed("page", pages, self._free, self.num_pages)


def _freed(what: str, given: Sequence[int], free: Sequence[int], end: int) -> list[int]:
    """Those that are free and then those given back; number 0 is the padding's."""
    left = list(free)
    for number in given:
        if number == 0:
            raise ContractError(f"padding {what} freed")
        if not 0 < number < end:
            raise ContractError(rejected(f"{what} freed", number, f"1 to {end - 1}"))
        if number in left:
            raise ContractError(f"{what} {number} freed twice")
        left.append(number)
    return left
