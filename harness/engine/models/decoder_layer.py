"""The base of all models: a stack of layers between an embedding and a head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch.nn.functional import embedding

from harness.engine.models.config import DecoderConfig
from harness.engine.models.layers import (
    LayerWeights,
    Rotation,
    inverse_frequencies,
    predict,
    rms_norm,
    rotation,
)
from harness.upstream.forward_batch_info import ForwardBatch, LogitsProcessorOutput
from harness.upstream.radix_attention import RadixAttention


class Layer(Protocol):
    """One decoder layer."""

    @property
    def attention(self) -> RadixAttention:
        """The layer's attention, for the backend and the KV pool."""
        ...

    def forward(self, x: torch.Tensor, by: Rotation, batch: ForwardBatch) -> torch.Tensor:
        """[T, hidden] to [T, hidden]."""
        ...


class DecoderModel(ABC):
    """Layers with their rotary positions, between an embedding and a head.

    Attributes:
        config: the checkpoint's configuration.
        layers: in order; ``layers[i].attention.layer_id == i``.
        embed_tokens, lm_head: [vocab, hidden]; a draft's are its target's.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layers: Sequence[Layer],
        embed_tokens: torch.Tensor,
        lm_head: torch.Tensor,
    ) -> None:
        self.config = config
        self.layers = layers
        self.embed_tokens, self.lm_head = embed_tokens, lm_head
        self.frequencies = inverse_frequencies(
            config.rotary_dim, config.rope_theta, embed_tokens.device
        )

    @abstractmethod
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch
    ) -> LogitsProcessorOutput:
        """Logits [T, vocab] float32 and hidden states [T, hidden] of every query token."""

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[T] to [T, hidden]."""
        return embedding(input_ids, self.embed_tokens)

    def run(self, x: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """All layers: [T, hidden] to [T, hidden]."""
        by = rotation(positions, self.frequencies)
        for layer in self.layers:
            x = layer.forward(x, by, batch)
        return x


class TargetDecoder(DecoderModel):
    """A model that reads tokens alone; its draft reads hidden states after the final norm."""

    def __init__(
        self, config: DecoderConfig, weights: LayerWeights, layers: Sequence[Layer]
    ) -> None:
        embed_tokens = weights["model.embed_tokens.weight"]
        super().__init__(config, layers, embed_tokens, weights.get("lm_head.weight", embed_tokens))
        self.norm = weights["model.norm.weight"]

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch
    ) -> LogitsProcessorOutput:
        """Logits and normed hidden states of every token."""
        x = self.run(self.embed(input_ids), positions, batch)
        return predict(rms_norm(x, self.norm, self.config.rms_norm_eps), self.lm_head)
