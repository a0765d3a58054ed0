"""The base class of both attention backends: planning, query layout and KV scales."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from harness.attention.captured import BufferSlice, CapturedMetadata
from harness.attention.geometry import Planner, check_stride, query_lens
from harness.attention.metadata import FillInputs, Metadata, TableLayout
from harness.attention.metadata_writer import MetadataWriter
from harness.attention.round_plan import RoundPlan
from harness.errors import CapacityError, ContractError, rejected
from harness.kernels.interface import Kernel
from harness.kernels.shape_checks import FP8
from harness.upstream.allocator import ReqToTokenPool
from harness.upstream.base_attn_backend import AttentionBackend, SharedReadEnds
from harness.upstream.forward_batch_info import ForwardBatch, ForwardMode
from harness.upstream.memory_pool import KVPool, SWAKVPool, quantize
from harness.upstream.radix_attention import RadixAttention

BUILT_ON = "the one that the backend was built on, since graphs and tables hold its addresses"


class PagedBackend(AttentionBackend):
    """Plans paged metadata without reading lengths on the host, and hands it to kernels.

    Args:
        kernel: the kernels.
        req_to_token_pool: the request-to-token table.
        token_to_kv_pool: the pool of the model this backend serves; the target's and the draft's
            differ, and only a backend whose own pool is an SWA pool translates locations.
        max_context_len: the model's context length.
        num_draft_tokens: query tokens per request in target_verify.
        speculative_num_steps: steps of a draft.
        skip_prefill: whether this backend serves draft steps only.
        device: of every buffer.
        speculative_step_id: i for step i of a multi-step draft, whose keys are seq_lens + i + 1.
        round_plan: what graphs of one round's phases share, None for metadata of their own.

    Attributes:
        shares_rounds: whether it plans right with a ``round_plan``; a baseline that undoes what
            sharing saves does not.

    Raises:
        CapacityError: the request-to-token table is narrower than a context and a draft round.
        ContractError: the request-to-token table is not int32.
    """

    needs_cpu_seq_lens = False
    shares_rounds = True
    padded_modes: frozenset[ForwardMode] = frozenset()

    def __init__(
        self,
        *,
        kernel: Kernel,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: KVPool,
        max_context_len: int,
        num_draft_tokens: int = 0,
        speculative_num_steps: int = 0,
        skip_prefill: bool = False,
        device: torch.device | str = "cpu",
        speculative_step_id: int | None = None,
        round_plan: RoundPlan | None = None,
    ) -> None:
        table = req_to_token_pool.req_to_token
        if table.dtype != torch.int32:
            raise ContractError(rejected("req_to_token.dtype", table.dtype, torch.int32))
        self.max_total_len = max_context_len + max(num_draft_tokens, speculative_num_steps)
        if table.shape[1] < self.max_total_len:
            accepted = f">= {self.max_total_len}, the context and one round of draft tokens"
            raise CapacityError(rejected("req_to_token columns", table.shape[1], accepted))
        self.kernel = kernel
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool = token_to_kv_pool
        self._built_on: dict[str, object] = {
            "req_to_token_pool": req_to_token_pool,
            "token_to_kv_pool": token_to_kv_pool,
        }
        self.max_context_len = max_context_len
        self.num_draft_tokens = num_draft_tokens
        self.skip_prefill = skip_prefill
        self.device = device
        self._planner = Planner(
            num_draft_tokens=num_draft_tokens,
            speculative_step_id=speculative_step_id,
            padded_modes=self.padded_modes,
        )
        self.forward_metadata: Metadata | None = None
        self._forward: object
        self._eager_forward: object | None
        self.begin_forward()
        layout = TableLayout(
            req_to_token=table,
            page_size=token_to_kv_pool.page_size,
            width=self._table_width(),
            swa_pool=self._swa_pool,
        )
        needs_packed_mask = kernel.capability.needs_packed_mask
        self.writer = MetadataWriter(layout, needs_packed_mask=needs_packed_mask)
        self._captured = CapturedMetadata(self.writer, self.padded_modes)
        self._round_plan = round_plan

    @property
    def _swa_pool(self) -> SWAKVPool | None:
        pool = self.token_to_kv_pool
        return pool if isinstance(pool, SWAKVPool) else None

    def _table_width(self) -> int:
        page_size = self.token_to_kv_pool.page_size
        step = max(1, self.kernel.capability.block_table_multiple // page_size)
        return -(-self.max_total_len // (page_size * step)) * step

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Plan an eager forward, on metadata of its own that no graph reads."""
        if batch.forward_mode.is_idle():
            self.forward_metadata = None
            return
        self._check(batch)
        geometry = self._planner.geometry(batch, in_capture=False)
        self.forward_metadata = self.writer.new_buffers(geometry).slice(geometry)
        self._check_phase_order(batch, None)
        self._fill(batch)
        self._eager_forward = self._forward

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Choose the metadata of this bucket; at capture, fix its geometry.

        Raises:
            ContractError: no buffers were allocated, the batch is not what was captured, or its
                round's draft fills another bucket.
            CapacityError: the batch is larger than the buffers, or its bucket was not captured.
        """
        if batch.forward_mode.is_idle():
            self.forward_metadata = None
            return
        self._check(batch)
        if in_capture:
            self._captured.capture(self._planner.geometry(batch, in_capture=True))
        self.begin_forward()
        metadata = self._captured.find(batch.forward_mode, batch.seq_lens.shape[0])
        check_stride(batch, metadata.geometry)
        self.forward_metadata = metadata
        if not in_capture:
            self._check_phase_order(batch, metadata.geometry.bs)
        elif self._reads_the_drafts(batch):
            # No draft has filled it yet, and the warm-up reads it.
            self._fill(batch)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Fill the chosen metadata in place, as far as the round's draft has not."""
        if batch.forward_mode.is_idle():
            return
        if self._reads_the_drafts(batch):
            self.begin_forward()
        else:
            shares = self._round_plan is not None and batch.forward_mode.is_draft_extend_v2()
            self._fill(batch, table=not shares)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate buffers for graphs of this size, or share the round's."""
        self._captured.allocate(max_bs, max_num_tokens)
        if self._round_plan is not None:
            for mode, shared in self._round_plan.slices(self.writer, max_bs).items():
                self.use_shared(mode, shared)

    def shared_read_ends(self, fm: ForwardMode) -> SharedReadEnds:
        """A prefill is planned eagerly; a graph reads the table unless the draft has filled it."""
        shares = self._round_plan is not None and (fm.is_target_verify() or fm.is_draft_extend_v2())
        return SharedReadEnds.PRE_REPLAY if shares or fm.is_extend() else SharedReadEnds.IN_REPLAY

    def use_shared(self, mode: ForwardMode, shared: BufferSlice) -> None:
        """Plan graphs of a mode captured from now on in buffers that others share."""
        self._captured.use_shared(mode, shared)

    def begin_forward(self) -> None:
        """Calls from now on belong to another forward than those before; a graph may record it."""
        self._forward, self._eager_forward = object(), None

    def _fill(self, batch: ForwardBatch, *, table: bool = True) -> None:
        self.begin_forward()
        metadata = self.planned(batch)
        bs = metadata.geometry.bs
        inputs = FillInputs(
            req_pool_indices=batch.req_pool_indices[:bs],
            seq_lens=batch.seq_lens[:bs],
            query_lens=query_lens(batch)[:bs] if metadata.geometry.is_ragged else None,
            out_cache_loc=batch.out_cache_loc,
        )
        self.writer.fill((metadata,), inputs, table=table)

    def _reads_the_drafts(self, batch: ForwardBatch) -> bool:
        return self._round_plan is not None and batch.forward_mode.is_target_verify()

    def _check_phase_order(self, batch: ForwardBatch, bucket: int | None) -> None:
        # A step of the draft has no plan of its own; plain decoding is no part of a round.
        if self._round_plan is not None and not batch.forward_mode.is_decode():
            self._round_plan.check_phase_order(batch.forward_mode, bucket)

    def _check(self, batch: ForwardBatch) -> None:
        for field, pool in self._built_on.items():
            if not getattr(batch, field) is getattr(self, field) is pool:
                raise ContractError(rejected(field, "another pool", BUILT_ON))
        if self.req_to_token_pool.req_to_token is not self.writer.layout.req_to_token:
            raise ContractError(rejected("req_to_token", "another table", BUILT_ON))
        for field in ("seq_lens", "req_pool_indices", "out_cache_loc"):
            if (dtype := getattr(batch, field).dtype) != torch.int64:
                raise ContractError(rejected(f"{field}.dtype", dtype, torch.int64))
        if batch.forward_mode.is_extend() and batch.seq_lens_cpu is not None:
            longest = max(batch.seq_lens_cpu.tolist(), default=0)
            if longest > self.max_total_len:
                raise CapacityError(rejected("seq_lens", longest, f"<= {self.max_total_len}"))

    def planned(self, batch: ForwardBatch) -> Metadata:
        """The metadata chosen for this forward.

        Raises:
            ContractError: none, or another mode's.
        """
        metadata = self.forward_metadata
        planned = None if metadata is None else metadata.geometry.forward_mode
        if metadata is None or planned is not batch.forward_mode:
            accepted = f"the planned one, {planned.name if planned else 'none: plan it first'}"
            raise ContractError(rejected("forward_mode", batch.forward_mode.name, accepted))
        return metadata

    def _kernel_query(self, q: torch.Tensor, layer: RadixAttention) -> torch.Tensor:
        """Contiguous, which a slice of a fused projection is not; FP8 where the kernel wants it."""
        if self._is_fp8(layer) and self.kernel.capability.casts_query_to_kv_dtype:
            q = quantize(q, 1.0, FP8)
        return q.contiguous()

    def _is_fp8(self, layer: RadixAttention) -> bool:
        pool = self._swa_pool
        own = self.token_to_kv_pool if pool is None else pool.pool_of(layer.layer_id)
        return own.dtype == FP8

    def _kv_scales(self, layer: RadixAttention) -> tuple[float, float]:
        """Scales of cached keys and values; only an FP8 cache was written with any."""
        return (layer.k_scale, layer.v_scale) if self._is_fp8(layer) else (1.0, 1.0)

    @staticmethod
    def _with_padding(out: torch.Tensor, rows: int) -> torch.Tensor:
        """[rows, heads * value dim]: the planned rows, and zeros after them."""
        flat = out.flatten(1)
        # ``pad`` copies where there is nothing to pad, too.
        return pad(flat, (0, 0, 0, rows - len(flat))) if rows > len(flat) else flat
