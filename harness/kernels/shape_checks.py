"""Rules of a kernel call on shapes and dtypes, checked before launch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from harness.core.capability import Capability
from harness.core.case import Dtype, Family, KVDtype
from harness.errors import KernelRefusal, rejected
from harness.kernels.interface import AttentionCall, ContextCall, DecodeCall

FP8 = torch.float8_e4m3fn
ShapeCheck = tuple[bool, str, object, object]


def refuse_unless(kernel: str, checks: Iterable[ShapeCheck]) -> None:
    """Raise for the first row whose condition is false.

    Rows are (condition, argument, value, accepted) and are drawn one at a time, so that a row may
    rely on those before it.

    Raises:
        KernelRefusal: naming the kernel, the argument, its value and what is accepted.
    """
    for holds, argument, value, accepted in checks:
        if not holds:
            raise KernelRefusal(f"{kernel}: {rejected(argument, value, accepted)}")


def mask_words(q_len: int) -> int:
    """uint16 words of one row of a packed mask: 32 query tokens fill two words."""
    return 2 * -(-q_len // 32)


def query_and_cache(
    capability: Capability, family: Family, call: AttentionCall
) -> Iterator[ShapeCheck]:
    """Rules of the query and the cache."""
    name, q, keys = capability.name, call.q, call.caches[0]
    yield family in capability.families, "family", family.value, sorted(capability.families)
    yield q.dim() == 3, "q.dim", q.dim(), "3: tokens, heads, head_dim"
    packed = q.is_contiguous() if capability.needs_packed_query else q.stride(-1) == 1
    yield packed, "q.stride", q.stride(), f"a contiguous query on {name}"
    dim = 4 if family is Family.MHA else 3
    yield keys.dim() == dim, "cache.dim", keys.dim(), dim
    for cache in call.caches:
        yield cache.is_contiguous(), "cache.stride", cache.stride(), "a contiguous cache"
        yield cache.dtype == keys.dtype, "v_cache.dtype", cache.dtype, keys.dtype
        yield (
            cache.shape[:-1] == keys.shape[:-1],
            "v_cache.shape",
            tuple(cache.shape),
            f"{tuple(keys.shape[:-1])} and the value's head_dim",
        )
    yield from _dtypes(capability, q.dtype, keys.dtype)
    yield q.shape[2] == keys.shape[-1], "q.head_dim", q.shape[2], f"{keys.shape[-1]}, the cache's"
    dims, sizes = capability.head_dims, capability.page_sizes
    known = family is Family.MLA or not dims or q.shape[2] in dims
    yield known, "q.head_dim", q.shape[2], f"{sorted(dims)} on {name}"
    page_size, kv_heads = keys.shape[1], keys.shape[2] if family is Family.MHA else 1
    yield not sizes or page_size in sizes, "page_size", page_size, f"{sorted(sizes)} on {name}"
    yield q.shape[1] % kv_heads == 0, "q.heads", q.shape[1], f"a multiple of {kv_heads} KV heads"
    group = q.shape[1] // kv_heads
    yield (
        group <= capability.max_group_size,
        "group_size",
        group,
        f"<= {capability.max_group_size} on {name}",
    )
    most, elements = capability.max_fp8_group_elements, group * q.shape[2]
    yield (
        not most or keys.dtype != FP8 or elements <= most,
        "group_size * q.head_dim",
        elements,
        f"<= {most} on {name} with an FP8 cache",
    )


def _dtypes(capability: Capability, query: torch.dtype, cache: torch.dtype) -> Iterator[ShapeCheck]:
    served = _served(capability)
    if cache == FP8:
        kinds = sorted(capability.kv_dtypes)
        yield KVDtype.FP8 in capability.kv_dtypes, "k_cache.dtype", cache, kinds
        wanted = [FP8] if capability.casts_query_to_kv_dtype else served
        yield query in wanted, "q.dtype", query, f"{wanted} on {capability.name} with an FP8 cache"
    else:
        yield query in served, "q.dtype", query, f"{served} on {capability.name}"
        yield cache == query, "k_cache.dtype", cache, f"{query}, the query's, or {FP8}"


def latent(capability: Capability, call: AttentionCall) -> Iterator[ShapeCheck]:
    """Rules of absorbed MLA: the latent cache's columns, and what only MHA has."""
    rank, columns, dims = call.kv_lora_rank, call.caches[0].shape[-1], capability.mla_dims
    yield 1 <= rank <= columns, "kv_lora_rank", rank, f"1 … {columns}, the cache's"
    parts = (rank, columns - rank)
    accepted = f"{sorted(dims)} on {capability.name}"
    yield not dims or parts in dims, "kv_lora_rank, qk_rope_head_dim", parts, accepted
    yield call.window_left == -1, "window_left", call.window_left, "-1 for MLA"
    yield call.sinks is None, "sinks", "a tensor", "None for MLA"


