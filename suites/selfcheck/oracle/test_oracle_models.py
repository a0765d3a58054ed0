"""The oracle's models do what their configurations and tensor names say."""

from __future__ import annotations

import math

import pytest
import torch

from harness.oracle import Decoder, Draft, attend, quantize_dequantize, rotate
from harness.oracle.blocks import experts, gqa, mla, mlp, rope_theta, route
from harness.oracle.weights import OracleWeights

LLAMA = {
    "hidden_size": 12,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 11,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
}
MLA = {
    "hidden_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "q_lora_rank": 8,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "vocab_size": 11,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
}
GROUPS = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 3,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}


def drawn(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * 0.4 for name, shape in shapes.items()}


def feed_forward(prefix, hidden=12, inner=10):
    names = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return {f"{prefix}.{name}.weight": shape for name, shape in names.items()}


def gqa_layer(prefix):
    shapes = {"q_proj": (24, 12), "k_proj": (12, 12), "v_proj": (12, 12), "o_proj": (12, 24)}
    norms = {f"{prefix}.{n}.weight": (12,) for n in ("input_layernorm", "post_attention_layernorm")}
    attention = {f"{prefix}.self_attn.{name}.weight": shape for name, shape in shapes.items()}
    return norms | attention | feed_forward(f"{prefix}.mlp")


def mla_layer(prefix):
    shapes = {
        "q_a_proj": (8, 12),
        "q_a_layernorm": (8,),
        "q_b_proj": (30, 8),
        "kv_a_proj_with_mqa": (14, 12),
        "kv_a_layernorm": (10,),
        "kv_b_proj": (33, 10),
        "o_proj": (12, 15),
    }
    norms = {f"{prefix}.{n}.weight": (12,) for n in ("input_layernorm", "post_attention_layernorm")}
    attention = {f"{prefix}.self_attn.{name}.weight": shape for name, shape in shapes.items()}
    return norms | attention | feed_forward(f"{prefix}.mlp")


ENDS = {
    "model.embed_tokens.weight": (11, 12),
    "model.norm.weight": (12,),
    "lm_head.weight": (11, 12),
}
LLAMA_SHAPES = ENDS | gqa_layer("model.layers.0") | gqa_layer("model.layers.1")
IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])


def norm(x, weight, eps=1e-5):
    return torch.stack([row / math.sqrt(float((row * row).mean()) + eps) for row in x]) * weight


