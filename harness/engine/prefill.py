"""Prefill of a target and, shifted by one token, of its draft; whole or in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from harness.engine.acceptance import last_ragged_rows
from harness.engine.batch_builder import BatchBuilder
from harness.engine.batch_state import BatchState, DraftState, concatenate, gather
from harness.engine.phases import Phase
from harness.engine.plan_stream import PlanStream, SameStream
from harness.errors import UsageError, rejected
from harness.upstream.base_attn_backend import AttentionBackend, SharedReadEnds
from harness.upstream.forward_batch_info import (
    EagleDraftExtendInput,
    ForwardBatch,
    LogitsProcessorOutput,
)


@dataclass(frozen=True)
class PrefillChunk:
    """The next tokens of every prompt that has some left.

    Args:
        requests: indices of those prompts.
        starts: tokens before the chunk, per request.
        ids: the chunk's tokens, per request.
        shifted: the tokens one position later, per request; one fewer where the prompt ends.
    """

    requests: list[int]
    starts: list[int]
    ids: list[list[int]]
    shifted: list[list[int]]

    @property
    def lens(self) -> list[int]:
        """Tokens per request."""
        return [len(ids) for ids in self.ids]

    @property
    def ending(self) -> list[int]:
        """Indices of the chunk's requests that end in it."""
        return [i for i, ids in enumerate(self.ids) if len(self.shifted[i]) < len(ids)]


def chunks(
    prompts: Sequence[Sequence[int]], size: int | None, cached: Sequence[int]
) -> Iterator[PrefillChunk]:
    """Prompts in chunks of at most size tokens, None for whole; one empty chunk without prompts.

    Args:
        prompts: their tokens.
        size: most tokens per request and chunk.
        cached: tokens per prompt that are in the cache already.
    """
    left = [len(prompt) - begin for prompt, begin in zip(prompts, cached, strict=True)]
    longest = max(left, default=0)
    step = size or max(longest, 1)
    for done in range(0, max(longest, 1), step):
        live = [i for i, tokens in enumerate(left) if tokens > done]
        starts = [cached[i] + done for i in live]
        places = list(zip(live, starts, strict=True))
        yield PrefillChunk(
            requests=live,
            starts=starts,
            ids=[list(prompts[i][start : start + step]) for i, start in places],
            shifted=[list(prompts[i][start + 1 : start + step + 1]) for i, start in places],
        )


def to_draft_state(output: LogitsProcessorOutput, rows: torch.Tensor) -> DraftState:
    """The draft's state after each selected row [bs] of its output."""
    hidden = output.hidden_states[rows]
    if output.topk_p is not None and output.topk_index is not None:
        return DraftState(output.topk_p, output.topk_index, hidden)
    logits = output.next_token_logits[rows]
    index = logits.argmax(-1, keepdim=True)
    return DraftState(logits.softmax(-1).gather(-1, index), index, hidden)


@dataclass(frozen=True)
class Prefill:
    """Prefill of a worker.

    Args:
        target: the target's phase.
        target_batches: batches over its pool.
        draft: the draft's phase, None without speculation.
        draft_batches: batches over the draft's pool.
        chunk_size: most tokens per request and forward, None for whole prompts.
        needs_cpu_seq_lens: whether a backend reads lengths on the host.
        streams: the worker's queues.

    Raises:
        UsageError: chunk_size is below 1.
    """

    target: Phase[LogitsProcessorOutput]
    target_batches: BatchBuilder
    draft: Phase[LogitsProcessorOutput] | None = None
    draft_batches: BatchBuilder | None = None
    chunk_size: int | None = None
    needs_cpu_seq_lens: bool = True
    streams: PlanStream = field(default_factory=SameStream)

    def __post_init__(self) -> None:
        if self.chunk_size is not None and self.chunk_size < 1:
            raise UsageError(rejected("chunk_size", self.chunk_size, ">= 1 or None"))

    def __call__(
        self, prompts: Sequence[Sequence[int]], rows: list[int], cached: Sequence[int]
    ) -> BatchState:
        """Compute prompts into pages that are reserved already; the bonus is the first token.

        The first ``cached`` tokens of each prompt have been computed before.
        """
        order: list[int] = []
        firsts: list[torch.Tensor] = []
        draft_states: list[DraftState] = []
        for chunk in chunks(prompts, self.chunk_size, cached):
            first, draft_state = self._chunk(chunk, [rows[i] for i in chunk.requests])
            order += [chunk.requests[i] for i in chunk.ending]
            firsts.append(first)
            draft_states += [draft_state] if draft_state else []
        back = torch.tensor(order, dtype=torch.int64, device=self.target_batches.device).argsort()
        lens = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64)
        return BatchState(
            rows=torch.tensor(rows, dtype=torch.int64, device=back.device),
            seq_lens=lens.to(back.device),
            bonus=torch.cat(firsts)[back],
            seq_lens_cpu=lens if self.needs_cpu_seq_lens else None,
            draft_state=gather(concatenate(draft_states), back) if draft_states else None,
        )

    def _chunk(
        self, chunk: PrefillChunk, rows: list[int]
    ) -> tuple[torch.Tensor, DraftState | None]:
        """The first token and the draft state of every request that ends in the chunk."""
        lens = torch.tensor(chunk.lens, device=self.target_batches.device)
        last = last_ragged_rows(lens)
        last = last[torch.tensor(chunk.ending, dtype=torch.int64, device=last.device)]
        reads = ("req_to_token",) if rows else ()
        output = self._run(
            self.target, lambda: self._batch(self.target_batches, chunk, chunk.ids, rows), reads
        )
        first = output.next_token_logits[last].argmax(-1)
        draft_batches = self.draft_batches
        if self.draft is None or draft_batches is None:
            return first, None
        padded = [[*ids, 0][:n] for ids, n in zip(chunk.shifted, chunk.lens, strict=True)]

        def follow() -> ForwardBatch:
            batch = self._batch(draft_batches, chunk, padded, rows)
            batch.input_ids[last] = first
            assert batch.extend_seq_lens is not None
            batch.spec_info = EagleDraftExtendInput(
                output.hidden_states, batch.extend_seq_lens, batch.extend_seq_lens_cpu
            )
            return batch

        return first, to_draft_state(self._run(self.draft, follow, reads), last)

    def _batch(
        self, batches: BatchBuilder, chunk: PrefillChunk, ids: list[list[int]], rows: list[int]
    ) -> ForwardBatch:
        flat = [token for tokens in ids for token in tokens]
        packed = torch.tensor(flat, dtype=torch.int64, device=batches.device)
        return batches.extend(rows, chunk.starts, chunk.lens, packed, self.needs_cpu_seq_lens)

    def _run(
        self,
        phase: Phase[LogitsProcessorOutput],
        lay_out: Callable[[], ForwardBatch],
        reads: tuple[str, ...],
    ) -> LogitsProcessorOutput:
        """Lay out, plan and run; the scheduler waits as long as the backend says."""

        def plan() -> ForwardBatch:
            batch = lay_out()
            phase.prepare(batch)
            return batch

        batch = self.streams.main("plan prefill", plan, reads=reads)
        backend = phase.backend
        assert isinstance(backend, AttentionBackend)
        ends = backend.resolve_prefill_shared_read_ends(
            batch, num_qo_tokens=batch.input_ids.shape[0]
        )
        return self.streams.main(
            "prefill",
            lambda: phase.run(batch),
            reads_ended=ends is SharedReadEnds.PRE_REPLAY,
        )
