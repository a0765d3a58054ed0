"""Dense forward of both model families and both draft kinds, from raw checkpoint tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from harness.oracle import blocks
from harness.oracle.weights import OracleWeights


def _layer(
    weights: OracleWeights,
    x: torch.Tensor,
    config: Mapping[str, Any],
    scales: blocks.Scales,
    *,
    input_norm: bool = True,
) -> torch.Tensor:
    """One pre-norm layer over x [n, hidden]; its parts follow from its tensors."""
    eps = config["rms_norm_eps"]
    attention = weights.at("self_attn")
    serve = blocks.mla if "kv_b_proj.weight" in attention else blocks.gqa
    normed = weights.rms_norm("input_layernorm", x, eps) if input_norm else x
    x = x + serve(attention, normed, config, scales)
    normed = weights.rms_norm("post_attention_layernorm", x, eps)
    forward = weights.at("mlp")
    if "gate.weight" in forward:
        return x + blocks.experts(forward, normed, config)
    return x + blocks.mlp(forward, normed)


class Decoder:
    """A target model: Llama (GQA) or DeepSeek-V2/V3 (MLA).

    Args:
        config: the checkpoint's ``config.json``.
        tensors: the checkpoint's tensors under their own names.
        dtype: of weights and activations; float64 for the oracle, any other for the plain dense
            implementation by which budgets are measured.
        kv_scales: (k_scale, v_scale) where keys and values pass through an FP8 cache.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype = torch.float64,
        kv_scales: blocks.Scales = None,
    ) -> None:
        self.config = config
        self.weights = OracleWeights.at_dtype(tensors, dtype)
        self.dtype = dtype
        self.kv_scales = kv_scales
        tied = config.get("tie_word_embeddings") or "lm_head.weight" not in self.weights
        self.embedding = self.weights["model.embed_tokens.weight"]
        self.head = self.embedding if tied else self.weights["lm_head.weight"]

    @property
    def vocab_size(self) -> int:
        """Number of its tokens."""
        return len(self.embedding)

    def forward(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states after the last norm [n, hidden] and logits [n, vocab] of a whole sequence.

        Args:
            token_ids: [n] integer, positions 0 … n - 1.
        """
        x = F.embedding(token_ids.long(), self.embedding)
        for index in range(self.config["num_hidden_layers"]):
            x = _layer(self.weights.at(f"model.layers.{index}"), x, self.config, self.kv_scales)
        hidden = self.weights.rms_norm("model.norm", x, self.config["rms_norm_eps"])
        return hidden, F.linear(hidden, self.head)


class Draft:
    """A draft model: EAGLE (``fc``) or NextN (``eh_proj``); embedding and head are the target's.

    Args:
        config: the draft checkpoint's ``config.json``.
        tensors: the draft checkpoint's tensors under their own names.
        target: the model it drafts for; dtype and kv_scales are taken from it.
    """

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], target: Decoder
    ) -> None:
        self.config = config
        self.weights = OracleWeights.at_dtype(tensors, target.dtype)
        self.target = target

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [n, hidden] to draft on from, and logits [n, vocab].

        Args:
            token_ids: [n]; row t holds token t + 1 of the text, at position t.
            hidden: [n, hidden]; row t is the hidden state of token t.
        """
        embedded = F.embedding(token_ids.long(), self.target.embedding)
        serve = self._eagle if "fc.weight" in self.weights else self._nextn
        out = serve(embedded, hidden.to(self.target.dtype))
        return out, F.linear(out, self.target.head)

    def _eagle(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        x = self.weights.linear("fc", torch.cat((embedded, hidden), -1))
        for index in range(self.config["num_hidden_layers"]):
            layer = self.weights.at(f"layers.{index}")
            x = _layer(layer, x, self.config, self.target.kv_scales, input_norm=index > 0)
        return x

    def _nextn(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        layers = self.config["num_hidden_layers"]
        layer = self.weights.at(f"model.layers.{0 if layers == 1 else layers}")
        eps = self.config["rms_norm_eps"]
        both = layer.rms_norm("enorm", embedded, eps), layer.rms_norm("hnorm", hidden, eps)
        x = layer.linear("eh_proj", torch.cat(both, -1))
        x = _layer(layer, x, self.config, self.target.kv_scales)
        return layer.rms_norm("shared_head.norm", x, eps)
