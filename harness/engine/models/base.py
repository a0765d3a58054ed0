"""The interface of models."""

from __future__ import annotations

from typing import Protocol

import torch

from harness.upstream.forward_batch_info import ForwardBatch, LogitsProcessorOutput


class Model(Protocol):
    """A decoder whose attention runs on ``batch.attn_backend``."""

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch
    ) -> LogitsProcessorOutput:
        """Logits [T, vocab] float32 and hidden states [T, hidden] of every query token.

        A draft model also reads ``batch.spec_info.hidden_states`` [T, hidden], the hidden state of
        the token before each query token.
        """
        ...
