"""Attention metadata of a planned forward, and its memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harness.attention.geometry import Geometry
from harness.kernels.shape_checks import mask_words
from harness.upstream.memory_pool import SWAKVPool

CHUNK = 256
"""Columns of a page table that one program of the Triton fill writes at a time."""


@dataclass(frozen=True, kw_only=True)
class TableLayout:
    """The layout of a page table, and the source of its pages.

    Args:
        req_to_token: [requests, tokens] int32.
        page_size: tokens per page.
        width: columns of the page table.
        swa_pool: the pool whose mapping translates pages and write locations, or None.
    """

    req_to_token: torch.Tensor
    page_size: int
    width: int
    swa_pool: SWAKVPool | None


@dataclass(frozen=True, kw_only=True)
class FillInputs:
    """Inputs of a fill of metadata.

    Args:
        req_pool_indices: [bs] int64.
        seq_lens: [bs] int64.
        query_lens: [bs] integers where queries are ragged, else None.
        out_cache_loc: at least [T] int64, phase after phase.
    """

    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    query_lens: torch.Tensor | None
    out_cache_loc: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """Metadata that every layer of one planned forward reads; bs requests and T query rows.

    Args:
        geometry: the host's part.
        cache_seqlens_int32: [bs] int32, keys per request.
        cu_seqlens_q: [bs + 1] int32.
        cu_seqlens_k: [bs + 1] int32.
        page_table: [bs, width] int32, 0 after the pages of ``geometry.table_offset`` keys.
        swa_page_table: the same in the SWA pool, or None where the pool has none.
        swa_out_cache_loc: [T] int64, write locations in the SWA pool, or None likewise.
        pad_rows: [bs * max_q_len] int64, the query row each row of padded queries repeats.
        unpad_rows: [T] int64, the padded row of each query row; bs * max_q_len for none.
        packed_mask: see ``packed_causal_mask``; None where the kernel is causal by itself.
        filled: see ``MetadataBuffers``.
    """

    geometry: Geometry
    cache_seqlens_int32: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    page_table: torch.Tensor
    swa_page_table: torch.Tensor | None
    swa_out_cache_loc: torch.Tensor | None
    pad_rows: torch.Tensor
    unpad_rows: torch.Tensor
    packed_mask: torch.Tensor | None
    filled: torch.Tensor


def packed_causal_mask(bs: int, q_len: int, device: torch.device | str) -> torch.Tensor:
    """[bs, q_len, 2 * ceil(q_len / 32)] uint16: bit j of row i is set where j <= i."""
    bit = torch.arange(16 * mask_words(q_len), device=device)
    query = torch.arange(q_len, device=device)
    words: torch.Tensor = (
        ((bit <= query[:, None]).long() << (bit % 16)).unflatten(1, (-1, 16)).sum(-1)
    )
    return words.to(torch.uint16).expand(bs, -1, -1).contiguous()


@dataclass(frozen=True, kw_only=True)
class MetadataBuffers:
    """Memory of phases that read one page table: S phases of at most ``rows`` requests.

    Args:
        cache_seqlens: [S, rows] int32.
        cu_seqlens_q: [S, rows + 1] int32.
        cu_seqlens_k: [S, rows + 1] int32.
        page_table: [rows, width] int32.
        swa_page_table: [rows, width] int32, or None.
        swa_out_cache_loc: [S * tokens] int64, phase after phase, or None.
        pad_rows: [rows * max_q_len] int64 where queries are padded, else empty.
        unpad_rows: [tokens] int64 likewise.
        filled: [rows, parts] int32, columns of a row that the last fused fill left alive, once a
            program that fills the row; the next fill clears those and no other.
        needs_packed_mask: whether the kernel asks for a mask where q_len > 1.
    """

    cache_seqlens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    page_table: torch.Tensor
    swa_page_table: torch.Tensor | None
    swa_out_cache_loc: torch.Tensor | None
    pad_rows: torch.Tensor
    unpad_rows: torch.Tensor
    filled: torch.Tensor
    needs_packed_mask: bool

    @property
    def rows(self) -> int:
        """The most requests."""
        return self.page_table.shape[0]

    def slice(self, geometry: Geometry, phase: int = 0) -> Metadata:
        """The leading rows of a phase, sharing its memory; the mask is its own."""
        bs, tokens = geometry.bs, geometry.num_tokens
        padded = (bs * geometry.max_q_len, tokens) if geometry.pads_queries else (0, 0)
        swa_table, swa_loc = self.swa_page_table, self.swa_out_cache_loc
        own = slice(phase * tokens, (phase + 1) * tokens)
        mask = None
        if self.needs_packed_mask and not geometry.is_ragged and geometry.max_q_len > 1:
            mask = packed_causal_mask(bs, geometry.max_q_len, self.page_table.device)
        return Metadata(
            geometry=geometry,
            cache_seqlens_int32=self.cache_seqlens[phase, :bs],
            cu_seqlens_q=self.cu_seqlens_q[phase, : bs + 1],
            cu_seqlens_k=self.cu_seqlens_k[phase, : bs + 1],
            page_table=self.page_table[:bs],
            swa_page_table=None if swa_table is None else swa_table[:bs],
            swa_out_cache_loc=None if swa_loc is None else swa_loc[own],
            pad_rows=self.pad_rows[: padded[0]],
            unpad_rows=self.unpad_rows[: padded[1]],
            packed_mask=mask,
            filled=self.filled[:bs],
        )
