"""Invariants of metadata: lengths, cumulative lengths and page tables of one planned forward."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from harness.core.conventions import OURS, Conventions
from harness.differential.invariants.classes import GEOMETRY, INDEX_SPACE, LENGTHS, PADDING

SHOWN_PAGES = 16


def check_metadata(
    metadata: Any,
    *,
    prefix_lens: Sequence[int],
    q_lens: Sequence[int],
    pages: Sequence[Sequence[int]],
    page_size: int,
    num_pages: int,
    swa_pages: Sequence[Sequence[int]] | None = None,
    num_swa_pages: int = 0,
    packed_q_lens: Sequence[int] | None = None,
    table_headroom: int = 0,
    conventions: Conventions = OURS,
) -> list[str]:
    """Violations in the metadata of one planned forward.

    Args:
        metadata: has ``cache_seqlens_int32``, ``cu_seqlens_q``, ``cu_seqlens_k``, ``page_table``,
            ``swa_page_table`` and ``max_seq_len_q``, or ``geometry.max_q_len`` for the last.
        prefix_lens: keys before the first query of every row, padded rows included. Step i of a
            multi-step draft has i more than are committed.
        q_lens: query tokens of every row as the kernel sees them, padded rows included.
        pages: pages of every *real* row in token order, as the dense problem lays them out.
        page_size: tokens per page.
        num_pages: pages of the pool.
        swa_pages: the same pages in the SWA pool, or None where there is none.
        num_swa_pages: pages of the SWA pool.
        packed_q_lens: query tokens of every row as they are packed, where the kernel sees them
            padded to the longest; ``q_lens`` by default.
        table_headroom: keys beyond its own whose pages the table holds for a later phase.
        conventions: of the backend that planned.
    """
    lacks = conventions.lacks
    kv_lens = [p + q for p, q in zip(prefix_lens, q_lens, strict=True)]
    packed = q_lens if packed_q_lens is None else packed_q_lens
    expected = {
        "cache_seqlens_int32": kv_lens,
        "cu_seqlens_q": list(accumulate(packed, initial=0)),
        "cu_seqlens_k": list(accumulate(kv_lens, initial=0)),
    }
    found = []
    for name, lens in expected.items():
        found += [] if name in lacks else _lengths(metadata, name, lens)
    live = [-(-(n + table_headroom) // page_size) for n in kv_lens]
    zero_tail = conventions.zero_table_tail
    found += _table(metadata, "page_table", pages, live, num_pages, zero_tail)
    if swa_pages is not None:
        found += _table(metadata, "swa_page_table", swa_pages, live, num_swa_pages, zero_tail)
    elif getattr(metadata, "swa_page_table", None) is not None:
        found.append(f"swa_page_table is there, expected none [{INDEX_SPACE}]")
    longest = getattr(metadata, "max_seq_len_q", None)
    if longest is None:
        longest = getattr(getattr(metadata, "geometry", None), "max_q_len", None)
    if "max_seq_len_q" in lacks:
        return found
    if longest is None or longest < max(q_lens, default=0):
        need = max(q_lens, default=0)
        found.append(f"max_seq_len_q = {longest}, expected at least {need} [{GEOMETRY}]")
    return found


def _int32(metadata: Any, name: str) -> tuple[torch.Tensor | None, list[str]]:
    tensor = getattr(metadata, name, None)
    if not isinstance(tensor, torch.Tensor):
        return None, [f"{name} is missing [{GEOMETRY}]"]
    if tensor.dtype != torch.int32:
        return tensor, [f"{name} has dtype {tensor.dtype}, expected torch.int32 [{INDEX_SPACE}]"]
    return tensor, []


def _lengths(metadata: Any, name: str, expected: list[int]) -> list[str]:
    tensor, found = _int32(metadata, name)
    if tensor is None:
        return found
    if list(tensor.shape) != [len(expected)]:
        shapes = f"shape {list(tensor.shape)}, expected [{len(expected)}]"
        return [*found, f"{name} has {shapes} [{GEOMETRY}]"]
    for i, (obtained, wanted) in enumerate(zip(tensor.tolist(), expected, strict=True)):
        if obtained != wanted:
            return [*found, f"{name}[{i}] = {obtained}, expected {wanted} [{LENGTHS}]"]
    return found


def _table(
    metadata: Any,
    name: str,
    pages: Sequence[Sequence[int]],
    live: list[int],
    num_pages: int,
    zero_tail: bool,
) -> list[str]:
    tensor, found = _int32(metadata, name)
    if tensor is None:
        return found
    rows, width = tensor.shape if tensor.dim() == 2 else (tensor.shape[0], 0)
    if rows != len(live) or width < max(live, default=0):
        shapes = f"shape {list(tensor.shape)}, expected [{len(live)}, >= {max(live, default=0)}]"
        return [*found, f"{name} has {shapes} [{INDEX_SPACE}]"]
    for r, (row, count) in enumerate(zip(tensor.tolist(), live, strict=True)):
        named = row if zero_tail else row[:count]
        outside = [page for page in named if not 0 <= page < num_pages]
        if outside:
            found.append(f"{name}[{r}] names page {outside[0]} of {num_pages} [{INDEX_SPACE}]")
        elif r < len(pages) and row[:count] != list(pages[r][:count]):
            own = _differing(row[:count], list(pages[r][:count]))
            found.append(f"{name}[{r}] has live pages {own} [{INDEX_SPACE}]")
        elif zero_tail and r < len(pages) and any(row[count:]):
            dead = f"{row[count:]} after {count} live pages, expected zeros"
            found.append(f"{name}[{r}] has {dead} [{PADDING}]")
    return found


def _differing(obtained: list[int], expected: list[int]) -> str:
    """Both rows of a table; of long ones a few columns from the first that differs."""
    if len(expected) <= SHOWN_PAGES:
        return f"{obtained}, expected {expected}"
    pairs = enumerate(zip(obtained, expected, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), len(expected))
    some = slice(first, first + SHOWN_PAGES)
    return f"{obtained[some]} from column {first} on, expected {expected[some]}"
