"""DeepseekV3ForCausalLM: multi-head latent attention, absorbed in every mode, dense MLPs."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from harness.engine.models.config import DeepseekConfig
from harness.engine.models.decoder_layer import TargetDecoder
from harness.engine.models.layers import (
    LayerWeights,
    Rotation,
    rms_norm,
    rotate_pairs,
    swiglu,
    under,
)
from harness.upstream.forward_batch_info import ForwardBatch
from harness.upstream.radix_attention import RadixAttention


class LatentAttention:
    """Attention over one latent and one rotary key per token.

    The key half of ``kv_b_proj`` moves into the query (``w_kc``) and its value half follows the
    attention (``w_vc``), so that the cache holds kv_lora_rank + qk_rope_head_dim values per token.
    """

    def __init__(self, config: DeepseekConfig, layer_id: int, weights: LayerWeights) -> None:
        self.config = config
        self.weights = weights
        halves = (config.qk_nope_head_dim, config.v_head_dim)
        per_head = weights["kv_b_proj.weight"].unflatten(0, (-1, sum(halves)))
        self.w_kc, self.w_vc = per_head.split(halves, 1)
        self.attention = RadixAttention(
            layer_id=layer_id,
            tp_q_head_num=config.num_attention_heads,
            tp_k_head_num=1,
            head_dim=config.kv_lora_rank + config.qk_rope_head_dim,
            v_head_dim=config.kv_lora_rank,
            scaling=(config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5,
        )

    def forward(self, x: torch.Tensor, by: Rotation, batch: ForwardBatch) -> torch.Tensor:
        """[T, hidden] to [T, hidden]."""
        config, backend = self.config, batch.attn_backend
        assert backend is not None
        tokens, heads = x.shape[0], config.num_attention_heads
        nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        q = linear(x, self.weights["q_proj.weight"]).view(tokens, heads, nope + rope)
        q_nope, q_rope = q.split((nope, rope), -1)
        compressed = linear(x, self.weights["kv_a_proj_with_mqa.weight"])[:, None]
        latent, k_rope = compressed.split((config.kv_lora_rank, rope), -1)
        latent = rms_norm(latent, self.weights["kv_a_layernorm.weight"], config.rms_norm_eps)
        attended = backend.forward(
            torch.bmm(q_nope.transpose(0, 1), self.w_kc).transpose(0, 1).contiguous(),
            latent,
            latent,
            self.attention,
            batch,
            q_rope=rotate_pairs(q_rope, by),
            k_rope=rotate_pairs(k_rope, by),
        ).view(tokens, heads, config.kv_lora_rank)
        values = torch.bmm(attended.transpose(0, 1), self.w_vc.transpose(1, 2)).transpose(0, 1)
        return linear(values.flatten(1), self.weights["o_proj.weight"])


class DeepseekLayer:
    """One decoder layer."""

    def __init__(self, config: DeepseekConfig, layer_id: int, weights: LayerWeights) -> None:
        self.eps = config.rms_norm_eps
        self.weights = weights
        self.self_attn = LatentAttention(config, layer_id, under(weights, "self_attn."))

    @property
    def attention(self) -> RadixAttention:
        """The layer as a backend sees it."""
        return self.self_attn.attention

    def forward(self, x: torch.Tensor, by: Rotation, batch: ForwardBatch) -> torch.Tensor:
        """[T, hidden] to [T, hidden]."""
        before = self.weights["input_layernorm.weight"]
        x = x + self.self_attn.forward(rms_norm(x, before, self.eps), by, batch)
        after = self.weights["post_attention_layernorm.weight"]
        return x + self.mlp(rms_norm(x, after, self.eps))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] to [T, hidden]."""
        return swiglu(x, self.weights)


class DeepseekV3ForCausalLM(TargetDecoder):
    """The MLA target."""

    def __init__(self, config: DeepseekConfig, weights: LayerWeights) -> None:
        layers = [
            DeepseekLayer(config, i, under(weights, f"model.layers.{i}."))
            for i in range(config.num_hidden_layers)
        ]
        super().__init__(config, weights, layers)
