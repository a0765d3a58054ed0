"""Random kernel calls: ragged lengths, shuffled pages, poison in every unread slot."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from harness.core.case import Dtype, Family, KVDtype
from harness.errors import UsageError, rejected
from harness.kernels.interface import ContextCall, DecodeCall, Kernel
from harness.kernels.shape_checks import FP8, mask_words

ENTRIES = {
    "decode": Family.MHA,
    "context": Family.MHA,
    "mla_decode": Family.MLA,
    "mla_context": Family.MLA,
}
SPARE_COLUMNS = 3
PADDED_ROWS = 3


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a random call.

    Args:
        entry: of the kernel.
        lengths: keys per request.
        q_len: query tokens per request; context entries have up to as many, at least one.
        heads: query heads.
        kv_heads: of an MHA cache.
        head_dim: of an MHA cache.
        mla_dims: (kv_lora_rank, qk_rope_head_dim) of an MLA cache.
        page_size: tokens per page.
        dtype: of the query and the output.
        kv_dtype: of the cache.
        fp8_query: whether the query is FP8 too.
        window_left: keys to the left, -1 for all.
        sinks: whether there are attention sinks.
        masked: whether a decode call of many queries has its packed mask.
        bmm2_scale: of the output.
        poison: value of every slot that no request holds.
    """

    entry: str
    lengths: tuple[int, ...] = (300, 64, 131, 20)
    q_len: int = 1
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    mla_dims: tuple[int, int] = (512, 64)
    page_size: int = 64
    dtype: Dtype = Dtype.BF16
    kv_dtype: KVDtype = KVDtype.AUTO
    fp8_query: bool = False
    window_left: int = -1
    sinks: bool = False
    masked: bool = True
    bmm2_scale: float = 1.0
    poison: float = 100.0

    def __post_init__(self) -> None:
        if self.entry not in ENTRIES:
            raise UsageError(rejected("entry", self.entry, sorted(ENTRIES)))

    @property
    def family(self) -> Family:
        """The attention family of the entry."""
        return ENTRIES[self.entry]

    @property
    def q_lens(self) -> tuple[int, ...]:
        """Query tokens per request: uniform in decode entries, each its own in context entries."""
        if self.entry.endswith("decode"):
            return (self.q_len,) * len(self.lengths)
        return tuple(min(n, max(1, self.q_len - 2 * i)) for i, n in enumerate(self.lengths))

    @property
    def cache_dtype(self) -> torch.dtype:
        """The cache's dtype."""
        auto = self.kv_dtype is KVDtype.AUTO
        found: torch.dtype = getattr(torch, self.dtype if auto else self.kv_dtype)
        return found


@dataclass(frozen=True)
class RandomCall:
    """Arguments for one entry of a kernel.

    Args:
        entry: of the kernel.
        arguments: as the entry takes them.
    """

    entry: str
    arguments: DecodeCall | ContextCall

    def on(self, kernel: Kernel, **changes: Any) -> torch.Tensor:
        """The kernel's answer, with some arguments changed."""
        arguments = replace(self.arguments, **changes)
        out: torch.Tensor = getattr(kernel, self.entry)(arguments)
        return out


def draw(shape: Shape, device: torch.device | str = "cpu", seed: int = 0) -> RandomCall:
    """A random call; the same seed draws the same numbers on every device."""
    random = torch.Generator().manual_seed(seed)
    context, mla = shape.entry.endswith("context"), shape.family is Family.MLA
    dims, dtype = (sum(shape.mla_dims),) if mla else (shape.head_dim,), getattr(torch, shape.dtype)
    tables, live = _tables(shape, random)
    entry = dims if mla else (shape.kv_heads, *dims)
    caches = [torch.randn(*live.shape, *entry, generator=random) for _ in range(1 if mla else 2)]
    rows = sum(shape.q_lens) + (PADDED_ROWS if context else 0)
    q = torch.randn(rows, shape.heads, *dims, generator=random)
    for cache in caches:
        cache[~live] = shape.poison
    options: dict[str, Any] = {
        "q": q.to(FP8 if shape.fp8_query else dtype),
        "block_tables": tables,
        "seq_lens": torch.tensor(shape.lengths, dtype=torch.int32),
    }
    options |= _ragged(shape) if context else _uniform(shape)
    if not mla and shape.sinks:
        options["sinks"] = torch.randn(shape.heads, generator=random)
    placed: dict[str, Any] = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }
    arguments = (ContextCall if context else DecodeCall)(
        caches=tuple(cache.to(shape.cache_dtype).to(device) for cache in caches),
        kv_lora_rank=shape.mla_dims[0] if mla else 0,
        max_seq_len=max(shape.lengths),
        bmm1_scale=q.shape[-1] ** -0.5,
        bmm2_scale=shape.bmm2_scale,
        out_dtype=dtype,
        window_left=-1 if mla else shape.window_left,
        **placed,
    )
    return RandomCall(shape.entry, arguments)


def _tables(shape: Shape, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Block tables [bs, width] int32 on shuffled pages, and [pages, page_size] bool: held slots."""
    pages = [-(-length // shape.page_size) for length in shape.lengths]
    step = max(1, 128 // shape.page_size)
    width = -(-(max(pages) + SPARE_COLUMNS) // step) * step
    shuffled = torch.randperm(sum(pages), generator=random) + 1
    tables = torch.zeros(len(pages), width, dtype=torch.int32)
    live = torch.zeros(sum(pages) + 2, shape.page_size, dtype=torch.bool)
    for row, ids, length in zip(tables, shuffled.split(pages), shape.lengths, strict=True):
        row[: len(ids)] = ids
        slots = torch.arange(len(ids) * shape.page_size).view(-1, shape.page_size)
        live[ids] = slots < length
    return tables, live


def _uniform(shape: Shape) -> dict[str, Any]:
    options: dict[str, Any] = {"q_len_per_req": shape.q_len}
    if shape.family is Family.MHA:
        has_mask = shape.masked and shape.q_len > 1
        options["packed_mask"] = _causal_mask(shape) if has_mask else None
    return options


def _causal_mask(shape: Shape) -> torch.Tensor:
    """[bs, q_len, words] uint16: bit j of row i is set where j <= i."""
    words = torch.zeros(len(shape.lengths), shape.q_len, mask_words(shape.q_len), dtype=torch.int32)
    for row in range(shape.q_len):
        for bit in range(row + 1):
            words[:, row, bit // 16] |= 1 << (bit % 16)
    return words.to(torch.uint16)


def _ragged(shape: Shape) -> dict[str, Any]:
    def ends(counts: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor((0, *counts)).cumsum(0).to(torch.int32)

    return {
        "cu_seqlens_q": ends(shape.q_lens),
        "cu_seqlens_k": ends(shape.lengths),
        "max_q_len": max(shape.q_lens),
    }
