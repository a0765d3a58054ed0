"""LlamaForCausalLM: grouped-query attention, rotary positions, RMSNorm, gated MLP."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from harness.engine.models.config import LlamaConfig
from harness.engine.models.decoder_layer import TargetDecoder
from harness.engine.models.layers import (
    LayerWeights,
    Rotation,
    rms_norm,
    rotate_halves,
    swiglu,
    under,
)
from harness.upstream.forward_batch_info import ForwardBatch
from harness.upstream.radix_attention import RadixAttention


class LlamaLayer:
    """One decoder layer; without ``input_layernorm.weight`` attention reads its input as it is."""

    def __init__(self, config: LlamaConfig, layer_id: int, weights: LayerWeights) -> None:
        self.eps = config.rms_norm_eps
        self.weights = weights
        self.attention = RadixAttention(
            layer_id=layer_id,
            tp_q_head_num=config.num_attention_heads,
            tp_k_head_num=config.num_key_value_heads,
            head_dim=config.head_dim,
            v_head_dim=config.head_dim,
            scaling=config.head_dim**-0.5,
        )

    def forward(self, x: torch.Tensor, by: Rotation, batch: ForwardBatch) -> torch.Tensor:
        """[T, hidden] to [T, hidden]."""
        before = self.weights.get("input_layernorm.weight")
        normed = x if before is None else rms_norm(x, before, self.eps)
        x = x + self._attend(normed, by, batch)
        after = self.weights["post_attention_layernorm.weight"]
        return x + swiglu(rms_norm(x, after, self.eps), self.weights)

    def _attend(self, x: torch.Tensor, by: Rotation, batch: ForwardBatch) -> torch.Tensor:
        layer, backend = self.attention, batch.attn_backend
        assert backend is not None
        q, k, v = (
            linear(x, self.weights[f"self_attn.{name}_proj.weight"]).view(
                x.shape[0], heads, layer.head_dim
            )
            for name, heads in (
                ("q", layer.tp_q_head_num),
                ("k", layer.tp_k_head_num),
                ("v", layer.tp_k_head_num),
            )
        )
        q, k = rotate_halves(q, by), rotate_halves(k, by)
        attended = backend.forward(q, k, v, layer, batch)
        return linear(attended, self.weights["self_attn.o_proj.weight"])


class LlamaForCausalLM(TargetDecoder):
    """The GQA target."""

    def __init__(self, config: LlamaConfig, weights: LayerWeights) -> None:
        layers = [
            LlamaLayer(config, i, under(weights, f"model.layers.{i}."))
            for i in range(config.num_hidden_layers)
        ]
        super().__init__(config, weights, layers)
