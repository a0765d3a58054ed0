"""Shapes of every tensor of a checkpoint, in Hugging Face's names, by architecture."""

from __future__ import annotations

from harness.engine.models.config import DecoderConfig, DeepseekConfig, LlamaConfig, NextnConfig

Shapes = dict[str, tuple[int, ...]]


def llama(config: LlamaConfig) -> Shapes:
    """LlamaForCausalLM."""
    layers: Shapes = {}
    for i in range(config.num_hidden_layers):
        layers |= _under(f"model.layers.{i}.", _llama_layer(config))
    return _target(config) | layers


def eagle(config: LlamaConfig) -> Shapes:
    """LlamaForCausalLMEagle: no embedding, head or final norm, and no norm before layer 0."""
    hidden = config.hidden_size
    shapes: Shapes = {"fc.weight": (hidden, 2 * hidden), "fc.bias": (hidden,)}
    for i in range(config.num_hidden_layers):
        shapes |= _under(f"layers.{i}.", _llama_layer(config))
    del shapes["layers.0.input_layernorm.weight"]
    return shapes


def deepseek(config: DeepseekConfig) -> Shapes:
    """DeepseekV3ForCausalLM, every MLP dense."""
    layer = _mla(config) | _mlp("mlp.", config.hidden_size, config.intermediate_size)
    layers: Shapes = {}
    for i in range(config.num_hidden_layers):
        layers |= _under(f"model.layers.{i}.", layer)
    return _target(config) | layers


def nextn(config: NextnConfig) -> Shapes:
    """DeepseekV3ForCausalLMNextN: no embedding or head of its own."""
    hidden, experts = config.hidden_size, config.n_routed_experts
    layer = _mla(config) | {
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "eh_proj.weight": (hidden, 2 * hidden),
        "shared_head.norm.weight": (hidden,),
        "mlp.gate.weight": (experts, hidden),
        "mlp.gate.e_score_correction_bias": (experts,),
    }
    for i in range(experts):
        layer |= _mlp(f"mlp.experts.{i}.", hidden, config.moe_intermediate_size)
    if config.n_shared_experts:
        shared = config.moe_intermediate_size * config.n_shared_experts
        layer |= _mlp("mlp.shared_experts.", hidden, shared)
    return _under("model.layers.0.", layer)


def _under(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


def _target(config: DecoderConfig) -> Shapes:
    table = (config.vocab_size, config.hidden_size)
    head: Shapes = {} if config.tie_word_embeddings else {"lm_head.weight": table}
    return {"model.embed_tokens.weight": table, "model.norm.weight": (config.hidden_size,)} | head


def _norms(hidden: int) -> Shapes:
    return {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}


def _mlp(prefix: str, hidden: int, inner: int) -> Shapes:
    return {
        f"{prefix}gate_proj.weight": (inner, hidden),
        f"{prefix}up_proj.weight": (inner, hidden),
        f"{prefix}down_proj.weight": (hidden, inner),
    }


def _llama_layer(config: LlamaConfig) -> Shapes:
    hidden = config.hidden_size
    query = config.num_attention_heads * config.head_dim
    key = config.num_key_value_heads * config.head_dim
    return (
        _norms(hidden)
        | _mlp("mlp.", hidden, config.intermediate_size)
        | {
            "self_attn.q_proj.weight": (query, hidden),
            "self_attn.k_proj.weight": (key, hidden),
            "self_attn.v_proj.weight": (key, hidden),
            "self_attn.o_proj.weight": (hidden, query),
        }
    )


def _mla(config: DeepseekConfig) -> Shapes:
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    return _norms(hidden) | {
        "self_attn.q_proj.weight": (heads * (nope + rope), hidden),
        "self_attn.kv_a_proj_with_mqa.weight": (rank + rope, hidden),
        "self_attn.kv_a_layernorm.weight": (rank,),
        "self_attn.kv_b_proj.weight": (heads * (nope + value), rank),
        "self_attn.o_proj.weight": (hidden, heads * value),
    }
