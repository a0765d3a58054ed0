"""The parts of a decoder layer: two kinds of attention and two of feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from harness.oracle.attention import attend, low_precision_attend, quantize_dequantize
from harness.oracle.rotary import rotate
from harness.oracle.weights import OracleWeights

OracleConfig = Mapping[str, Any]
Scales = tuple[float, float] | None


def rope_theta(config: OracleConfig) -> float:
    """The base of the rotary embedding.

    Raises:
        ValueError: the configuration asks for scaled rotary embedding.
    """
    rope: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rope_type = {kind!r} is not accepted; accepted: 'default'")
    return float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))


def gqa(
    weights: OracleWeights, x: torch.Tensor, config: OracleConfig, scales: Scales
) -> torch.Tensor:
    """Grouped-query attention of Llama over x [n, hidden], the whole sequence."""
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    q, k, v = (
        weights.linear(f"{name}_proj", x).unflatten(-1, (-1, dim)) for name in ("q", "k", "v")
    )
    positions = torch.arange(x.shape[0], device=x.device)
    q, k = (rotate(t, positions, theta=rope_theta(config), interleaved=False) for t in (q, k))
    if scales:
        k, v = quantize_dequantize(k, scales[0]), quantize_dequantize(v, scales[1])
    return weights.linear("o_proj", _causal(q, k, v, dim**-0.5).flatten(1))


def mla(
    weights: OracleWeights, x: torch.Tensor, config: OracleConfig, scales: Scales
) -> torch.Tensor:
    """Multi-head latent attention of DeepSeek, not absorbed, over x [n, hidden]."""
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    heads, eps = config["num_attention_heads"], config["rms_norm_eps"]
    if config.get("q_lora_rank") is None:
        q = weights.linear("q_proj", x)
    else:
        low = weights.rms_norm("q_a_layernorm", weights.linear("q_a_proj", x), eps)
        q = weights.linear("q_b_proj", low)
    q_nope, q_rope = q.unflatten(-1, (heads, nope + rope)).split((nope, rope), -1)
    joint = weights.linear("kv_a_proj_with_mqa", x)
    latent, k_rope = joint.split((config["kv_lora_rank"], rope), -1)
    latent = weights.rms_norm("kv_a_layernorm", latent, eps)
    positions = torch.arange(x.shape[0], device=x.device)
    theta, interleaved = rope_theta(config), config.get("rope_interleave", True)
    q_rope = rotate(q_rope, positions, theta=theta, interleaved=interleaved)
    k_rope = rotate(k_rope[:, None], positions, theta=theta, interleaved=interleaved)
    if scales:
        latent, k_rope = (quantize_dequantize(t, scales[0]) for t in (latent, k_rope))
    up = weights.linear("kv_b_proj", latent).unflatten(-1, (heads, -1))
    k = torch.cat((up[..., :nope], k_rope.expand(-1, heads, -1)), -1)
    out = _causal(torch.cat((q_nope, q_rope), -1), k, up[..., nope:], (nope + rope) ** -0.5)
    return weights.linear("o_proj", out.flatten(1))


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    if q.dtype == torch.float64:
        return attend(q, k, v, prefix_len=0, scale=scale)
    return low_precision_attend(q, k, v, prefix_len=0, scale=scale, dtype=q.dtype)


def mlp(weights: OracleWeights, x: torch.Tensor) -> torch.Tensor:
    """Gated feed-forward: down(silu(gate) * up)."""
    gated = F.silu(weights.linear("gate_proj", x)) * weights.linear("up_proj", x)
    return weights.linear("down_proj", gated)


def experts(weights: OracleWeights, x: torch.Tensor, config: OracleConfig) -> torch.Tensor:
    """DeepSeek-V3's mixture: routed experts of each token and the shared ones."""
    share = route(weights, x, config)
    out = mlp(weights.at("shared_experts"), x) if config.get("n_shared_experts") else x * 0
    for index in range(config["n_routed_experts"]):
        out = out + share[:, index, None] * mlp(weights.at(f"experts.{index}"), x)
    return out


def route(weights: OracleWeights, x: torch.Tensor, config: OracleConfig) -> torch.Tensor:
    """The weight of every expert for every token: [n, n_routed_experts], zero where not chosen.

    Experts are chosen by sigmoid affinity plus correction bias, among the ``topk_group`` groups
    whose two best experts add up highest; chosen ones are weighted by affinity alone.

    Raises:
        ValueError: another scoring function or choice than DeepSeek-V3's.
    """
    for field, accepted in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if config.get(field, accepted) != accepted:
            raise ValueError(f"{field} = {config[field]!r} is not accepted; accepted: {accepted!r}")
    wide = torch.promote_types(x.dtype, torch.float32)
    affinity = F.linear(x.to(wide), weights["gate.weight"].to(wide)).sigmoid()
    choice = affinity + weights["gate.e_score_correction_bias"].to(wide)
    by_group = torch.unflatten(choice, -1, (config.get("n_group") or 1, -1))
    best_two = by_group.topk(min(2, by_group.shape[-1]), -1).values.sum(-1)
    groups = best_two.topk(config.get("topk_group") or 1, -1).indices
    open_groups = torch.zeros_like(best_two, dtype=torch.bool).scatter(-1, groups, True)
    choice = by_group.masked_fill(~open_groups[..., None], -torch.inf).flatten(-2)
    chosen = choice.topk(config["num_experts_per_tok"], -1).indices
    share = torch.zeros_like(affinity).scatter(-1, chosen, affinity.gather(-1, chosen))
    if config.get("norm_topk_prob", True):
        share = share / share.sum(-1, keepdim=True)
    return share.to(x.dtype) * float(config.get("routed_scaling_factor", 1.0))
