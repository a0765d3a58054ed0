"""A shape has the widths of the model that it names: they add up to its published size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fixtures.models.shapes import write
from fixtures.tables.shapes import SHAPES, Shape


def attention(c: dict[str, Any]) -> int:
    """Parameters of one layer's attention."""
    heads, hidden = c["num_attention_heads"], c["hidden_size"]
    if "kv_lora_rank" not in c:
        return hidden * c["head_dim"] * (2 * heads + 2 * c["num_key_value_heads"])
    rank = c["q_lora_rank"] or hidden
    query = heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"]) * rank
    query += hidden * rank if c["q_lora_rank"] else 0
    down = hidden * (c["kv_lora_rank"] + c["qk_rope_head_dim"])
    up = c["kv_lora_rank"] * heads * (c["qk_nope_head_dim"] + c["v_head_dim"])
    return query + down + up + heads * c["v_head_dim"] * hidden


def feed_forward(c: dict[str, Any], layer: int) -> int:
    """Parameters of one layer's experts, or of its dense layer."""
    if "n_routed_experts" not in c or layer < c["first_k_dense_replace"]:
        return 3 * int(c["hidden_size"] * c["intermediate_size"])
    experts = c["n_routed_experts"] + c["n_shared_experts"]
    return 3 * int(experts * c["hidden_size"] * c["moe_intermediate_size"])


@pytest.mark.parametrize("shape", SHAPES.values(), ids=lambda shape: shape.name)
def test_widths_add_up_to_the_published_size(shape: Shape) -> None:
    c = dict(shape.target)
    layers = sum(attention(c) + feed_forward(c, i) for i in range(c["num_hidden_layers"]))
    total = layers + 2 * c["vocab_size"] * c["hidden_size"]
    assert total == pytest.approx(shape.parameters, rel=0.01)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=lambda shape: shape.name)
def test_weights_of_two_servers_leave_a_fifth_of_their_gpus(shape: Shape) -> None:
    target, draft = (shape.configuration(draft=is_draft) for is_draft in (False, True))
    served = range(target["num_hidden_layers"])
    layers = sum(attention(target) + feed_forward(target, i) for i in served)
    layers += attention(draft) + feed_forward(draft, 0)
    of_each = 2 * (layers + 2 * target["vocab_size"] * target["hidden_size"])
    assert 2 * of_each < 0.8 * shape.gpus * 141e9


@pytest.mark.parametrize("shape", SHAPES.values(), ids=lambda shape: shape.name)
def test_a_draft_is_one_layer_of_its_targets_widths(shape: Shape, tmp_path: Path) -> None:
    folder = write(shape, tmp_path)
    target, draft = (
        json.loads((folder / part / "config.json").read_text(encoding="utf-8"))
        for part in ("target", "draft")
    )
    assert target == shape.configuration(draft=False)
    assert draft["num_hidden_layers"] == 1
    served = target["num_hidden_layers"]
    assert served == shape.cut_to or shape.cut_to is None
    is_whole = served == shape.target["num_hidden_layers"]
    assert is_whole or served > target["first_k_dense_replace"]
    differ = {name for name in target if target[name] != draft[name]}
    assert differ <= {
        "architectures",
        "num_hidden_layers",
        "num_nextn_predict_layers",
        "first_k_dense_replace",
    }
    assert shape.not_modelled
