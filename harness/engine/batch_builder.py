"""Forward batches of every phase, built from the state of each request."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harness.engine.batch_state import BatchState
from harness.upstream.allocator import ReqToTokenPool
from harness.upstream.forward_batch_info import ForwardBatch, ForwardMode, SpecInput
from harness.upstream.memory_pool import KVPool


@dataclass(frozen=True)
class BatchBuilder:
    """Batches over one model's KV pool.

    Args:
        req_to_token_pool: slots of each request's tokens; shared by target and draft.
        kv_pool: the model's own keys and values.
    """

    req_to_token_pool: ReqToTokenPool
    kv_pool: KVPool

    @property
    def device(self) -> torch.device:
        """The device of the batches."""
        return self.req_to_token_pool.req_to_token.device

    def slots(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Slots (int64) of tokens at positions of request rows, which broadcast."""
        return self.req_to_token_pool.req_to_token[rows, positions].long()

    def extend(
        self,
        rows: list[int],
        starts: list[int],
        lens: list[int],
        ids: torch.Tensor,
        needs_cpu_seq_lens: bool,
    ) -> ForwardBatch:
        """Prefill: lens new tokens of each request after its first starts tokens.

        Args:
            rows: rows of the request-to-token table.
            starts: cached tokens of each request.
            lens: new tokens of each request.
            ids: [sum of lens] int64, request after request.
            needs_cpu_seq_lens: whether a backend reads lengths on the host.
        """
        ends = [start + n for start, n in zip(starts, lens, strict=True)]
        spans = [range(start, end) for start, end in zip(starts, ends, strict=True)]
        positions = self._int64([place for span in spans for place in span])
        owners = [row for row, n in zip(rows, lens, strict=True) for _ in range(n)]
        batch = self.batch(
            ForwardMode.EXTEND,
            rows=self._int64(rows),
            seq_lens=self._int64(ends),
            ids=ids,
            positions=positions,
            slots=self.slots(self._int64(owners), positions),
            seq_lens_cpu=torch.tensor(ends, dtype=torch.int64) if needs_cpu_seq_lens else None,
        )
        batch.extend_seq_lens = self._int64(lens).int()
        batch.extend_seq_lens_cpu = lens
        return batch

    def uniform(
        self,
        mode: ForwardMode,
        state: BatchState,
        ids: torch.Tensor,
        width: int,
        *,
        advanced: int = 0,
        spec_info: SpecInput | None = None,
    ) -> ForwardBatch:
        """The same number of tokens of each request, after its committed ones.

        Args:
            mode: the phase.
            state: of the requests.
            ids: [bs * width] int64, request after request.
            width: query tokens per request.
            advanced: how many of them the mode's seq_lens count.
            spec_info: the EAGLE input of the phase.
        """
        positions = self.positions(state, width)
        seq_lens_cpu = state.seq_lens_cpu
        return self.batch(
            mode,
            rows=state.rows,
            seq_lens=state.seq_lens + advanced,
            ids=ids,
            positions=positions.flatten(),
            slots=self.slots(state.rows[:, None], positions).flatten(),
            seq_lens_cpu=None if seq_lens_cpu is None else seq_lens_cpu + advanced,
            spec_info=spec_info,
        )

    def positions(self, state: BatchState, width: int) -> torch.Tensor:
        """[bs, width] int64 positions after the committed tokens."""
        return state.seq_lens[:, None] + torch.arange(width, device=self.device)

    def batch(
        self,
        mode: ForwardMode,
        *,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        seq_lens_cpu: torch.Tensor | None,
        spec_info: SpecInput | None = None,
    ) -> ForwardBatch:
        """A batch of the mode, or an idle one where there is no request."""
        return ForwardBatch(
            forward_mode=mode if len(rows) else ForwardMode.IDLE,
            batch_size=len(rows),
            input_ids=ids,
            positions=positions,
            req_pool_indices=rows,
            seq_lens=seq_lens,
            out_cache_loc=slots,
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool=self.kv_pool,
            seq_lens_cpu=seq_lens_cpu,
            seq_lens_sum=None if seq_lens_cpu is None else int(seq_lens_cpu.sum()),
            spec_info=spec_info,
        )

    def _int64(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
