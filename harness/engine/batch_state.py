"""The state of running requests between two rounds, and a round's output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DraftState:
    """The draft model's state after a round, one row per request.

    Args:
        topk_p: [bs, 1] float32, the probability of its next token.
        topk_index: [bs, 1] int64, that token.
        hidden_states: [bs, hidden] of the draft model.
    """

    topk_p: torch.Tensor
    topk_index: torch.Tensor
    hidden_states: torch.Tensor


@dataclass(frozen=True)
class BatchState:
    """bs running requests between two rounds.

    Args:
        rows: [bs] int64, rows of the request-to-token table.
        seq_lens: [bs] int64, committed tokens: those with keys and values in the target's pool.
        bonus: [bs] int64, the token emitted last; it follows the committed ones.
        seq_lens_cpu: [bs] int64 seq_lens on the host, None where no backend reads it. Under overlap
            an upper bound: the last round is counted as if everything had been accepted.
        draft_state: of the draft model; None without speculation.
    """

    rows: torch.Tensor
    seq_lens: torch.Tensor
    bonus: torch.Tensor
    seq_lens_cpu: torch.Tensor | None
    draft_state: DraftState | None

    @property
    def bs(self) -> int:
        """Requests."""
        return self.rows.shape[0]


@dataclass(frozen=True)
class StepOutput:
    """The tokens emitted by one round.

    Args:
        accept_lens: [bs] int32, tokens emitted per request.
        predicted: [bs, width] int64; the first accept_len of each row are emitted.
    """

    accept_lens: torch.Tensor
    predicted: torch.Tensor

    def tokens(self) -> list[list[int]]:
        """The emitted tokens on the host, request by request."""
        lens = self.accept_lens.tolist()
        return [row[:n] for row, n in zip(self.predicted.tolist(), lens, strict=True)]


def select(state: BatchState, chosen: Sequence[int]) -> BatchState:
    """These requests, in this order."""
    index = torch.tensor(chosen, dtype=torch.int64, device=state.rows.device)
    seq_lens_cpu, draft_state = state.seq_lens_cpu, state.draft_state
    return BatchState(
        rows=state.rows[index],
        seq_lens=state.seq_lens[index],
        bonus=state.bonus[index],
        seq_lens_cpu=None if seq_lens_cpu is None else seq_lens_cpu[index.cpu()],
        draft_state=draft_state and gather(draft_state, index),
    )


def gather(draft_state: DraftState, index: torch.Tensor) -> DraftState:
    """The rows of an int64 index."""
    return DraftState(
        draft_state.topk_p[index], draft_state.topk_index[index], draft_state.hidden_states[index]
    )


def join(first: BatchState, second: BatchState) -> BatchState:
    """The first's requests, then the second's, of the same worker."""
    seq_lens_cpu = [lens for lens in (first.seq_lens_cpu, second.seq_lens_cpu) if lens is not None]
    draft_states = [p for p in (first.draft_state, second.draft_state) if p is not None]
    return BatchState(
        rows=torch.cat((first.rows, second.rows)),
        seq_lens=torch.cat((first.seq_lens, second.seq_lens)),
        bonus=torch.cat((first.bonus, second.bonus)),
        seq_lens_cpu=torch.cat(seq_lens_cpu) if seq_lens_cpu else None,
        draft_state=concatenate(draft_states) if draft_states else None,
    )


def concatenate(draft_states: Sequence[DraftState]) -> DraftState:
    """The draft states of several batches as one."""
    return DraftState(
        torch.cat([p.topk_p for p in draft_states]),
        torch.cat([p.topk_index for p in draft_states]),
        torch.cat([p.hidden_states for p in draft_states]),
    )
