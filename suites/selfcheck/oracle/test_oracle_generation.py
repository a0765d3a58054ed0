"""Speculative text equals greedy text, and its accept lengths are what the chain earned."""

from __future__ import annotations

import pytest
import torch

from harness.oracle import follow, greedy, relative_margins, speculate

VOCAB = 13
PROMPT = [5, 2, 8]


def successor(token: int) -> int:
    """A cycle through all tokens but 0: 1, 2, 4, 8, 3, 6, 12 and so on."""
    return token * 2 % VOCAB


def rows(best: list[int], gap: float = 2.0) -> torch.Tensor:
    """Logits whose best token is given; the second best is the one after it."""
    logits = torch.zeros(len(best), VOCAB, dtype=torch.float64)
    logits[range(len(best)), best] = 4.0
    logits[range(len(best)), [(b + 1) % VOCAB for b in best]] = 4.0 - gap
    return logits


class ScriptedTarget:
    """Says the successor; the hidden state of token t is (position, token)."""

    def forward(self, token_ids):
        """As ``Decoder.forward``."""
        ids = token_ids.tolist()
        hidden = torch.tensor([[t, token] for t, token in enumerate(ids)], dtype=torch.float64)
        return hidden, rows([successor(token) for token in ids])


class ScriptedDraft:
    """Says the successor except at the given positions; checks what it is fed.

    Row t gives (t + 1, -1): its stand-in for the state of token t + 1, distinct from a true one.
    """

    def __init__(self, wrong_at):
        self.wrong_at = wrong_at
        self.calls = []

    def forward(self, token_ids, hidden):
        """As ``Draft.forward``."""
        ids = token_ids.tolist()
        assert hidden[:, 0].tolist() == list(range(len(ids)))
        own = [int(h) == -1 for h in hidden[:, 1]]
        self.calls.append((len(ids), sum(own)))
        assert own == sorted(own), "its own states come after the target's"
        for t in range(len(ids) - sum(own)):
            if t:
                assert hidden[t, 1] == ids[t - 1], "hidden state t belongs to token t"
        best = [successor(i) if t not in self.wrong_at else 0 for t, i in enumerate(ids)]
        out = torch.tensor([[t + 1, -1] for t in range(len(ids))], dtype=torch.float64)
        return out, rows(best, gap=1.0)


def plain(count):
    tokens = list(PROMPT)
    for _ in range(count):
        tokens.append(successor(tokens[-1]))
    return tokens[len(PROMPT) :]


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
    # Emitted logits belong to the emitted tokens, row by row.
    assert generation.top_ids[:, 0].tolist() == plain(12)
    assert generation.top_ids.shape == generation.top_logits.shape == (12, 8)
    assert generation.margins == pytest.approx([2.0 / (20 / VOCAB) ** 0.5] * 12)


class TornTarget(ScriptedTarget):
    """Prefers another token behind the sixth of a text, by ``gap``."""

    def __init__(self, gap):
        self.gap = gap

    def forward(self, token_ids):
        """As ``Decoder.forward``."""
        hidden, logits = super().forward(token_ids)
        if len(token_ids) > 5:
            logits[5, 7] = logits[5].max() + self.gap
        return hidden, logits


@pytest.mark.parametrize(
    ("wrong_at", "num_steps", "num_draft_tokens", "accepted"),
    [
        pytest.param((), 3, 4, [4, 4, 3], id="all-right-to-the-end-of-the-text"),
        pytest.param((), 4, 3, [3, 3, 3, 2], id="chain-shorter-than-the-steps"),
        pytest.param((4, 8), 3, 4, [3, 4, 4], id="third-wrong-and-a-bonus-position"),
        pytest.param(range(99), 3, 4, [1] * 11, id="all-wrong"),
    ],
)
def test_a_text_is_followed_as_it_was_generated(wrong_at, num_steps, num_draft_tokens, accepted):
    given = {"num_steps": num_steps, "num_draft_tokens": num_draft_tokens}
    draft = ScriptedDraft(wrong_at)
    found = follow(ScriptedTarget(), draft, PROMPT, plain(12), **given)
    assert list(found.accept_lengths) == accepted
    assert found.shortfalls == (0,) * 12
    assert list(found.best_ids) == plain(12)
    own = speculate(ScriptedTarget(), ScriptedDraft(wrong_at), PROMPT, count=12, **given)
    assert len(own.accept_lengths) == len(accepted)


@pytest.mark.parametrize("gap", [0.25, 1.5])
def test_a_token_that_is_not_the_best_falls_short_and_parts_nothing_behind_it(gap):
    text = plain(12)
    given = {"num_steps": 3, "num_draft_tokens": 4}
    found = follow(TornTarget(gap), ScriptedDraft(()), PROMPT, text, **given)
    rms = ((16 + 4 + (4 + gap) ** 2) / VOCAB) ** 0.5
    # Row 5 of the sequence is behind its sixth token: the fourth of the text comes next.
    assert found.shortfalls == pytest.approx([0] * 3 + [gap / rms] + [0] * 8)
    assert found.best_ids == (*text[:3], 7, *text[4:])
    assert found.accept_lengths == (4, 4, 3)


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
    assert generation.top_ids.shape[0] == len(generation.margins) == 3


def test_eos_in_the_prompt_is_text():
    given = {"num_steps": 3, "num_draft_tokens": 4, "count": 5}
    assert len(speculate(ScriptedTarget(), ScriptedDraft(()), [8], eos=8, **given).token_ids) == 5


def test_step_margins_cover_the_rows_an_accept_length_rests_on():
    given = {"num_steps": 3, "num_draft_tokens": 4, "count": 5}
    generation = speculate(ScriptedTarget(), ScriptedDraft(()), PROMPT, **given)
    drafted = float(relative_margins(rows([1], gap=1.0)))
    assert generation.step_margins == pytest.approx([drafted])
    only_bonus = given | {"num_steps": 1, "num_draft_tokens": 1, "count": 2}
    generation = speculate(ScriptedTarget(), ScriptedDraft(()), PROMPT, **only_bonus)
    assert generation.step_margins == pytest.approx([float(relative_margins(rows([1])))])


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
