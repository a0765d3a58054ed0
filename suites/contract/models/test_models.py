"""A model computes the same as the oracle of its architecture."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from fixtures.drivers.tiny_models import TINY_PAIRS
from fixtures.models import dense
from harness.core.case import Dtype
from harness.core.tolerance import budget
from harness.differential.compare import compare
from harness.engine.models.checkpoint import random_checkpoint
from harness.engine.models.layers import (
    inverse_frequencies,
    rms_norm,
    rotate_halves,
    rotate_pairs,
    rotation,
)
from harness.engine.models.loader import build_pair, random_pair
from harness.errors import ContractError
from harness.oracle import Decoder, Draft

FAMILIES = tuple(TINY_PAIRS)
TEXT = torch.tensor([5, 96, 0, 17, 17, 3, 60, 8, 41])


def run(model, tokens, hidden=None, first_position=0):
    """Logits and hidden states of one sequence [n]."""
    given = None if hidden is None else hidden[None]
    out = dense.forward(model, dense.Chains(1), tokens[None], first_position, given)
    return out.next_token_logits[0], out.hidden_states[0]


def assert_equal_to(obtained, expected, plain):
    for quantity, *rows in zip(("hidden_states", "logits"), obtained, expected, plain, strict=True):
        found = compare(quantity, *rows, budget(quantity, Dtype.FP32))
        assert not found.message, found.message


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="own_head"),
        pytest.param({"tie_word_embeddings": True, "n_shared_experts": 0}, id="tied_none_shared"),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_target_and_draft_equal_the_oracle(family, changes):
    raw_target, raw_draft = (raw | changes for raw in TINY_PAIRS[family])
    target = raw_target, random_checkpoint(raw_target, 3)
    draft = raw_draft | {"num_experts_per_tok": 2}, random_checkpoint(raw_draft, 4)
    pair = build_pair(target, draft, torch.float32)
    judge, plain = Decoder(*target), Decoder(*target, dtype=torch.float32)

    assert_parts(pair, target, draft)
    logits, hidden = run(pair.target, TEXT)
    assert_equal_to((hidden, logits), judge.forward(TEXT), plain.forward(TEXT))

    fed = hidden[:-1]
    logits, out = run(pair.draft, TEXT[1:], fed)
    expected = Draft(*draft, judge).forward(TEXT[1:], fed)
    assert_equal_to((out, logits), expected, Draft(*draft, plain).forward(TEXT[1:], fed))


def test_an_eagle_draft_norms_before_attention_from_its_second_layer_on():
    raw_target, raw_draft = TINY_PAIRS["gqa"]
    target = raw_target, random_checkpoint(raw_target, 3)
    raw_draft = raw_draft | {"num_hidden_layers": 2}
    draft = raw_draft, random_checkpoint(raw_draft, 4)
    names = [name for name in draft[1] if "input_layernorm" in name]
    assert names == ["layers.1.input_layernorm.weight"]
    pair = build_pair(target, draft, torch.float32)
    judge, plain = Decoder(*target), Decoder(*target, dtype=torch.float32)
    assert_parts(pair, target, draft)
    _, hidden = run(pair.target, TEXT[:-1])
    logits, out = run(pair.draft, TEXT[1:], hidden)
    expected = Draft(*draft, judge).forward(TEXT[1:], hidden)
    assert_equal_to((out, logits), expected, Draft(*draft, plain).forward(TEXT[1:], hidden))


INPUT_WEIGHTS = ("fc.weight", "eh_proj.weight")
ADDED_WEIGHTS = {
    "fc.bias": "an EAGLE draft adds the bias of its fc",
    "mlp.shared_experts.down_proj.weight": "shared experts are added to the routed ones",
}
"""Weights without which a draft's output is another, where its checkpoint has them."""


def assert_parts(pair, target, draft):
    """Parts of a pair one by one, before its outputs are compared as a whole."""
    raw, weights = target
    attention = dense.Chains(1)
    logits = dense.forward(pair.target, attention, TEXT[None]).next_token_logits[0]
    _, hidden = run(pair.target, TEXT)
    tied = raw["tie_word_embeddings"]
    head = weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
    said = f"with tie_word_embeddings = {tied} logits are predicted by the model's own head"
    torch.testing.assert_close(logits, hidden @ head.T, rtol=0, atol=1e-4, msg=said)
    if "kv_lora_rank" in raw:
        assert_latent(raw, weights, pair.target, attention)

    def drafted(zeroed, fed, columns=slice(None)):
        """Hidden states of the draft with some weights, or some columns of them, set to zero."""
        own = {name: weight.clone() for name, weight in draft[1].items()}
        for name in own:
            if name.endswith(zeroed):
                own[name][..., columns] = 0
        changed = build_pair(target, (draft[0], own), torch.float32).draft
        return run(changed, TEXT[1:], fed)[1]

    fed = hidden[:-1]
    _, out = run(pair.draft, TEXT[1:], fed)
    of_hidden = slice(len(fed[0]), None)
    alike = [drafted(INPUT_WEIGHTS, each, of_hidden) for each in (fed, -fed)]
    said = "a draft joins the token's embedding, first, and the hidden state of the token before"
    assert torch.equal(*alike), said
    for name, rule in ADDED_WEIGHTS.items():
        if any(own.endswith(name) for own in draft[1]):
            assert not torch.equal(drafted(name, fed), out), rule
    for name, weight in draft[1].items():
        if name.endswith("shared_head.norm.weight"):
            assert_normed(out, weight, "a NextN draft predicts from states after shared_head.norm")


