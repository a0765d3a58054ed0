"""Attention metadata: what it is, and the one in-place fill that eager and graph planning share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harness.backends.geometry import Geometry
from harness.providers.strictness import mask_words
from harness.upstream.pools import SWAKVPool


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """What every layer of one planned forward reads; bs requests and T query rows.

    Args:
        geometry: the host's part.
        cache_seqlens_int32: [bs] int32, keys a request.
        cu_seqlens_q: [bs + 1] int32.
        cu_seqlens_k: [bs + 1] int32.
        page_table: [bs, width] int32, 0 behind a request's own pages.
        swa_page_table: the same in the SWA pool, or None where the pool has none.
        swa_out_cache_loc: [T] int64, write locations in the SWA pool, or None likewise.
        pad_rows: [bs * max_q_len] int64, the query row each row of padded queries repeats.
        unpad_rows: [T] int64, the padded row of each query row; bs * max_q_len for none.
        packed_mask: see ``packed_causal_mask``; None where the kernel is causal by itself.
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
    packed_mask: torch.Tensor | None = None


def packed_causal_mask(bs: int, q_len: int, device: torch.device | str) -> torch.Tensor:
    """[bs, q_len, 2 * ceil(q_len / 32)] uint16: bit j of row i is set where j <= i."""
    bit = torch.arange(16 * mask_words(q_len), device=device)
    query = torch.arange(q_len, device=device)
    words: torch.Tensor = (
        ((bit <= query[:, None]).long() << (bit % 16)).unflatten(1, (-1, 16)).sum(-1)
    )
    return words.to(torch.uint16).expand(bs, -1, -1).contiguous()


