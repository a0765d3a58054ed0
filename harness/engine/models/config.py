"""Model configurations, checked key by key."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from harness.errors import CheckpointError, rejected


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ABC):
    """Keys of Hugging Face's ``config.json`` that every decoder here has.

    Attributes:
        fixed: keys that change the computation, each with the one value that is implemented; an
            absent key means that value.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool

    fixed: ClassVar[Mapping[str, object]] = {
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_scaling": None,
    }

    @property
    @abstractmethod
    def rotary_dim(self) -> int:
        """Entries of a query or key that positions rotate."""

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        """The configuration in ``raw``.

        Raises:
            CheckpointError: a key is missing, of another type, or a value not implemented.
        """
        for key, implemented in cls.fixed.items():
            if raw.get(key, implemented) != implemented:
                raise CheckpointError(rejected(key, raw[key], repr(implemented)))
        return cls(**{f.name: _value(raw, f.name, str(f.type)) for f in fields(cls)})


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """``LlamaForCausalLM`` and its EAGLE draft."""

    num_key_value_heads: int
    head_dim: int

    @property
    def rotary_dim(self) -> int:
        """All of them."""
        return self.head_dim


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig(DecoderConfig):
    """``DeepseekV3ForCausalLM`` with a dense MLP in every layer and no query compression."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    first_k_dense_replace: int

    fixed: ClassVar[Mapping[str, object]] = {
        **DecoderConfig.fixed,
        "q_lora_rank": None,
        "rope_interleave": True,
    }

    @property
    def rotary_dim(self) -> int:
        """The part that is not compressed."""
        return self.qk_rope_head_dim

    def __post_init__(self) -> None:
        if self.first_k_dense_replace < self.num_hidden_layers:
            accepted = f">= num_hidden_layers = {self.num_hidden_layers}, every MLP dense"
            given = self.first_k_dense_replace
            raise CheckpointError(rejected("first_k_dense_replace", given, accepted))


@dataclass(frozen=True, kw_only=True)
class NextnConfig(DeepseekConfig):
    """``DeepseekV3ForCausalLMNextN``: one layer, a mixture of experts whatever the target is."""

    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float

    fixed: ClassVar[Mapping[str, object]] = {
        **DeepseekConfig.fixed,
        "num_hidden_layers": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }


def _value(raw: Mapping[str, Any], key: str, kind: str) -> Any:
    kinds = {"int": (int,), "float": (int, float), "bool": (bool,)}[kind]
    value = raw.get(key)
    if not isinstance(value, kinds) or (isinstance(value, bool) and kind != "bool"):
        raise CheckpointError(rejected(key, value, f"a value of type {kind}"))
    return value
