"""The golden of every shipped prompt is the oracle's text in the oracle's rounds, as of today."""

from __future__ import annotations

import pytest

from fixtures.pytest_plugin.goldens import PAIRS, ROUND, oracle, prompts, settle_prompt
from harness.differential.golden import GoldenStore
from harness.oracle import follow

PROMPTS = [(pair, i) for pair in PAIRS for i in range(len(prompts(pair)))]


@pytest.mark.parametrize(("pair", "index"), PROMPTS, ids=[f"{p}-prompt{i}" for p, i in PROMPTS])
def test_prompt(pair: str, index: int, goldens: GoldenStore) -> None:
    golden = settle_prompt(goldens, pair, index)
    tokens, accepted = golden.facts["token_ids"], golden.facts["accept_lengths"]
    # One token comes from the prefill; the last round may reach past the count.
    assert 1 + sum(accepted[:-1]) < len(tokens) == ROUND["count"] <= 1 + sum(accepted)
    steps = {name: ROUND[name] for name in ("num_steps", "num_draft_tokens")}
    due = follow(*oracle(pair), prompts(pair)[index], tokens, accept_lengths=accepted, **steps)
    assert list(due.best_ids) == tokens
    assert list(due.accept_lengths) == accepted
    assert not golden.tensors