def assert_latent(raw, weights, target, attention):
    """What an MLA target hands to attention."""
    scale = (raw["qk_nope_head_dim"] + raw["qk_rope_head_dim"]) ** -0.5
    for layer in target.layers:
        said = "MLA is scaled by (qk_nope_head_dim + qk_rope_head_dim) ** -0.5"
        assert layer.attention.scaling == scale, said
        ((keys, _),) = attention.seen[layer.attention.layer_id]
        name = f"model.layers.{layer.attention.layer_id}.self_attn.kv_a_layernorm.weight"
        latent = keys[0, 0, :, : raw["kv_lora_rank"]]
        assert_normed(latent, weights[name], "the latent cache holds states after kv_a_layernorm")


def assert_normed(rows, weight, said):
    squares = (rows / weight).square().mean(-1)
    torch.testing.assert_close(squares, torch.ones(len(rows)), rtol=0, atol=1e-2, msg=said)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hidden_state_reaches_its_own_row_and_later_ones(family):
    pair = random_pair(*TINY_PAIRS[family], seed=1)
    hidden = torch.randn(len(TEXT), 48)
    other = hidden.clone()
    other[4] += 0.1
    before, after = (run(pair.draft, TEXT, h)[0] for h in (hidden, other))
    changed = (before != after).any(1)
    assert changed.tolist() == [False] * 4 + [True] * 5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_without_hidden_states_is_refused(family):
    pair = random_pair(*TINY_PAIRS[family], seed=1)
    batch = SimpleNamespace(attn_backend=dense.Chains(1), spec_info=None)
    with pytest.raises(ContractError, match=r"spec_info.hidden_states = 'NoneType'"):
        pair.draft.forward(TEXT, torch.arange(len(TEXT)), batch)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_distances_between_positions_matter(family):
    target = random_pair(*TINY_PAIRS[family], seed=1).target
    here, there = (run(target, TEXT, first_position=p)[0] for p in (0, 300))
    torch.testing.assert_close(here, there, rtol=0, atol=1e-4)
    cache = dense.Cached(1)
    dense.forward(target, cache, TEXT[None, :4])
    gap = dense.forward(target, cache, TEXT[None, 4:], first_position=5).next_token_logits[0]
    assert (gap - here[4:]).abs().amax(1).min() > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logits_are_float32_and_hidden_states_of_the_weights_dtype(family, dtype):
    pair = random_pair(*TINY_PAIRS[family], seed=1, dtype=dtype)
    logits, hidden = run(pair.target, TEXT)
    drafted, out = run(pair.draft, TEXT, hidden)
    assert (logits.dtype, drafted.dtype) == (torch.float32,) * 2
    assert (hidden.dtype, out.dtype) == (dtype,) * 2


def test_the_correction_bias_chooses_and_does_not_weigh():
    raw_target, raw_draft = TINY_PAIRS["mla"]
    raw_draft = raw_draft | {"num_experts_per_tok": 2}
    draft = random_checkpoint(raw_draft, 4)
    # Expert 1 has the lowest affinity and the highest bias.
    odds = torch.tensor([0.6, 0.2, 0.5])
    draft["model.layers.0.mlp.gate.weight"][:] = 0
    draft["model.layers.0.mlp.gate.weight"][:, 0] = odds.log()
    draft["model.layers.0.mlp.gate.e_score_correction_bias"][:] = torch.tensor([0.0, 0.5, 0.0])
    target = raw_target, random_checkpoint(raw_target, 3)
    layer = build_pair(target, (raw_draft, draft), torch.float32).draft.layers[0]
    x = torch.zeros(2, 48)
    x[0, 0] = 1.0
    # Affinities odds / (1 + odds): 3/8, 1/6, 1/3, of which the chosen two add up to less than 1;
    # all 1/2 where the token says nothing. Ties go either way, so row 1 only tells that the biased
    # expert is chosen, at an equal share.
    shares = layer.routing(x) / 2.5
    said = "weights of the chosen experts add up to routed_scaling_factor"
    torch.testing.assert_close(shares.sum(1), torch.ones(2), msg=said)
    chosen = shares[0].nonzero().flatten().tolist()
    said = "e_score_correction_bias is added to the affinities that experts are chosen by"
    assert chosen == [0, 1], f"{said}: experts [0, 1], not {chosen}"
    said = (
        "experts are weighted by their affinities without e_score_correction_bias: 9/13, 4/13, not"
    )
    due = torch.tensor([9 / 13, 4 / 13, 0.0])
    torch.testing.assert_close(shares[0], due, msg=f"{said} {shares[0].tolist()}")
    said = "an expert chosen for its bias alone has an equal share of equal affinities"
    assert shares[1, 1] == 0.5, f"{said}: 0.5, not {shares[1, 1]}"


