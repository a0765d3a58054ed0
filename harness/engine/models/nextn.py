"""DeepseekV3ForCausalLMNextN: the multi-token-prediction layer as a draft beside an MLA target."""

from __future__ import annotations

import torch
from torch.nn.functional import linear, silu

from harness.engine.models.config import NextnConfig
from harness.engine.models.decoder_layer import DecoderModel
from harness.engine.models.deepseek import DeepseekLayer, DeepseekV3ForCausalLM
from harness.engine.models.layers import (
    LayerWeights,
    hidden_before,
    predict,
    rms_norm,
    swiglu,
    under,
)
from harness.upstream.forward_batch_info import ForwardBatch, LogitsProcessorOutput


class NextnLayer(DeepseekLayer):
    """A decoder layer whose MLP is a mixture of experts.

    Every expert computes every token and a [T, experts] matrix, zero where an expert was not
    chosen, mixes them: no shape depends on data.
    """

    def __init__(self, config: NextnConfig, layer_id: int, weights: LayerWeights) -> None:
        super().__init__(config, layer_id, weights)
        self.moe = config
        self.gate = weights["mlp.gate.weight"].float()
        experts = range(config.n_routed_experts)
        self.gate_proj, self.up_proj, down = (
            torch.cat([weights[f"mlp.experts.{i}.{part}.weight"] for i in experts])
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        self.down_proj = down.unflatten(0, (len(experts), -1)).transpose(1, 2)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] to [T, hidden]."""
        inner = silu(linear(x, self.gate_proj)) * linear(x, self.up_proj)
        inner = inner.unflatten(1, (len(self.down_proj), -1)).transpose(0, 1)
        experts = torch.bmm(inner, self.down_proj).float()
        routed = torch.einsum("te,etd->td", self.routing(x), experts).to(x.dtype)
        if not self.moe.n_shared_experts:
            return routed
        return routed + swiglu(x, self.weights, "mlp.shared_experts.")

    def routing(self, x: torch.Tensor) -> torch.Tensor:
        """[T, experts] float32: scaled shares of the chosen experts, zero elsewhere.

        The correction bias takes part in the choice and not in the share.
        """
        scores = linear(x.float(), self.gate).sigmoid()
        ranked = scores + self.weights["mlp.gate.e_score_correction_bias"]
        chosen = ranked.topk(self.moe.num_experts_per_tok, -1).indices
        shares = scores.gather(1, chosen)
        shares = shares / shares.sum(-1, keepdim=True) * self.moe.routed_scaling_factor
        return torch.zeros_like(scores).scatter(1, chosen, shares)


class DeepseekV3ForCausalLMNextN(DecoderModel):
    """Projects [normed embedding, normed hidden state of the token before] and runs one layer.

    Its hidden state is the one after ``shared_head.norm``, the head's input.
    """

    def __init__(
        self, config: NextnConfig, weights: LayerWeights, target: DeepseekV3ForCausalLM
    ) -> None:
        self.weights = under(weights, "model.layers.0.")
        layers = [NextnLayer(config, 0, self.weights)]
        super().__init__(config, layers, target.embed_tokens, target.lm_head)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch
    ) -> LogitsProcessorOutput:
        """Logits and hidden states; reads ``batch.spec_info.hidden_states`` [T, hidden]."""
        token = self._norm(self.embed(input_ids), "enorm")
        before = self._norm(hidden_before(batch), "hnorm")
        x = linear(torch.cat((token, before), -1), self.weights["eh_proj.weight"])
        x = self.run(x, positions, batch)
        return predict(self._norm(x, "shared_head.norm"), self.lm_head)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self.config.rms_norm_eps)
