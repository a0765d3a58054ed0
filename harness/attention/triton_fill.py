"""The Triton kernel that fills all metadata of one batch's phases in one recorded launch.

The first programs write lengths, one phase each: a block scan over the requests. The others write
the page table: several programs per row take its chunks of columns in turn. They touch only columns
that are alive or were at the last fill, so a context costs what its live pages cost, however wide
the table. Each program keeps a record of its own of how many those were: no other program reads or
writes it, and a row has as many programs whatever the bucket, so no two fills disagree on whose a
column is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from harness.attention.metadata import CHUNK, FillInputs, Metadata, TableLayout

LOCATIONS = 1024
# A value that differs from batch to batch must not make another kernel: none is made in a capture.
VARIES = [
    "bs", "parts", "table_offset", "width", "request_stride", "request_width", "last_offset",
    "last_q_len", "first_offset", "first_q_len", "lengths_stride", "cu_stride", "num_locations",
]  # fmt: skip


@triton.jit
def _fill_lengths(  # type: ignore[no-untyped-def]
    phase, seq_lens, query_lens, lengths, lengths_stride, cu_q, cu_k, cu_stride, bs,
    first_offset, first_q_len, last_offset, last_q_len,
    PHASES: tl.constexpr, BLOCK: tl.constexpr, RAGGED: tl.constexpr, PADS: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    inside = lane < bs
    is_last = phase == PHASES - 1
    offset = tl.where(is_last, last_offset, first_offset + phase)
    q_len = tl.where(is_last, last_q_len, first_q_len)
    keys = tl.load(seq_lens + lane, mask=inside, other=0).to(tl.int32)
    if RAGGED:
        queries = tl.load(query_lens + lane, mask=inside, other=0).to(tl.int32)
        ends = tl.cumsum(queries, 0)
        keys = keys - queries + q_len if PADS else keys + offset
    else:
        ends = (lane + 1) * q_len
        keys = keys + offset
    tl.store(lengths + phase * lengths_stride + lane, keys, mask=inside)
    tl.store(cu_k + phase * cu_stride + 1 + lane, tl.cumsum(keys, 0), mask=inside)
    tl.store(cu_q + phase * cu_stride + 1 + lane, ends, mask=inside)


@triton.jit
def _fill_row(  # type: ignore[no-untyped-def]
    row, part, parts, req_to_token, request_stride, request_width, req_pool_indices, seq_lens,
    query_lens, page_table, width, filled, swa_mapping, swa_page_table, table_offset, last_q_len,
    CHUNK: tl.constexpr, PAGE: tl.constexpr, PADS: tl.constexpr, SWA: tl.constexpr,
):  # fmt: skip
    record = filled + row * parts + part
    before = tl.load(record)
    request = tl.load(req_pool_indices + row)
    keys = tl.load(seq_lens + row).to(tl.int32) + table_offset
    if PADS:
        keys = keys - tl.load(query_lens + row).to(tl.int32) + last_q_len
    # Every thread has read the record before one of them writes it; and all three loads are issued
    # before the first is waited for.
    tl.debug_barrier()
    live = tl.minimum((keys + PAGE - 1) // PAGE, width)
    touched = tl.maximum(live, before)
    slots = req_to_token + request.to(tl.int64) * request_stride
    start = row.to(tl.int64) * width
    for chunk in range(part, tl.cdiv(touched, CHUNK), parts):
        column = chunk * CHUNK + tl.arange(0, CHUNK)
        alive, inside = column < live, column < touched
        token = tl.minimum(column * PAGE, request_width - 1)
        page = tl.load(slots + token, mask=alive, other=0) // PAGE
        tl.store(page_table + start + column, page, mask=inside)
        if SWA:
            slot = tl.load(swa_mapping + page.to(tl.int64) * PAGE, mask=alive, other=0)
            tl.store(swa_page_table + start + column, (slot // PAGE).to(tl.int32), mask=inside)
    tl.store(record, live)


# A launch reads its arguments from memory, a few of them at a time: those that a program asks for
# before its first load stand first, side by side, which an H200's `specgate latency` shows.
@triton.jit(do_not_specialize=VARIES)
def fill_metadata(  # type: ignore[no-untyped-def]
    bs, parts, seq_lens, req_pool_indices, filled, table_offset, width, req_to_token,
    request_stride, request_width, page_table, last_offset, last_q_len, first_offset, first_q_len,
    lengths_stride, cu_stride, lengths, cu_q, cu_k, query_lens,
    swa_mapping, swa_page_table, out_cache_loc, swa_out_cache_loc, num_locations,
    PHASES: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, PAGE: tl.constexpr,
    LOCATIONS: tl.constexpr, RAGGED: tl.constexpr, PADS: tl.constexpr, SWA: tl.constexpr,
):  # fmt: skip
    job, part = tl.program_id(0), tl.program_id(1)
    if (job < PHASES) & (part == 0):
        _fill_lengths(
            job, seq_lens, query_lens, lengths, lengths_stride, cu_q, cu_k, cu_stride, bs,
            first_offset, first_q_len, last_offset, last_q_len, PHASES, BLOCK, RAGGED, PADS,
        )  # fmt: skip
    elif (job >= PHASES) & (job < PHASES + bs):
        _fill_row(
            job - PHASES, part, parts, req_to_token, request_stride, request_width,
            req_pool_indices, seq_lens, query_lens, page_table, width, filled,
            swa_mapping, swa_page_table, table_offset, last_q_len, CHUNK, PAGE, PADS, SWA,
        )  # fmt: skip
    elif SWA and (job >= PHASES + bs) & (part == 0):
        location = (job - PHASES - bs) * LOCATIONS + tl.arange(0, LOCATIONS)
        inside = location < num_locations
        full = tl.load(out_cache_loc + location, mask=inside, other=0)
        swa = tl.load(swa_mapping + full, mask=inside, other=0)
        tl.store(swa_out_cache_loc + location, swa, mask=inside)


def fill_fused(
    layout: TableLayout, phases: Sequence[Metadata], inputs: FillInputs, *, table: bool
) -> None:
    """One launch of ``fill_metadata``; see ``MetadataWriter.fill``.

    All but the last phase are draft steps, each with one key more than the one before.
    """
    first, last = phases[0], phases[-1]
    bs, parts = last.geometry.bs, last.filled.shape[1]
    swa = layout.swa_pool is not None and table
    locations = sum(metadata.geometry.num_tokens for metadata in phases) if swa else 0
    grid = (len(phases), 1)
    if table:
        grid = (len(phases) + bs + triton.cdiv(locations, LOCATIONS), parts)
    block = triton.next_power_of_2(max(1, bs))
    # The kernel steps by one; copies are made of nothing that runners hand in.
    seq_lens = unused = inputs.seq_lens.contiguous()
    arguments: dict[str, Any] = {
        "bs": bs,
        "parts": parts,
        "seq_lens": seq_lens,
        "req_pool_indices": inputs.req_pool_indices.contiguous(),
        "filled": first.filled,
        "table_offset": last.geometry.table_offset,
        "width": layout.width,
        "req_to_token": layout.req_to_token,
        "request_stride": layout.req_to_token.stride(0),
        "request_width": layout.req_to_token.shape[1],
        "page_table": first.page_table,
        "last_offset": last.geometry.kv_offset,
        "last_q_len": last.geometry.max_q_len,
        "first_offset": first.geometry.kv_offset,
        "first_q_len": first.geometry.max_q_len,
        "lengths_stride": _distance([metadata.cache_seqlens_int32 for metadata in phases]),
        "cu_stride": _distance([metadata.cu_seqlens_k for metadata in phases]),
        "lengths": first.cache_seqlens_int32,
        "cu_q": first.cu_seqlens_q,
        "cu_k": first.cu_seqlens_k,
        "query_lens": unused if inputs.query_lens is None else inputs.query_lens.contiguous(),
        "swa_mapping": layout.swa_pool.full_to_swa_index_mapping if layout.swa_pool else unused,
        "swa_page_table": first.page_table
        if first.swa_page_table is None
        else first.swa_page_table,
        "out_cache_loc": inputs.out_cache_loc.contiguous(),
        "swa_out_cache_loc": unused if first.swa_out_cache_loc is None else first.swa_out_cache_loc,
        "num_locations": locations,
    }
    fill_metadata[grid](
        **arguments,
        PHASES=len(phases),
        BLOCK=block,
        CHUNK=CHUNK,
        PAGE=layout.page_size,
        LOCATIONS=LOCATIONS,
        RAGGED=inputs.query_lens is not None,
        PADS=last.geometry.pads_queries,
        SWA=swa,
        num_warps=4 if block > 256 else 2 if table else 1,
    )


def _distance(tensors: Sequence[torch.Tensor]) -> int:
    """Elements from a tensor to the next, which are rows of one buffer; 0 for one tensor."""
    if len(tensors) == 1:
        return 0
    ahead = tensors[1].data_ptr() - tensors[0].data_ptr()
    return ahead // tensors[0].element_size()
