"""FlashInfer's paged prefill on device lengths alone, so that a CUDA graph can hold it.

FlashInfer plans a schedule of query tiles on the host from the lengths of a batch. Here a schedule
is planned once for a geometry, as if every request had the most queries and pages that it may have,
and keys are never split. Which tiles and rows there really are, the kernel then reads from index
buffers on the device; tiles after a request's queries compute what nobody stores. The buffers are
refilled before each launch by a few recorded operations, without a read by the host.

The output of request r begins at row ``r * max_q_len`` of the kernel's output, as planned, and is
gathered from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from harness.kernels.packages import load
from harness.kernels.workspace import workspace

KERNEL = "flashinfer's paged prefill"


@dataclass(frozen=True, kw_only=True)
class PrefillGeometry:
    """Shape and options of a schedule; no value of a device tensor is in it."""

    batch_size: int
    max_q_len: int
    table_width: int
    page_size: int
    q_heads: int
    kv_heads: int
    head_dim: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    window_left: int
    has_sinks: bool

    @property
    def rows(self) -> int:
        """Query rows of the planned batch."""
        return self.batch_size * self.max_q_len


@dataclass(frozen=True)
class Filled:
    """Of whose numbers a plan's index buffers are, and what else follows from these.

    Args:
        forward: an eager one.
        block_tables: of its layers; those of a sliding window may have another.
        rows: [T] int64, of each query its row in the plan's output.
        padding: [T, 1, 1] bool, whether it is none.
    """

    forward: object
    block_tables: torch.Tensor
    rows: torch.Tensor
    padding: torch.Tensor

    def is_of(self, forward: object, block_tables: torch.Tensor) -> bool:
        """Whether a call finds the buffers filled; its tables are no copy of others."""
        here, there = self.block_tables.data_ptr(), block_tables.data_ptr()
        return self.forward is forward and here == there


class PrefillPlan:
    """One schedule, and the index buffers that its kernel reads.

    Args:
        geometry: of the calls.
        device: with its index.

    Attributes:
        filled: None for any numbers.
    """

    def __init__(self, geometry: PrefillGeometry, device: torch.device) -> None:
        self.geometry = geometry
        self.filled: Filled | None = None
        bs, width = geometry.batch_size, geometry.table_width
        requests = torch.arange(bs + 1, dtype=torch.int32, device=device)
        self._qo_indptr = requests * geometry.max_q_len
        self._kv_indptr = requests * width
        # One slot more than pages: columns of a table that hold no page are scattered there.
        self._kv_indices = torch.zeros(bs * width + 1, dtype=torch.int32, device=device)
        self._last_page_len = torch.full_like(requests[:bs], geometry.page_size)
        self._columns = torch.arange(width, device=device)
        self._wrapper = _wrapper(geometry, device)
        # Index tensors that are on the device are not copied: what is written to them later is
        # what the kernel reads.
        self._wrapper.plan(
            self._qo_indptr,
            self._kv_indptr,
            self._kv_indices,
            self._last_page_len,
            geometry.q_heads,
            geometry.kv_heads,
            geometry.head_dim,
            geometry.page_size,
            causal=True,
            sm_scale=1.0,
            window_left=geometry.window_left,
            q_data_type=geometry.q_dtype,
            kv_data_type=geometry.kv_dtype,
            disable_split_kv=True,
        )

    def fill(
        self, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, block_tables: torch.Tensor
    ) -> None:
        """Write the index buffers of a batch, in place."""
        page_size, spare = self.geometry.page_size, self._kv_indices.shape[0] - 1
        pages = (seq_lens + page_size - 1) // page_size
        self._qo_indptr.copy_(cu_seqlens_q)
        self._kv_indptr[1:].copy_(pages.cumsum(0))
        self._last_page_len.copy_((seq_lens - 1) % page_size + 1)
        slots = self._kv_indptr[:-1, None] + self._columns
        slots = slots.where(self._columns < pages[:, None], spare)
        self._kv_indices.scatter_(0, slots.flatten().long(), block_tables.flatten())

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """[rows, heads, head_dim], a request every max_q_len rows; the others are undefined.

        Args:
            q: [T, heads, head_dim], ragged as filled in.
            k_cache: [pages, page_size, kv_heads, head_dim].
            v_cache: likewise.
            scale: of the softmax argument.
            sinks: [heads] float32, if the geometry has them.
        """
        rows = self.geometry.rows
        if q.shape[0] != rows:
            q = pad(q, (0, 0, 0, 0, 0, rows - q.shape[0]))
        extra = () if sinks is None else (sinks, scale)
        # The kernel reads its index buffers before it waits for the kernels that wrote them, which
        # only an ordinary launch makes it do.
        out: torch.Tensor = self._wrapper.run(
            q,
            (k_cache, v_cache),
            *extra,
            q_scale=scale,
            out=torch.empty_like(q),
            enable_pdl=False,
        )
        return out


def _wrapper(geometry: PrefillGeometry, device: torch.device) -> Any:
    module = load("flashinfer.prefill", KERNEL)
    options: dict[str, Any] = {"kv_layout": "NHD", "backend": "fa2"}
    if geometry.has_sinks:
        options |= _with_sinks(geometry)
    scratch = workspace("prefill", device).scratch
    return module.BatchPrefillWithPagedKVCacheWrapper(scratch, **options)


def _with_sinks(geometry: PrefillGeometry) -> dict[str, Any]:
    """The variant with sinks, under a name of its own.

    The class that FlashInfer has for it names its binaries by query dtype and window alone, so
    that two head sizes in one process would share the first one's.
    """
    variants = load("flashinfer.jit.attention.variants", KERNEL)
    q, kv, dim = geometry.q_dtype, geometry.kv_dtype, geometry.head_dim
    windowed = geometry.window_left >= 0
    name = f"specgate_sinks_{q}_{kv}_{dim}_{'window' if windowed else 'full'}".replace(".", "_")
    arguments = [name, q, kv, q, torch.int32, dim, dim]
    arguments += [["sink"], ["float"], ["sm_scale"], ["double"]]
    arguments += ["AttentionSink", variants.attention_sink_decl["fa2"]]
    return {"jit_args": arguments, "jit_kwargs": {"use_sliding_window": windowed}}