class MetadataWriter:
    """Allocates metadata for one request-to-token table and one pool, and fills it in place.

    Args:
        req_to_token: [requests, tokens] int32.
        page_size: tokens a page.
        width: columns of the page table.
        swa_pool: the pool whose mapping translates pages and write locations, or None.
        needs_packed_mask: whether the kernel asks for a mask where q_len > 1.
    """

    def __init__(
        self,
        req_to_token: torch.Tensor,
        *,
        page_size: int,
        width: int,
        swa_pool: SWAKVPool | None,
        needs_packed_mask: bool,
    ) -> None:
        self._req_to_token = req_to_token
        self._page_size = page_size
        self._swa_pool = swa_pool
        self._needs_packed_mask = needs_packed_mask
        self._starts = torch.arange(width, device=req_to_token.device) * page_size
        self._columns = self._starts.clamp_max(req_to_token.shape[1] - 1)

    def allocate(self, geometry: Geometry) -> Metadata:
        """Metadata with storage of its own."""
        bs, tokens = geometry.bs, geometry.num_tokens
        padded = (bs * geometry.max_q_len, tokens) if geometry.pads_queries else (0, 0)
        device, width = self._req_to_token.device, self._starts.shape[0]

        def int32(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        def int64(rows: int) -> torch.Tensor:
            return torch.zeros(rows, dtype=torch.int64, device=device)

        return Metadata(
            geometry=geometry,
            cache_seqlens_int32=int32(bs),
            cu_seqlens_q=int32(bs + 1),
            cu_seqlens_k=int32(bs + 1),
            page_table=int32(bs, width),
            swa_page_table=int32(bs, width) if self._swa_pool else None,
            swa_out_cache_loc=int64(tokens) if self._swa_pool else None,
            pad_rows=int64(padded[0]),
            unpad_rows=int64(padded[1]),
            packed_mask=self._mask(geometry),
        )

    def cut(self, buffers: Metadata, geometry: Geometry) -> Metadata:
        """The leading rows of larger metadata, sharing its storage; the mask is its own."""
        bs, tokens = geometry.bs, geometry.num_tokens
        padded = (bs * geometry.max_q_len, tokens) if geometry.pads_queries else (0, 0)
        swa_table, swa_loc = buffers.swa_page_table, buffers.swa_out_cache_loc
        return Metadata(
            geometry=geometry,
            cache_seqlens_int32=buffers.cache_seqlens_int32[:bs],
            cu_seqlens_q=buffers.cu_seqlens_q[: bs + 1],
            cu_seqlens_k=buffers.cu_seqlens_k[: bs + 1],
            page_table=buffers.page_table[:bs],
            swa_page_table=None if swa_table is None else swa_table[:bs],
            swa_out_cache_loc=None if swa_loc is None else swa_loc[:tokens],
            pad_rows=buffers.pad_rows[: padded[0]],
            unpad_rows=buffers.unpad_rows[: padded[1]],
            packed_mask=self._mask(geometry),
        )

    def _mask(self, geometry: Geometry) -> torch.Tensor | None:
        if not self._needs_packed_mask or geometry.is_ragged or geometry.max_q_len == 1:
            return None
        return packed_causal_mask(geometry.bs, geometry.max_q_len, self._req_to_token.device)

    def fill(
        self,
        metadata: Metadata,
        *,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        query_lens: torch.Tensor | None,
        out_cache_loc: torch.Tensor,
    ) -> None:
        """Write every tensor of the metadata; reads nothing on the host.

        Args:
            metadata: of bs requests and T query rows.
            req_pool_indices: [bs] int64.
            seq_lens: [bs] int64.
            query_lens: [bs] integers where queries are ragged, else None.
            out_cache_loc: at least [T] int64.
        """
        geometry = metadata.geometry
        lengths = seq_lens + geometry.kv_offset
        if query_lens is None:
            ends = torch.arange(1, geometry.bs + 1, device=seq_lens.device) * geometry.max_q_len
        else:
            ends = query_lens.cumsum(0)
            if geometry.pads_queries:
                lengths = seq_lens - query_lens + geometry.max_q_len
        metadata.cache_seqlens_int32.copy_(lengths)
        metadata.cu_seqlens_k[1:].copy_(lengths.cumsum(0))
        metadata.cu_seqlens_q[1:].copy_(ends)
        live = self._starts < lengths[:, None]
        pages = self._req_to_token[req_pool_indices[:, None], self._columns] // self._page_size
        metadata.page_table.copy_(pages.where(live, 0))
        self._fill_swa(metadata, live, out_cache_loc)
        if geometry.pads_queries:
            _fill_padding(metadata)

    def _fill_swa(
        self, metadata: Metadata, live: torch.Tensor, out_cache_loc: torch.Tensor
    ) -> None:
        table, loc = metadata.swa_page_table, metadata.swa_out_cache_loc
        if self._swa_pool is None or table is None or loc is None:
            return
        translate = self._swa_pool.translate_loc_from_full_to_swa
        slots = translate(metadata.page_table.long() * self._page_size)
        table.copy_((slots // self._page_size).where(live, 0))
        loc.copy_(translate(out_cache_loc[: loc.shape[0]]))


def _fill_padding(metadata: Metadata) -> None:
    """Index tensors between ragged query rows and rows padded to the longest request.

    A padded row repeats its request's last row; its result is dropped.
    """
    bs, longest = metadata.geometry.bs, metadata.geometry.max_q_len
    tokens = metadata.geometry.num_tokens
    cumulative = metadata.cu_seqlens_q.long()
    starts, ends = cumulative[:-1], cumulative[1:]
    slot = torch.arange(longest, device=cumulative.device)
    repeated = (starts[:, None] + slot).minimum(ends[:, None] - 1).clamp(0, tokens - 1)
    metadata.pad_rows.copy_(repeated.flatten())
    token = torch.arange(tokens, device=cumulative.device)
    request = torch.searchsorted(ends, token, right=True).clamp_max(bs - 1)
    row = request * longest + token - starts[request]
    metadata.unpad_rows.copy_(row.where(token < ends[-1], bs * longest))
