"""The shipped pairs are small, load, and have drafts that are both accepted and rejected."""

from __future__ import annotations

import json

import pytest
import torch

from fixtures.models import evaluate
from fixtures.models.recipe import PAIRS
from fixtures.pytest_plugin.goldens import oracle
from harness.engine.models.checkpoint import read_tensors
from harness.engine.models.loader import load_pair
from harness.oracle import speculate

MEGABYTE = 2**20
PROMPTS = json.loads((evaluate.HERE / "prompts.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module", params=PAIRS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def pair(name):
    return load_pair(evaluate.HERE / name, torch.float32)


def test_together_at_most_24_megabytes():
    sizes = [path.stat().st_size for name in PAIRS for path in (evaluate.HERE / name).rglob("*")]
    assert sum(sizes) < 24 * MEGABYTE


def test_configurations_are_the_recipes(name):
    for part, raw in zip(("target", "draft"), PAIRS[name], strict=True):
        stored, tensors = read_tensors(evaluate.HERE / name / part)
        assert stored == raw
        assert {str(w.dtype) for w in tensors.values()} <= {"torch.bfloat16", "torch.float32"}


def test_prompts_are_what_their_text_encodes_to(name, pair):
    prompts = PROMPTS[name]
    assert len(prompts) == len({p["text"] for p in prompts}) == 32
    for prompt in prompts:
        assert 16 <= len(prompt["token_ids"]) <= 64
        assert pair.tokenizer.encode(prompt["text"]).ids == prompt["token_ids"]


@torch.inference_mode()
def test_accept_length_reaches_two_and_is_mixed(name, pair):
    prompts = PROMPTS[name][:4]
    held_out = "".join(prompt["text"] for prompt in PROMPTS[name])
    found = evaluate.measure(pair, [prompt["token_ids"] for prompt in prompts], held_out)
    assert found.accept_length >= 2.0
    first, second, third = found.hits
    assert 0.9 > first > second > third > 0.1


@torch.inference_mode()
def test_the_measured_accept_lengths_are_the_oracles(name, pair):
    prompt, count = min((p["token_ids"] for p in PROMPTS[name]), key=len), 10
    expected = speculate(*oracle(name), prompt, num_steps=3, num_draft_tokens=4, count=count)
    text = evaluate.continuation(pair.target, prompt, count + 8)
    assert tuple(text[len(prompt) :][:count]) == expected.token_ids
    right = evaluate.accepted_by_row(pair, text)
    row = len(prompt) - 1
    for accept_length in expected.accept_lengths:
        assert int(right[row].sum()) + 1 == accept_length
        row += accept_length
