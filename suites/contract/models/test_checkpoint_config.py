"""An unsupported configuration is refused by key, value and what is accepted."""

from __future__ import annotations

import pytest

from fixtures.drivers.tiny_models import GQA_TARGET, MLA_DRAFT, MLA_TARGET
from harness.engine.models.checkpoint import parse_config
from harness.errors import CheckpointError

CONFIGS = {
    "missing": (GQA_TARGET, "head_dim", None, "a value of type int"),
    "float for int": (GQA_TARGET, "head_dim", 16.0, "a value of type int"),
    "bool for int": (GQA_TARGET, "hidden_size", True, "a value of type int"),
    "int for bool": (GQA_TARGET, "tie_word_embeddings", 0, "a value of type bool"),
    "bool for float": (GQA_TARGET, "rms_norm_eps", True, "a value of type float"),
    "text for float": (GQA_TARGET, "rope_theta", "1e4", "a value of type float"),
    "activation": (GQA_TARGET, "hidden_act", "gelu", "'silu'"),
    "scaled rotary": (GQA_TARGET, "rope_scaling", {"factor": 2}, "None"),
    "biased attention": (GQA_TARGET, "attention_bias", True, "False"),
    "compressed query": (MLA_TARGET, "q_lora_rank", 8, "None"),
    "experts in the target": (MLA_TARGET, "first_k_dense_replace", 1, ">= num_hidden_layers = 2"),
    "grouped experts": (MLA_DRAFT, "n_group", 8, "1"),
    "softmax routing": (MLA_DRAFT, "scoring_func", "softmax", "'sigmoid'"),
    "two draft layers": (MLA_DRAFT, "num_hidden_layers", 2, "1"),
}


@pytest.mark.parametrize(("raw", "key", "value", "accepted"), CONFIGS.values(), ids=CONFIGS)
def test_a_configuration_that_is_not_implemented_is_refused(raw, key, value, accepted):
    with pytest.raises(CheckpointError) as refusal:
        parse_config(raw | {key: value})
    expected = f"{key} = {value!r} is not accepted; accepted: {accepted}"
    assert str(refusal.value).startswith(expected)
