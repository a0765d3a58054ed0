"""How both families plan: geometry on the host, metadata on the device, captured buckets."""

from __future__ import annotations

import torch

from harness.attention.captured import Buckets, Place
from harness.attention.geometry import Planner, check_stride, query_lens
from harness.attention.metadata import Metadata
from harness.attention.metadata_writer import MetadataWriter, Source
from harness.attention.round_plan import RoundPlan
from harness.errors import CapacityError, ContractError, rejected
from harness.kernels.interface import Provider
from harness.upstream.allocator import ReqToTokenPool
from harness.upstream.base_attn_backend import AttentionBackend
from harness.upstream.forward_batch_info import ForwardBatch, ForwardMode
from harness.upstream.memory_pool import KVPool, SWAKVPool


class PlannedBackend(AttentionBackend):
    """Plans paged metadata without reading lengths on the host.

    Args:
        provider: the kernels.
        req_to_token_pool: the request-to-token table.
        token_to_kv_pool: the pool of the model this backend serves; the target's and the draft's
            differ, and only a backend whose own pool is an SWA pool translates locations.
        max_context_len: the model's context length.
        num_draft_tokens: query tokens a request in target_verify.
        speculative_num_steps: steps of a draft.
        skip_prefill: whether this backend serves draft steps only.
        device: of every buffer.
        speculative_step_id: i for step i of a multi-step draft, whose keys are seq_lens + i + 1.
        round_plan: what graphs of one round's phases share, None for metadata of their own.

    Attributes:
        shares_rounds: whether it plans right with a ``round_plan``; a peer that undoes what sharing
            saves does not.

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
        provider: Provider,
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
        self.provider = provider
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool = token_to_kv_pool
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
        self.writer = MetadataWriter(
            table,
            page_size=token_to_kv_pool.page_size,
            width=self._table_width(),
            swa_pool=self._swa_pool,
            needs_packed_mask=provider.capability.needs_packed_mask,
        )
        self._buckets = Buckets(self.writer, self.padded_modes)
        self._round_plan = round_plan

    @property
    def _swa_pool(self) -> SWAKVPool | None:
        pool = self.token_to_kv_pool
        return pool if isinstance(pool, SWAKVPool) else None

    def _table_width(self) -> int:
        page_size = self.token_to_kv_pool.page_size
        step = max(1, self.provider.capability.block_table_multiple // page_size)
        return -(-self.max_total_len // (page_size * step)) * step

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Plan an eager forward, on metadata of its own that no graph reads."""
        if batch.forward_mode.is_idle():
            self.forward_metadata = None
            return
        self._check(batch)
        geometry = self._planner.geometry(batch, in_capture=False)
        self.forward_metadata = self.writer.sheet(geometry).cut(geometry)
        self._announce(batch, None)
        self._fill(batch)

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
            self._buckets.capture(self._planner.geometry(batch, in_capture=True))
        metadata = self._buckets.find(batch.forward_mode, batch.seq_lens.shape[0])
        check_stride(batch, metadata.geometry)
        self.forward_metadata = metadata
        if not in_capture:
            self._announce(batch, metadata.geometry.bs)
        elif self._reads_the_drafts(batch):
            # No draft has filled it yet, and the warm-up reads it.
            self._fill(batch)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Fill the chosen metadata in place, as far as the round's draft has not."""
        if not batch.forward_mode.is_idle() and not self._reads_the_drafts(batch):
            shares = self._round_plan is not None and batch.forward_mode.is_draft_extend_v2()
            self._fill(batch, table=not shares)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Let captured graphs of so many requests and tokens have buffers, or their share."""
        self._buckets.allocate(max_bs, max_num_tokens)
        if self._round_plan is not None:
            for mode, place in self._round_plan.places(self.writer, max_bs).items():
                self.settle(mode, place)

    def settle(self, mode: ForwardMode, place: Place) -> None:
        """Plan graphs of a mode to come in a place that others share."""
        self._buckets.settle(mode, place)

    def _fill(self, batch: ForwardBatch, *, table: bool = True) -> None:
        metadata = self.planned(batch)
        bs = metadata.geometry.bs
        source = Source(
            req_pool_indices=batch.req_pool_indices[:bs],
            seq_lens=batch.seq_lens[:bs],
            query_lens=query_lens(batch)[:bs] if metadata.geometry.is_ragged else None,
            out_cache_loc=batch.out_cache_loc,
        )
        self.writer.fill((metadata,), source, table=table)

    def _reads_the_drafts(self, batch: ForwardBatch) -> bool:
        return self._round_plan is not None and batch.forward_mode.is_target_verify()

    def _announce(self, batch: ForwardBatch, bucket: int | None) -> None:
        # A step of the draft has no plan of its own; plain decoding is no part of a round.
        if self._round_plan is not None and not batch.forward_mode.is_decode():
            self._round_plan.announce(batch.forward_mode, bucket)

    def _check(self, batch: ForwardBatch) -> None:
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