def test_llama_layer_by_layer():
    tensors = {name: t.double() for name, t in drawn(LLAMA_SHAPES).items()}
    hidden, logits = Decoder(LLAMA, tensors).forward(IDS)
    x = tensors["model.embed_tokens.weight"][IDS]
    for i in range(2):
        own = {n.split(f"layers.{i}.")[1]: t for n, t in tensors.items() if f"layers.{i}." in n}
        y = norm(x, own["input_layernorm.weight"])
        q, k, v = (
            (y @ own[f"self_attn.{name}_proj.weight"].T).view(8, -1, 6) for name in ("q", "k", "v")
        )
        q, k = (rotate(t, torch.arange(8), theta=100.0, interleaved=False) for t in (q, k))
        out = attend(q, k, v, prefix_len=0, scale=6**-0.5).reshape(8, 24)
        x = x + out @ own["self_attn.o_proj.weight"].T
        y = norm(x, own["post_attention_layernorm.weight"])
        gate, up = y @ own["mlp.gate_proj.weight"].T, y @ own["mlp.up_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ own["mlp.down_proj.weight"].T
    torch.testing.assert_close(hidden, norm(x, tensors["model.norm.weight"]))
    torch.testing.assert_close(logits, hidden @ tensors["lm_head.weight"].T)
    assert logits.dtype == torch.float64


def test_later_tokens_change_no_earlier_row():
    model = Decoder(LLAMA, drawn(LLAMA_SHAPES))
    _, whole = model.forward(IDS)
    _, part = model.forward(IDS[:5])
    torch.testing.assert_close(whole[:5], part)


def test_biases_are_added_where_the_checkpoint_has_them():
    tensors = drawn(LLAMA_SHAPES)
    plain = Decoder(LLAMA, tensors).forward(IDS)[1]
    biased = tensors | {"model.layers.1.self_attn.v_proj.bias": torch.ones(12)}
    assert not torch.allclose(Decoder(LLAMA, biased).forward(IDS)[1], plain)


@pytest.mark.parametrize("said", [True, False], ids=["said", "left-out"])
def test_tied_embeddings(said):
    tensors = drawn(LLAMA_SHAPES)
    if not said:
        del tensors["lm_head.weight"]
    hidden, logits = Decoder(LLAMA | {"tie_word_embeddings": said}, tensors).forward(IDS)
    torch.testing.assert_close(logits, hidden @ tensors["model.embed_tokens.weight"].double().T)


def test_head_dim_follows_from_the_heads_where_it_is_not_given():
    config = {k: v for k, v in LLAMA.items() if k != "head_dim"} | {"num_attention_heads": 4}
    shapes = LLAMA_SHAPES | {
        f"model.layers.{i}.self_attn.{name}.weight": shape
        for i in range(2)
        for name, shape in {"q_proj": (12, 12), "k_proj": (6, 12), "v_proj": (6, 12)}.items()
    }
    shapes |= {f"model.layers.{i}.self_attn.o_proj.weight": (12, 12) for i in range(2)}
    tensors = drawn(shapes)
    explicit = Decoder(config | {"head_dim": 3}, tensors).forward(IDS)[1]
    torch.testing.assert_close(Decoder(config, tensors).forward(IDS)[1], explicit)


@pytest.mark.parametrize("q_lora_rank", [8, None])
@pytest.mark.parametrize("interleave", [True, False])
def test_latent_attention_equals_its_absorbed_form(q_lora_rank, interleave):
    """The way a serving engine computes it: queries carried into the latent space."""
    shapes = ENDS | mla_layer("model.layers.0")
    if q_lora_rank is None:
        shapes |= {"model.layers.0.self_attn.q_proj.weight": (30, 12)}
    tensors = {name: t.double() for name, t in drawn(shapes).items()}
    config = MLA | {"q_lora_rank": q_lora_rank, "rope_interleave": interleave}
    hidden, _ = Decoder(config, tensors).forward(IDS)

    own = {n.split("layers.0.")[1]: t for n, t in tensors.items() if "layers.0." in n}
    attention = {n.removeprefix("self_attn."): t for n, t in own.items()}
    x = tensors["model.embed_tokens.weight"][IDS]
    y = norm(x, own["input_layernorm.weight"])
    if q_lora_rank is None:
        q = y @ attention["q_proj.weight"].T
    else:
        low = norm(y @ attention["q_a_proj.weight"].T, attention["q_a_layernorm.weight"])
        q = low @ attention["q_b_proj.weight"].T
    q = q.view(8, 3, 10)
    joint = y @ attention["kv_a_proj_with_mqa.weight"].T
    latent = norm(joint[:, :10], attention["kv_a_layernorm.weight"])
    turn = {"theta": 100.0, "interleaved": interleave}
    q_rope = rotate(q[..., 6:], torch.arange(8), **turn)
    k_rope = rotate(joint[:, None, 10:], torch.arange(8), **turn)
    up = attention["kv_b_proj.weight"].view(3, 11, 10)
    absorbed = torch.cat((torch.einsum("nhd,hdl->nhl", q[..., :6], up[:, :6]), q_rope), -1)
    keys = torch.cat((latent[:, None], k_rope), -1)
    out = attend(absorbed, keys, latent[:, None], prefix_len=0, scale=10**-0.5)
    out = torch.einsum("nhl,hdl->nhd", out, up[:, 6:]).reshape(8, 15)
    x = x + out @ attention["o_proj.weight"].T
    y = norm(x, own["post_attention_layernorm.weight"])
    x = x + mlp(OracleWeights(own, "mlp."), y)
    torch.testing.assert_close(hidden, norm(x, tensors["model.norm.weight"]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_correction_biases_stay_wide_at_a_narrow_dtype(dtype):
    # Two experts whose biases are one number in 16 bits.
    bias = torch.tensor([1.0, 1.00001])
    tensors = {
        "mlp.gate.e_score_correction_bias": bias,
        "mlp.gate.weight": torch.zeros(2, 1),
    }
    weights = OracleWeights.at_dtype(tensors, dtype).at("mlp")
    assert weights["gate.weight"].dtype == dtype
    config = {"n_routed_experts": 2, "num_experts_per_tok": 1}
    share = route(weights, torch.ones(1, 1, dtype=dtype), config)
    said = "experts are chosen by their biases as the checkpoint has them"
    assert share.tolist() == [[0, 1]], said


def test_experts_are_chosen_by_group_and_weighted_by_affinity():
    # Affinity of expert 0 … 5; groups are (0, 1), (2, 3), (4, 5).
    affinity = torch.tensor([0.9, 0.1, 0.5, 0.6, 0.95, 0.02], dtype=torch.float64)
    gate = torch.logit(affinity)[:, None]
    bias = torch.tensor([0.0, 0.0, 0.0, 0.05, 0.0, 0.0])
    weights = OracleWeights({"gate.weight": gate, "gate.e_score_correction_bias": bias})
    x = torch.ones(1, 1, dtype=torch.float64)
    # With the bias the groups add up to 1.0, 1.15 and 0.97: the third, with the best expert of
    # all, is closed; among the others 0 and 3 are best and weigh 0.9 and 0.6, without the bias.
    expected = torch.tensor([[0.9, 0, 0, 0.6, 0, 0]]) * 2.5 / 1.5
    routed = route(weights, x, GROUPS)
    said = "affinities without bias, normalized and times routed_scaling_factor, weigh the experts"
    torch.testing.assert_close(routed, expected.double(), msg=f"{said}: {routed.tolist()}")
    raw = route(weights, x, GROUPS | {"norm_topk_prob": False, "routed_scaling_factor": 1.0})
    said = f"without norm_topk_prob experts are weighted by their affinities: {raw.tolist()}"
    assert raw[0].tolist() == pytest.approx([0.9, 0, 0, 0.6, 0, 0]), said
    # The bias alone lets expert 2 overtake expert 3.
    weights = OracleWeights({"gate.weight": gate, "gate.e_score_correction_bias": bias + 0})
    weights["gate.e_score_correction_bias"][2] = 0.45
    chosen = route(weights, x, GROUPS)[0].nonzero().flatten().tolist()
    said = "e_score_correction_bias is added to the affinities that experts are chosen by"
    assert chosen == [0, 2], f"{said}: experts [0, 2], not {chosen}"
    # Equal biases choose nothing else, also where they make every score negative.
    for shift in (0.0, -2.0):
        level = torch.full((6,), shift)
        weights = OracleWeights({"gate.weight": gate, "gate.e_score_correction_bias": level})
        chosen = route(weights, x, GROUPS)[0].nonzero().flatten().tolist()
        said = f"no closed group's expert is chosen, e_score_correction_bias being {shift} for all"
        assert chosen == [0, 3], f"{said}: experts [0, 3], not {chosen}"


def test_experts_whose_groups_are_null_are_one_group():
    weights = OracleWeights(
        {
            "gate.weight": torch.tensor([[0.0], [3.0], [1.0], [2.0]]),
            "gate.e_score_correction_bias": torch.zeros(4),
        }
    )
    config = {"num_experts_per_tok": 2, "n_group": None, "topk_group": None}
    said = "a checkpoint that writes null for n_group and topk_group closes no expert out"
    try:
        share = route(weights, torch.ones(1, 1), config)
    except TypeError as error:
        pytest.fail(f"{said}, and ends with no {error!r}")
    assert share[0].nonzero().flatten().tolist() == [1, 3], said


@pytest.mark.parametrize("shared", [0, 1])
def test_experts_add_up(shared):
    shapes = {"gate.weight": (6, 12), "gate.e_score_correction_bias": (6,)}
    for i in range(6):
        shapes |= feed_forward(f"experts.{i}")
    shapes |= feed_forward("shared_experts")
    tensors = {name: t.double() for name, t in drawn(shapes).items()}
    weights = OracleWeights(tensors)
    x = torch.randn(5, 12, dtype=torch.float64)
    share = route(weights, x, GROUPS)
    assert (share > 0).sum(-1).tolist() == [2] * 5
    expected = shared * mlp(weights.at("shared_experts"), x)
    for token in range(5):
        for i in share[token].nonzero().flatten().tolist():
            expected[token] += share[token, i] * mlp(weights.at(f"experts.{i}"), x[token])
    torch.testing.assert_close(experts(weights, x, GROUPS | {"n_shared_experts": shared}), expected)


EAGLE = {"fc.weight": (12, 24), "fc.bias": (12,)} | {
    name: shape for name, shape in gqa_layer("layers.0").items() if "input_layernorm" not in name
}


def test_eagle_mixes_embedding_and_hidden_state_and_has_no_first_or_last_norm():
    target = Decoder(LLAMA, drawn(LLAMA_SHAPES))
    tensors = {name: t.double() for name, t in drawn(EAGLE, seed=7).items()}
    incoming = torch.randn(8, 12, dtype=torch.float64)
    hidden, logits = Draft(LLAMA | {"num_hidden_layers": 1}, tensors, target).forward(IDS, incoming)

    both = torch.cat((target.embedding[IDS], incoming), -1)
    x = both @ tensors["fc.weight"].T + tensors["fc.bias"]
    q, k, v = (
        (x @ tensors[f"layers.0.self_attn.{name}_proj.weight"].T).view(8, -1, 6)
        for name in ("q", "k", "v")
    )
    q, k = (rotate(t, torch.arange(8), theta=100.0, interleaved=False) for t in (q, k))
    out = attend(q, k, v, prefix_len=0, scale=6**-0.5).reshape(8, 24)
    x = x + out @ tensors["layers.0.self_attn.o_proj.weight"].T
    y = norm(x, tensors["layers.0.post_attention_layernorm.weight"])
    x = x + mlp(OracleWeights(tensors, "layers.0.mlp."), y)
    torch.testing.assert_close(hidden, x)
    torch.testing.assert_close(logits, x @ target.head.T)


def test_layers_of_an_eagle_draft_behind_the_first_norm_their_input():
    target = Decoder(LLAMA, drawn(LLAMA_SHAPES))
    one = drawn(EAGLE, seed=7)
    second = {n.replace("layers.0", "layers.1"): s for n, s in gqa_layer("layers.0").items()}
    # What is normed by zeros is zero, and so is the attention to it.
    two = one | drawn(second, seed=9) | {"layers.1.input_layernorm.weight": torch.zeros(12)}
    two["layers.1.mlp.down_proj.weight"] = torch.zeros(12, 10)
    incoming = torch.randn(8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected, found = (
        Draft(LLAMA | {"num_hidden_layers": layers}, tensors, target).forward(IDS, incoming)[0]
        for layers, tensors in ((1, one), (2, two))
    )
    said = "the second layer of a draft norms its input, which only the first takes as it is"
    torch.testing.assert_close(found, expected, msg=lambda differs: f"{said}\n{differs}")


NEXTN_PARTS = {"enorm": (12,), "hnorm": (12,), "eh_proj": (12, 24), "shared_head.norm": (12,)}


@pytest.mark.parametrize(("layers", "place"), [(1, 0), (4, 4)], ids=["own-folder", "behind-target"])
def test_nextn_norms_both_inputs_and_its_output(layers, place):
    prefix = f"model.layers.{place}"
    shapes = mla_layer(prefix) | {f"{prefix}.{n}.weight": s for n, s in NEXTN_PARTS.items()}
    tensors = {name: t.double() for name, t in drawn(shapes, seed=3).items()}
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        tensors[f"{prefix}.{name}"] *= 0
    target = Decoder(MLA, drawn(ENDS | mla_layer("model.layers.0")))
    incoming = torch.randn(8, 12, dtype=torch.float64)
    config = MLA | {"num_hidden_layers": layers}
    hidden, logits = Draft(config, tensors, target).forward(IDS, incoming)

    own = {n.removeprefix(f"{prefix}.").removesuffix(".weight"): t for n, t in tensors.items()}
    both = norm(target.embedding[IDS], own["enorm"]), norm(incoming, own["hnorm"])
    expected = norm(torch.cat(both, -1) @ own["eh_proj"].T, own["shared_head.norm"])
    torch.testing.assert_close(hidden, expected)
    torch.testing.assert_close(logits, expected @ target.head.T)


def test_a_layer_with_a_gate_is_a_mixture():
    prefix = "model.layers.0"
    shapes = {n: s for n, s in mla_layer(prefix).items() if ".mlp." not in n}
    shapes |= {f"{prefix}.mlp.gate.weight": (6, 12)}
    shapes |= {f"{prefix}.mlp.gate.e_score_correction_bias": (6,)}
    for name in (*(f"experts.{i}" for i in range(6)), "shared_experts"):
        shapes |= feed_forward(f"{prefix}.mlp.{name}")
    tensors = {name: t.double() for name, t in drawn(ENDS | shapes).items()}
    tensors[f"{prefix}.self_attn.o_proj.weight"] *= 0
    config = MLA | GROUPS | {"n_shared_experts": 1}
    hidden, _ = Decoder(config, tensors).forward(IDS)
    x = tensors["model.embed_tokens.weight"][IDS]
    y = norm(x, tensors[f"{prefix}.post_attention_layernorm.weight"])
    x = x + experts(OracleWeights(tensors, f"{prefix}.mlp."), y, config)
    torch.testing.assert_close(hidden, norm(x, tensors["model.norm.weight"]))


@pytest.mark.parametrize(
    ("config", "shapes"), [(LLAMA, LLAMA_SHAPES), (MLA, ENDS | mla_layer("model.layers.0"))]
)
@pytest.mark.parametrize(("scales", "most"), [(None, 0.1), ((0.02, 0.03), 0.5)])
def test_low_precision_forward_is_near_and_an_fp8_cache_is_felt(config, shapes, scales, most):
    tensors = {name: t + ("norm" in name) for name, t in drawn(shapes).items()}
    exact = Decoder(config, tensors).forward(IDS)[1]
    plain = Decoder(config, tensors, dtype=torch.bfloat16, kv_scales=scales).forward(IDS)[1]
    assert plain.dtype == torch.bfloat16
    assert 1e-3 < float((plain.double() - exact).norm() / exact.norm()) < most
    if scales:
        rounded = Decoder(config, tensors, kv_scales=scales).forward(IDS)[1]
        assert float((rounded - exact).norm() / exact.norm()) > 3e-3


# Their quotient is no power of two, so that an FP8 cache rounds otherwise with the other one.
SCALES = (0.02, 0.03)


def test_keys_and_values_pass_an_fp8_cache_each_with_its_own_scale():
    tensors = {name: t.double() for name, t in drawn(gqa_layer("own")).items()}
    attention = OracleWeights(tensors, "own.self_attn.")
    x = torch.randn(8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    q, k, v = ((x @ attention[f"{name}_proj.weight"].T).view(8, -1, 6) for name in ("q", "k", "v"))
    q, k = (rotate(t, torch.arange(8), theta=100.0, interleaved=False) for t in (q, k))
    k, v = quantize_dequantize(k, SCALES[0]), quantize_dequantize(v, SCALES[1])
    out = attend(q, k, v, prefix_len=0, scale=6**-0.5).reshape(8, 24)
    expected = out @ attention["o_proj.weight"].T
    said = "rotated keys are cached with the first scale, values with the second"
    found = gqa(attention, x, LLAMA, SCALES)
    torch.testing.assert_close(found, expected, msg=lambda differs: f"{said}\n{differs}")


def test_latent_and_rotary_key_pass_an_fp8_cache_with_the_keys_scale():
    tensors = {name: t.double() for name, t in drawn(mla_layer("own")).items()}
    attention = OracleWeights(tensors, "own.self_attn.")
    x = torch.randn(8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    low = norm(x @ attention["q_a_proj.weight"].T, attention["q_a_layernorm.weight"])
    q = (low @ attention["q_b_proj.weight"].T).view(8, 3, 10)
    joint = x @ attention["kv_a_proj_with_mqa.weight"].T
    latent = norm(joint[:, :10], attention["kv_a_layernorm.weight"])
    turned = (
        rotate(t, torch.arange(8), theta=100.0, interleaved=True)
        for t in (q[..., 6:], joint[:, None, 10:])
    )
    q_rope, k_rope = turned
    latent, k_rope = (quantize_dequantize(t, SCALES[0]) for t in (latent, k_rope))
    up = (latent @ attention["kv_b_proj.weight"].T).view(8, 3, 11)
    keys = torch.cat((up[..., :6], k_rope.expand(8, 3, 4)), -1)
    queries = torch.cat((q[..., :6], q_rope), -1)
    out = attend(queries, keys, up[..., 6:], prefix_len=0, scale=10**-0.5).reshape(8, 15)
    expected = out @ attention["o_proj.weight"].T
    said = "a latent row is cached whole, its rotary part too, with the keys' scale"
    found = mla(attention, x, MLA, SCALES)
    torch.testing.assert_close(found, expected, msg=lambda differs: f"{said}\n{differs}")


@pytest.mark.parametrize("kind", ["eagle", "nextn"])
def test_a_draft_has_its_targets_fp8_cache(kind):
    prefix = "model.layers.0"
    shapes = mla_layer(prefix) | {f"{prefix}.{n}.weight": s for n, s in NEXTN_PARTS.items()}
    config, shapes = {"eagle": (LLAMA, EAGLE), "nextn": (MLA, shapes)}[kind]
    tensors, whole = drawn(shapes, seed=3), drawn(ENDS)
    incoming = torch.randn(8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    exact, cached = (
        Draft(config | {"num_hidden_layers": 1}, tensors, target).forward(IDS, incoming)[0]
        for target in (Decoder(config, whole), Decoder(config, whole, kv_scales=SCALES))
    )
    differs = float((cached - exact).norm() / exact.norm())
    assert differs > 1e-4, f"keys and values of a draft pass its target's FP8 cache: {differs:.1e}"


@pytest.mark.parametrize(
    ("config", "theta"),
    [
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, 7.0),
        ({"rope_scaling": None}, 1e4),
    ],
)
def test_rope_theta_of_old_and_new_configurations(config, theta):
    assert rope_theta(config) == theta


def test_what_the_oracle_does_not_know_is_refused():
    with pytest.raises(ValueError, match="rope_type = 'yarn' is not accepted"):
        rope_theta({"rope_scaling": {"type": "yarn", "factor": 4}})
    with pytest.raises(ValueError, match="scoring_func = 'softmax' is not accepted"):
        route(OracleWeights({}), torch.ones(1, 1), GROUPS | {"scoring_func": "softmax"})
    with pytest.raises(ValueError, match=r"no tensor 'model\.layers\.1\.input_layernorm\.weight'"):
        Decoder(LLAMA, drawn(ENDS | gqa_layer("model.layers.0"))).forward(IDS)