def test_experts_are_ranked_in_float32():
    raw_target, raw_draft = TINY_PAIRS["mla"]
    raw_draft = raw_draft | {"num_experts_per_tok": 2}
    draft = random_checkpoint(raw_draft, 4)
    gate = draft["model.layers.0.mlp.gate.weight"]
    gate[:] = 0
    # Affinities of 1 + 1/512, 1 and 1 + 1/256 differ by less than bfloat16 keeps of the sums.
    gate[:, 0] = 1.0
    gate[:, 1] = torch.tensor([1 / 512, 0.0, 1 / 256])
    draft["model.layers.0.mlp.gate.e_score_correction_bias"][:] = 0
    target = raw_target, random_checkpoint(raw_target, 3)
    layer = build_pair(target, (raw_draft, draft), torch.bfloat16).draft.layers[0]
    x = torch.zeros(1, 48, dtype=torch.bfloat16)
    x[0, :2] = 1.0
    shares = layer.routing(x)
    assert shares.dtype == torch.float32
    assert shares[0, 2] > shares[0, 0] > 0, "the closest affinities are told apart"
    assert shares[0, 1] == 0, "the expert of the least affinity is not chosen"


def test_angles_are_exact_at_far_positions():
    frequencies = inverse_frequencies(6, 1000.0, "cpu")
    dtype = frequencies.dtype
    assert dtype == torch.float64, f"rotary inverse frequencies are float64, not {dtype}"
    # 1000 to the power of 0, -1/3 and -2/3.
    due = torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)
    said = f"inverse frequencies are rope_theta ** (-2 i / dim): {frequencies.tolist()}"
    torch.testing.assert_close(frequencies, due, rtol=1e-14, atol=0, msg=said)
    # Angles of the first position are float32 numbers by chance, two of the second are none.
    cos, sin = rotation(torch.tensor([100_000, 100_003]), frequencies)
    for at, angles in enumerate(((1e5, 1e4, 1e3), (100_003.0, 10_000.3, 1_000.03))):
        for i, angle in enumerate(angles):
            told = f"a position's angle of {angle:g} radians is right to float32 after its turns"
            assert abs(cos[at, 0, i] - math.cos(angle)) < 1e-7, told
            assert abs(sin[at, 0, i] - math.sin(angle)) < 1e-7, told


QUARTER_AND_HALF_TURN = torch.tensor([0.0, -1.0]), torch.tensor([1.0, 0.0])


@pytest.mark.parametrize(
    ("rotate", "expected"),
    [
        # Pairs (1, 3) and (2, 4): a quarter turn makes (-3, 1), a half turn (-2, -4).
        pytest.param(rotate_halves, [-3.0, -2.0, 1.0, -4.0], id="halves"),
        # Pairs (1, 2) and (3, 4): a quarter turn makes (-2, 1), a half turn (-3, -4).
        pytest.param(rotate_pairs, [-2.0, 1.0, -3.0, -4.0], id="pairs"),
    ],
)
def test_rotary_layouts(rotate, expected):
    turned = rotate(torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), QUARTER_AND_HALF_TURN).tolist()
    said = "rotary turns each pair (a, b) to (a cos - b sin, b cos + a sin)"
    assert turned == [[expected]], f"{said}: (1, 2, 3, 4) to {expected}, not {turned}"


def test_rms_norm_by_hand():
    tiny = rms_norm(torch.tensor([[3e-4, 4e-4]]), torch.ones(2), 3.5)
    assert tiny.max() < 1e-3, "eps is added to the mean square, so that tiny values stay tiny"
    # mean square of (3, 4) is 12.5; with eps 3.5 the root is 4.
    normed = rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([2.0, 10.0]), 3.5)
    assert normed.tolist() == [[1.5, 10.0]]
