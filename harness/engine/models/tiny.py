"""Configurations of pairs small enough for a test; every size differs from its neighbours.

Every expert is chosen for every token: a choice that rounding can flip would make the output
discontinuous and no error bound could hold.
"""

from __future__ import annotations

from typing import Any

_COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_GQA = _COMMON | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_MLA = _COMMON | {
    "num_attention_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
}

GQA_TARGET = _GQA | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}
GQA_DRAFT = _GQA | {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
MLA_TARGET = _MLA | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
}
MLA_DRAFT = _MLA | {
    "architectures": ["DeepseekV3ForCausalLMNextN"],
    "num_hidden_layers": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 28,
    "n_routed_experts": 3,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.5,
}

TINY_PAIRS = {"gqa": (GQA_TARGET, GQA_DRAFT), "mla": (MLA_TARGET, MLA_DRAFT)}
