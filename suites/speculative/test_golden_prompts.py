"""The golden of every shipped prompt belongs to this prompt, these weights and these rounds."""

from __future__ import annotations

import pytest

from fixtures.pytest_plugin.goldens import PAIRS, ROUND, prompts, settle_prompt
from harness.differential.golden import GoldenStore

PROMPTS = [(pair, i) for pair in PAIRS for i in range(len(prompts(pair)))]


@pytest.mark.parametrize(("pair", "index"), PROMPTS, ids=[f"{p}-prompt{i}" for p, i in PROMPTS])
def test_prompt(pair: str, index: int, goldens: GoldenStore) -> None:
    golden = settle_prompt(goldens, pair, index)
    tokens, accepted = golden.facts["token_ids"], golden.facts["accept_lengths"]
    assert len(tokens) == len(golden.facts["margins"]) == ROUND["count"]
    assert tokens == golden.tensors["top_ids"][:, 0].tolist()
    assert all(1 <= n <= ROUND["num_draft_tokens"] for n in accepted)
    # One token comes from the prefill; the last round may reach past the count.
    assert 1 + sum(accepted[:-1]) < ROUND["count"] <= 1 + sum(accepted)
    assert golden.origin["oracle"]
