"""The metadata writer: allocates metadata and fills it in place, for eager and graph planning."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from harness.attention.geometry import Geometry
from harness.attention.metadata import CHUNK, FillInputs, Metadata, MetadataBuffers, TableLayout

TABLE_PROGRAMS, ROW_PROGRAMS = 2048, 8
"""Programs of the Triton fill for each table, and for each row of it at least."""


class MetadataWriter:
    """Fills metadata from one request-to-token table and one pool; reads nothing on the host.

    On a GPU the fill is one Triton launch, elsewhere it is torch operations; both leave the same.

    Args:
        layout: the page table's.
        needs_packed_mask: whether the kernel asks for a mask where q_len > 1.
        fused: whether to fill by Triton; by default on a GPU.
    """

    def __init__(
        self, layout: TableLayout, *, needs_packed_mask: bool, fused: bool | None = None
    ) -> None:
        device = layout.req_to_token.device
        self.layout = layout
        self._needs_packed_mask = needs_packed_mask
        self._fused = layout.req_to_token.is_cuda if fused is None else fused
        self._starts = torch.arange(layout.width, device=device) * layout.page_size
        self._columns = self._starts.clamp_max(layout.req_to_token.shape[1] - 1)

    def new_buffers(self, largest: Geometry, phases: int = 1) -> MetadataBuffers:
        """Memory for phases of at most this geometry."""
        rows, tokens = largest.bs, largest.num_tokens
        padded = (rows * largest.max_q_len, tokens) if largest.pads_queries else (0, 0)
        device, width = self.layout.req_to_token.device, self.layout.width
        has_swa = self.layout.swa_pool is not None
        parts = min(-(-width // CHUNK), max(ROW_PROGRAMS, TABLE_PROGRAMS // max(1, rows)))

        def int32(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        def int64(rows: int) -> torch.Tensor:
            return torch.zeros(rows, dtype=torch.int64, device=device)

        return MetadataBuffers(
            cache_seqlens=int32(phases, rows),
            cu_seqlens_q=int32(phases, rows + 1),
            cu_seqlens_k=int32(phases, rows + 1),
            page_table=int32(rows, width),
            swa_page_table=int32(rows, width) if has_swa else None,
            swa_out_cache_loc=int64(phases * tokens) if has_swa else None,
            pad_rows=int64(padded[0]),
            unpad_rows=int64(padded[1]),
            filled=int32(rows, parts),
            needs_packed_mask=self._needs_packed_mask,
        )

    def fill(self, phases: Sequence[Metadata], inputs: FillInputs, *, table: bool = True) -> None:
        """Write every tensor of the phases, which lie one after another in one MetadataBuffers.

        Args:
            phases: of one batch, with the same table.
            inputs: of the batch.
            table: whether the page table is due; lengths always are.
        """
        if self._fused:
            from harness.attention.triton_fill import fill_fused

            fill_fused(self.layout, phases, inputs, table=table)
        else:
            self._fill(phases, inputs, table=table)
        if phases[0].geometry.pads_queries:
            _fill_padding(phases[0])

    def _fill(self, phases: Sequence[Metadata], inputs: FillInputs, *, table: bool) -> None:
        for metadata in phases:
            _fill_lengths(metadata, inputs)
        if not table:
            return
        metadata = phases[0]
        extra = metadata.geometry.table_offset - metadata.geometry.kv_offset
        live = self._starts < (metadata.cache_seqlens_int32 + extra)[:, None]
        pages = self.layout.req_to_token[inputs.req_pool_indices[:, None], self._columns]
        metadata.page_table.copy_((pages // self.layout.page_size).where(live, 0))
        self._fill_swa(phases, live, inputs.out_cache_loc)

    def _fill_swa(
        self, phases: Sequence[Metadata], live: torch.Tensor, out_cache_loc: torch.Tensor
    ) -> None:
        table = phases[0].swa_page_table
        if self.layout.swa_pool is None or table is None:
            return
        translate = self.layout.swa_pool.translate_loc_from_full_to_swa
        slots = translate(phases[0].page_table.long() * self.layout.page_size)
        table.copy_((slots // self.layout.page_size).where(live, 0))
        tokens = phases[0].geometry.num_tokens
        for i, metadata in enumerate(phases):
            assert metadata.swa_out_cache_loc is not None
            own = out_cache_loc[i * tokens : (i + 1) * tokens]
            metadata.swa_out_cache_loc.copy_(translate(own))


def _fill_lengths(metadata: Metadata, inputs: FillInputs) -> None:
    geometry, seq_lens, query_lens = metadata.geometry, inputs.seq_lens, inputs.query_lens
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
