"""The worker without a draft: greedy decoding that speculative decoding must not differ from."""

from __future__ import annotations

import torch

from harness.engine.batch_builder import BatchBuilder
from harness.engine.batch_state import BatchState, StepOutput
from harness.engine.phases import TargetOnlyPhases
from harness.engine.plan_stream import SameStream
from harness.engine.prefill import Prefill
from harness.upstream.allocator import ReqToTokenPool
from harness.upstream.base_attn_backend import decide_needs_cpu_seq_lens
from harness.upstream.forward_batch_info import ForwardMode
from harness.upstream.memory_pool import KVPool


class TargetOnlyWorker:
    """Decodes one token of every request per round.

    Args:
        phases: its forwards.
        req_to_token_pool: slots of each request's tokens.
        kv_pool: the model's keys and values.
        chunk_size: most prompt tokens per request and forward, None for whole prompts.
    """

    headroom = 1

    def __init__(
        self,
        phases: TargetOnlyPhases,
        req_to_token_pool: ReqToTokenPool,
        kv_pool: KVPool,
        *,
        chunk_size: int | None = None,
    ) -> None:
        self.streams = SameStream()
        self._decode = phases.decode
        self._batches = BatchBuilder(req_to_token_pool, kv_pool)
        needs_cpu_seq_lens = decide_needs_cpu_seq_lens(phases.backends())
        self.prefill = Prefill(
            phases.extend, self._batches, None, None, chunk_size, needs_cpu_seq_lens
        )

    def step(self, state: BatchState) -> tuple[BatchState, StepOutput]:
        """One token of every request."""
        batch = self._batches.uniform(ForwardMode.DECODE, state, state.bonus, 1, advanced=1)
        self._decode.prepare(batch)
        token = self._decode.run(batch).next_token_logits.argmax(-1)
        after = BatchState(state.rows, batch.seq_lens, token, batch.seq_lens_cpu, None)
        return after, StepOutput(torch.ones_like(token, dtype=torch.int32), token[:, None])
