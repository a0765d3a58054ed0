"""LlamaForCausalLMEagle: an EAGLE-1 draft beside a Llama target."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from harness.engine.models.config import LlamaConfig
from harness.engine.models.decoder_layer import DecoderModel
from harness.engine.models.layers import LayerWeights, hidden_before, predict, under
from harness.engine.models.llama import LlamaForCausalLM, LlamaLayer
from harness.upstream.forward_batch_info import ForwardBatch, LogitsProcessorOutput


class LlamaForCausalLMEagle(DecoderModel):
    """Projects [embedding of a token, hidden state of the token before it] and runs its layers.

    There is no final norm: the draft's output stands in for the target's normed hidden state,
    both before the head and as the next step's input.
    """

    def __init__(
        self, config: LlamaConfig, weights: LayerWeights, target: LlamaForCausalLM
    ) -> None:
        layers = [
            LlamaLayer(config, i, under(weights, f"layers.{i}."))
            for i in range(config.num_hidden_layers)
        ]
        super().__init__(config, layers, target.embed_tokens, target.lm_head)
        self.weights = weights

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch
    ) -> LogitsProcessorOutput:
        """Logits and hidden states; reads ``batch.spec_info.hidden_states`` [T, hidden]."""
        pair = torch.cat((self.embed(input_ids), hidden_before(batch)), -1)
        x = linear(pair, self.weights["fc.weight"], self.weights["fc.bias"])
        return predict(self.run(x, positions, batch), self.lm_head)
