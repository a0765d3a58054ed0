"""Draft extend after a verify: over the accepted tokens alone (v1) or all of them (v2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harness.engine.acceptance import Acceptance, last_ragged_rows, last_uniform_rows
from harness.engine.batch_builder import BatchBuilder
from harness.engine.batch_state import BatchState, DraftState
from harness.engine.phases import Phase
from harness.engine.plan_stream import PlanStream
from harness.engine.prefill import to_draft_state
from harness.engine.spec_config import SpecVersion
from harness.upstream.base_attn_backend import AttentionBackend, SharedReadEnds
from harness.upstream.forward_batch_info import (
    EagleDraftExtendInput,
    ForwardBatch,
    ForwardMode,
    LogitsProcessorOutput,
)


@dataclass(frozen=True)
class DraftExtend:
    """Draft extend of a worker.

    Args:
        phase: the draft's forward.
        batches: batches over the draft's pool.
        version: v1 computes accepted rows, v2 all.
        needs_cpu_seq_lens: whether a backend reads lengths on the host.
        streams: the worker's queues.
    """

    phase: Phase[LogitsProcessorOutput]
    batches: BatchBuilder
    version: SpecVersion
    needs_cpu_seq_lens: bool
    streams: PlanStream

    def __call__(self, state: BatchState, accepted: Acceptance, hidden: torch.Tensor) -> DraftState:
        """The draft's state after the accepted tokens.

        Args:
            state: of the requests before the round.
            accepted: result of the round's verify.
            hidden: [bs * num_draft_tokens, hidden] of the target, one row per chain token.
        """
        lay_out = self._ragged if self.version is SpecVersion.V1 else self._uniform

        def plan() -> tuple[ForwardBatch, torch.Tensor]:
            batch, rows = lay_out(state, accepted, hidden)
            self.phase.prepare(batch)
            return batch, rows

        batch, rows = self.streams.main(
            "plan draft extend",
            plan,
            reads=("verified", "req_to_token"),
            writes=("draft extend batch",),
        )
        return self.streams.main(
            "draft extend",
            lambda: to_draft_state(self.phase.run(batch), rows),
            reads=("draft extend batch", "round metadata"),
            reads_ended=self._reads_ended(batch),
        )

    def _reads_ended(self, batch: ForwardBatch) -> bool:
        """Whether the scheduler may go on before the forward, the last reader of a round, runs.

        Where a graph's reads end inside it, this waits for its end: no graph here tells of them.
        """
        backend = self.phase.backend
        assert isinstance(backend, AttentionBackend)
        if self.phase.graph_bs(batch) is None:
            return False
        return backend.shared_read_ends(batch.forward_mode) is SharedReadEnds.PRE_REPLAY

    def _ragged(
        self, state: BatchState, accepted: Acceptance, hidden: torch.Tensor
    ) -> tuple[ForwardBatch, torch.Tensor]:
        """The accepted tokens alone, packed request after request."""
        kept, lens = accepted.emitted, accepted.accept_lens
        positions = self.batches.positions(state, kept.shape[1])
        seq_lens, lens_cpu = state.seq_lens + lens, lens.tolist()
        batch = self.batches.batch(
            ForwardMode.DRAFT_EXTEND,
            rows=state.rows,
            seq_lens=seq_lens,
            ids=accepted.predicted[kept],
            positions=positions[kept],
            slots=self.batches.slots(state.rows[:, None], positions)[kept],
            seq_lens_cpu=seq_lens.cpu() if self.needs_cpu_seq_lens else None,
            spec_info=EagleDraftExtendInput(hidden[kept.flatten()], lens, lens_cpu),
        )
        batch.extend_seq_lens, batch.extend_seq_lens_cpu = lens, lens_cpu
        return batch, last_ragged_rows(lens)

    def _uniform(
        self, state: BatchState, accepted: Acceptance, hidden: torch.Tensor
    ) -> tuple[ForwardBatch, torch.Tensor]:
        """Every chain token, accepted or not: the rejected ones are overwritten later."""
        width = accepted.predicted.shape[1]
        batch = self.batches.uniform(
            ForwardMode.DRAFT_EXTEND_V2,
            state,
            accepted.predicted.flatten(),
            width,
            advanced=width,
            spec_info=EagleDraftExtendInput(hidden, accepted.accept_lens, None, width),
        )
        return batch, last_uniform_rows(accepted.accept_lens, width)