def tables(capability: Capability, call: AttentionCall) -> Iterator[ShapeCheck]:
    """Rules of the block table and the lengths."""
    yield from _int32("block_tables", call.block_tables, 2)
    yield from _int32("seq_lens", call.seq_lens, 1)
    (rows, width), lengths = call.block_tables.shape, call.seq_lens.shape[0]
    yield lengths == rows, "seq_lens rows", lengths, f"{rows}, the rows of block_tables"
    step = max(1, capability.block_table_multiple // call.caches[0].shape[1])
    yield width > 0 and width % step == 0, "block_tables width", width, f"a multiple of {step}"


def _int32(name: str, tensor: torch.Tensor, dim: int) -> Iterator[ShapeCheck]:
    yield tensor.dtype == torch.int32, f"{name}.dtype", tensor.dtype, torch.int32
    yield tensor.dim() == dim, f"{name}.dim", tensor.dim(), dim
    yield tensor.is_contiguous(), f"{name}.stride", tensor.stride(), "contiguous"


def uniform(capability: Capability, call: DecodeCall) -> Iterator[ShapeCheck]:
    """Rules of a decode call's query rows."""
    limit, rows, q_len = capability.max_q_len, call.batch_size, call.q_len_per_req
    yield 1 <= q_len <= limit, "q_len_per_req", q_len, f"1 … {limit} on {capability.name}"
    accepted = f"{rows * q_len} = {rows} rows of block_tables x {q_len}"
    yield call.q.shape[0] == rows * q_len, "q rows", call.q.shape[0], accepted


def packed_mask(capability: Capability, call: DecodeCall) -> Iterator[ShapeCheck]:
    """Rules of the packed causal mask of a decode call."""
    mask, q_len = call.packed_mask, call.q_len_per_req
    if mask is None:
        optional = q_len == 1 or not capability.needs_packed_mask
        accepted = f"a mask on {capability.name} where q_len_per_req = {q_len}"
        yield optional, "packed_mask", None, accepted
        return
    shape = (call.batch_size, q_len, mask_words(q_len))
    yield mask.dtype == torch.uint16, "packed_mask.dtype", mask.dtype, torch.uint16
    yield tuple(mask.shape) == shape, "packed_mask.shape", tuple(mask.shape), shape
    yield mask.is_contiguous(), "packed_mask.stride", mask.stride(), "contiguous"


def ragged(call: ContextCall) -> Iterator[ShapeCheck]:
    """Rules of a context call's cumulative lengths."""
    rows = call.batch_size
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        cumulative: torch.Tensor = getattr(call, name)
        yield from _int32(name, cumulative, 1)
        count = cumulative.shape[0]
        yield count == rows + 1, f"{name} length", count, f"{rows + 1} = batch_size + 1"


def output(capability: Capability, call: AttentionCall) -> Iterator[ShapeCheck]:
    """Rules of the output."""
    served = _served(capability)
    yield call.out_dtype in served, "out_dtype", call.out_dtype, f"{served} on {capability.name}"


def window_and_sinks(
    capability: Capability, call: AttentionCall, q_len: int = 1
) -> Iterator[ShapeCheck]:
    """Rules of the sliding window and the attention sinks; ``q_len`` is of a decode call."""
    name, longest = capability.name, capability.max_window_q_len
    window_left, sinks = call.window_left, call.sinks
    yield window_left >= -1, "window_left", window_left, "-1 for none, or 0 and more"
    yield window_left < 0 or capability.window, "window_left", window_left, f"-1 on {name}"
    accepted = f"-1 on {name} where q_len_per_req > {longest}"
    yield window_left < 0 or q_len <= longest, "window_left", window_left, accepted
    if sinks is not None:
        heads = (call.q.shape[1],)
        yield capability.sinks, "sinks", tuple(sinks.shape), f"None on {name}"
        yield sinks.dtype == torch.float32, "sinks.dtype", sinks.dtype, torch.float32
        yield tuple(sinks.shape) == heads, "sinks.shape", tuple(sinks.shape), heads


def _served(capability: Capability) -> list[torch.dtype]:
    return [getattr(torch, dtype) for dtype in Dtype if dtype in capability.dtypes]
