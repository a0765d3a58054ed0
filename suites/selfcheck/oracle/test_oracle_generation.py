"""Speculative text equals greedy text, and its accept lengths are what the chain earned."""

from __future__ import annotations

import pytest

from fixtures.fakes.scripted_oracle import (
    PROMPT,
    VOCAB,
    ScriptedDraft,
    ScriptedTarget,
    plain,
)
from harness.oracle import greedy, speculate


def test_greedy_follows_the_best_token():
    tokens, margins = greedy(ScriptedTarget(), PROMPT, 5)
    assert tokens == plain(5) == [3, 6, 12, 11, 9]
    assert margins == pytest.approx([2.0 / ((16 + 4) / VOCAB) ** 0.5] * 5)


def test_greedy_ends_with_eos():
    assert greedy(ScriptedTarget(), PROMPT, 9, eos=12)[0] == [3, 6, 12]
    assert greedy(ScriptedTarget(), [1, 12], 2, eos=12)[0] == [11, 9]


# A draft row t follows token t + 1 and proposes token t + 2 of the text; the prompt has 3 tokens
# and the prefill gives the fourth, so the first proposal of the first round comes from row 2.
@pytest.mark.parametrize(
    ("wrong_at", "num_steps", "num_draft_tokens", "accepted"),
    [
        pytest.param((), 3, 4, [4, 4, 4], id="all-right"),
        pytest.param((), 4, 3, [3, 3, 3, 3], id="chain-shorter-than-the-steps"),
        pytest.param((), 3, 2, [2, 2, 2, 2, 2, 2], id="one-draft-verified"),
        pytest.param(range(99), 3, 4, [1] * 11, id="all-wrong"),
        pytest.param((2,), 3, 4, [1, 4, 4, 4], id="first-wrong"),
        pytest.param((4, 8), 3, 4, [3, 4, 4], id="third-wrong-and-a-bonus-position"),
        pytest.param((), 1, 1, [1] * 11, id="nothing-but-the-bonus"),
    ],
)
def test_accept_lengths_by_hand(wrong_at, num_steps, num_draft_tokens, accepted):
    draft = ScriptedDraft(wrong_at)
    given = {"num_steps": num_steps, "num_draft_tokens": num_draft_tokens, "count": 12}
    generation = speculate(ScriptedTarget(), draft, PROMPT, **given)
    assert list(generation.token_ids) == plain(12)
    assert list(generation.accept_lengths) == accepted
    assert len(draft.calls) == num_steps * len(accepted)
    assert [own for _, own in draft.calls[:num_steps]] == list(range(num_steps))


def test_only_the_last_step_reaches_past_the_count():
    given = {"num_steps": 3, "num_draft_tokens": 4}
    for count in range(1, 12):
        generation = speculate(ScriptedTarget(), ScriptedDraft(()), PROMPT, count=count, **given)
        assert list(generation.token_ids) == plain(count)
        assert sum(generation.accept_lengths[:-1]) < count <= 1 + sum(generation.accept_lengths)


def test_eos_inside_an_accepted_chain_cuts_the_text():
    given = {"num_steps": 3, "num_draft_tokens": 4, "count": 50}
    generation = speculate(ScriptedTarget(), ScriptedDraft(()), PROMPT, eos=12, **given)
    assert generation.token_ids == (3, 6, 12)
    assert generation.accept_lengths == (4,)


def test_eos_in_the_prompt_is_text():
    given = {"num_steps": 3, "num_draft_tokens": 4, "count": 5}
    assert len(speculate(ScriptedTarget(), ScriptedDraft(()), [8], eos=8, **given).token_ids) == 5


@pytest.mark.parametrize("num_draft_tokens", [0, 5])
def test_a_chain_longer_than_its_proposals_is_refused(num_draft_tokens):
    with pytest.raises(ValueError, match=rf"num_draft_tokens = {num_draft_tokens} is not accepted"):
        speculate(
            ScriptedTarget(),
            ScriptedDraft(()),
            PROMPT,
            num_steps=3,
            num_draft_tokens=num_draft_tokens,
            count=4,
        )
