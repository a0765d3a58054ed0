"""A model leaves attention to the backend of its batch and does nothing that cannot be recorded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fixtures.drivers.tiny_models import TINY_PAIRS
from fixtures.models import dense
from harness.engine.models.loader import random_pair
from harness.graphs.tape import Tape
from harness.upstream.radix_attention import RadixAttention

FAMILIES = tuple(TINY_PAIRS)
TEXT = torch.tensor([5, 96, 0, 17, 17, 3, 60, 8, 41])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_is_recordable(family):
    pair = random_pair(*TINY_PAIRS[family], seed=1)
    tokens, positions, hidden = TEXT.clone(), torch.arange(len(TEXT)), torch.randn(len(TEXT), 48)

    def both():
        outputs = []
        for model in (pair.target, pair.draft):
            spec_info = SimpleNamespace(hidden_states=hidden)
            batch = SimpleNamespace(attn_backend=dense.Chains(1), spec_info=spec_info)
            outputs.append(model.forward(tokens, positions, batch).next_token_logits)
        return outputs

    tape = Tape()
    captured = tape.capture(both)
    tokens.copy_(TEXT.flip(0))
    positions.add_(torch.arange(len(TEXT)))
    hidden.neg_()
    tape.replay()
    for obtained, expected in zip(captured, both(), strict=True):
        assert torch.equal(obtained, expected)


class Spy:
    """Records the arguments of a model's calls and returns zeros."""

    def __init__(self) -> None:
        self.calls = []

    def forward(self, q, k, v, layer, batch, **rope):
        """As a backend's."""
        self.calls.append((layer, {"q": q, "k": k, "v": v} | rope))
        return q.new_zeros(len(q), layer.tp_q_head_num * layer.v_head_dim)


HANDED = {
    "gqa": (
        lambda i: RadixAttention(i, 4, 2, 16, 16, 0.25),
        {"q": (9, 4, 16), "k": (9, 2, 16), "v": (9, 2, 16)},
    ),
    "mla": (
        lambda i: RadixAttention(i, 4, 1, 80, 64, 40**-0.5),
        {
            "q": (9, 4, 64),
            "k": (9, 1, 64),
            "v": (9, 1, 64),
            "q_rope": (9, 4, 16),
            "k_rope": (9, 1, 16),
        },
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_the_backends(family):
    pair = random_pair(*TINY_PAIRS[family], seed=1)
    layer, shapes = HANDED[family]
    for model, layers in ((pair.target, 2), (pair.draft, 1)):
        spy = Spy()
        run_with = SimpleNamespace(
            attn_backend=spy, spec_info=SimpleNamespace(hidden_states=torch.randn(9, 48))
        )
        model.forward(TEXT, torch.arange(9), run_with)
        told = "attention is scaled by head size ** -0.5, of MLA's nope and rope parts together"
        scales = {called.scaling for called, _ in spy.calls}
        assert scales == {layer(0).scaling}, told
        assert [called for called, _ in spy.calls] == [layer(i) for i in range(layers)]
        assert [own.attention for own in model.layers] == [layer(i) for i in range(layers)]
        for _, handed in spy.calls:
            assert {name: tuple(t.shape) for name, t in handed.items()} == shapes
            assert handed["q"].is_contiguous(), "a kernel is handed a contiguous query"


@pytest.mark.parametrize("family", FAMILIES)
def test_an_idle_batch_has_no_rows(family):
    pair = random_pair(*TINY_PAIRS[family], seed=1)
    nothing = torch.zeros(0, dtype=torch.int64)
    for model in (pair.target, pair.draft):
        spec_info = SimpleNamespace(hidden_states=torch.zeros(0, 48))
        batch = SimpleNamespace(attn_backend=Spy(), spec_info=spec_info)
        out = model.forward(nothing, nothing, batch)
        assert (out.next_token_logits.shape, out.hidden_states.shape) == ((0, 97), (0, 48))
