"""The probe model: attention alone, so that an error is an error of attention."""

from __future__ import annotations

import torch

from harness.core.case import Case, Family
from harness.differential.input_types import ROPE_THETA, ProbeWeights
from harness.upstream.forward_batch_info import (
    EagleDraftExtendInput,
    EagleDraftInput,
    ForwardBatch,
    LogitsProcessorOutput,
)
from harness.upstream.radix_attention import RadixAttention

PADDING_TOKEN = 0


class ProbeModel:
    """Looks up query, key and value by token id, rotates them by position, attends in each layer.

    Layers do not feed each other: the hidden state is their outputs side by side, plus half the
    incoming hidden state where the phase has one.

    Args:
        weights: of every trial of the case.
        case: that it serves.
        device: of its forwards.
        padding: query, key and value of token 0, which padded lanes have; None leaves its own.
    """

    def __init__(
        self,
        weights: ProbeWeights,
        case: Case,
        device: torch.device | str = "cpu",
        padding: float | None = None,
    ) -> None:
        dtype = getattr(torch, case.dtype)

        def placed(table: torch.Tensor) -> torch.Tensor:
            own = table.to(device=device, dtype=dtype, copy=padding is not None)
            if padding is not None:
                own[:, PADDING_TOKEN] = padding
            return own

        self.is_mla = weights.v is None
        if weights.q_rope is not None and weights.k_rope is not None:
            rotary, plain = (weights.q_rope, weights.k_rope), [weights.q, weights.k]
        else:
            assert weights.v is not None
            rotary, plain = (weights.q, weights.k), [weights.v]
        self.rotary = placed(torch.cat(rotary, 2))
        self.plain = [placed(table) for table in plain]
        self.lm_head = weights.lm_head.to(device)
        sinks = None if weights.sinks is None else weights.sinks.to(device)
        self.layers = [
            _layer(case, i, weights.scaling, None if sinks is None else sinks[i])
            for i in range(case.num_layers)
        ]

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch
    ) -> LogitsProcessorOutput:
        """Logits [T, V] float32 and hidden states [T, L * H * head_dim] of every query token."""
        hidden = torch.cat(self._attend(input_ids, positions, batch), -1)
        if isinstance(batch.spec_info, EagleDraftInput | EagleDraftExtendInput):
            incoming = batch.spec_info.hidden_states
            if incoming is not None:
                hidden = hidden + incoming * 0.5
        return LogitsProcessorOutput(
            next_token_logits=hidden.float() @ self.lm_head, hidden_states=hidden
        )

    def _attend(
        self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch
    ) -> list[torch.Tensor]:
        """Each layer's output. What all look up is rotated at once, queries and keys together."""
        assert batch.attn_backend is not None
        attend, heads = batch.attn_backend.forward, self.layers[0].tp_q_head_num
        rotated = rotate(self.rotary.index_select(1, input_ids), positions)
        plain = [table.index_select(1, input_ids) for table in self.plain]
        if self.is_mla:
            queries, keys = plain
            rows = zip(self.layers, queries, keys, rotated, strict=True)
            return [
                attend(q, k, k, layer, batch, q_rope=rope[:, :heads], k_rope=rope[:, heads:])
                for layer, q, k, rope in rows
            ]
        # Slices of a fused projection, as real models hand it over: the query is not contiguous.
        kv_heads = rotated.shape[2] - heads
        fused = torch.cat((rotated, *plain), 2).split((heads, kv_heads, kv_heads), 2)
        return [
            attend(q, k, v, layer, batch)
            for layer, q, k, v in zip(self.layers, *fused, strict=True)
        ]


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Neox rotary embedding of x [..., T, heads, dim] at positions [T], rounded once to its dtype.

    In float64: a rounding flipped here would be amplified by an FP8 cast and blamed on attention.
    """
    half = x.shape[-1] // 2
    exponent = torch.arange(half, device=x.device, dtype=torch.float64) / half
    angle = positions[:, None, None].double() * ROPE_THETA**-exponent
    cos, sin = angle.cos(), angle.sin()
    low, high = x.double().split(half, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(x.dtype)


def _layer(case: Case, layer_id: int, scaling: float, sinks: torch.Tensor | None) -> RadixAttention:
    mla = case.family is Family.MLA
    windowed = layer_id % 2 == 1
    k_scale, v_scale = case.kv_scales[layer_id]
    return RadixAttention(
        layer_id=layer_id,
        tp_q_head_num=case.num_q_heads,
        tp_k_head_num=1 if mla else case.num_kv_heads,
        head_dim=case.kv_lora_rank + case.qk_rope_head_dim if mla else case.head_dim,
        v_head_dim=case.kv_lora_rank if mla else case.head_dim,
        scaling=scaling,
        sliding_window_size=case.window_left if windowed else -1,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=sinks,
    )
