"""Every token of a text is judged behind its own prefix, every verify step where it began."""

from __future__ import annotations

import math

import pytest

from fixtures.fakes.scripted_oracle import (
    PROMPT,
    VOCAB,
    ScriptedDraft,
    ScriptedTarget,
    TornTarget,
    plain,
)
from harness.oracle import follow, speculate

ROUND = {"num_steps": 3, "num_draft_tokens": 4}
# A draft's row holds 4 and 3, so its best two are 1 apart and any other token is 4 below.
DRAFT_RMS = ((16 + 9) / VOCAB) ** 0.5
GAP, FALL = 1 / DRAFT_RMS, 4 / DRAFT_RMS


@pytest.mark.parametrize(
    ("wrong_at", "num_steps", "num_draft_tokens", "accepted"),
    [
        pytest.param((), 3, 4, [4, 4, 4], id="all-right-and-a-bonus-past-the-text"),
        pytest.param((), 4, 3, [3, 3, 3, 3], id="chain-shorter-than-the-steps"),
        pytest.param((4, 8), 3, 4, [3, 4, 4], id="third-wrong-and-a-bonus-position"),
        pytest.param(range(99), 3, 4, [1] * 11, id="all-wrong"),
        pytest.param((), 3, 1, [1] * 11, id="nothing-but-the-bonus"),
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
    assert list(own.accept_lengths) == accepted
    again = follow(
        ScriptedTarget(), draft, PROMPT, plain(12), **given, accept_lengths=own.accept_lengths
    )
    assert (again.accept_lengths, again.step_shortfalls) == (tuple(accepted), (0,) * len(accepted))


@pytest.mark.parametrize("gap", [0.25, 1.5])
def test_a_token_that_is_not_the_best_falls_short_and_parts_nothing_behind_it(gap):
    text = plain(12)
    found = follow(TornTarget(5, gap), ScriptedDraft(()), PROMPT, text, **ROUND)
    rms = ((16 + 4 + (4 + gap) ** 2) / VOCAB) ** 0.5
    # Row 5 of the sequence is behind its sixth token: the fourth of the text comes next.
    assert found.shortfalls == pytest.approx([0] * 3 + [gap / rms] + [0] * 8)
    assert found.best_ids == (*text[:3], 7, *text[4:])
    assert found.accept_lengths == (4, 4, 4)


def of_a_step(claimed, accepted):
    """What holds for a verify step with these accept lengths, claimed and right."""
    if claimed == accepted:
        return f"a verify step with the right accept length ({accepted}) does not fall short"
    side = "fewer" if claimed < accepted else "more"
    how = f"{side} tokens ({claimed}) than the drafts that match allow ({accepted})"
    return f"a verify step that accepts {how} is wrong, and falls short by a difference of logits"


# The prefill gives one token of twelve. A draft row t proposes token t + 2 of the sequence, so a
# step after k tokens drafts with rows k - 2, k - 1 and k.
@pytest.mark.parametrize(
    ("wrong_at", "claimed", "accepted", "shortfalls"),
    [
        pytest.param((), (2, 4, 4, 1), (4, 4, 4, 2), (GAP, 0, 0, GAP), id="too-short"),
        pytest.param((4,), (4, 4, 3), (3, 4, 4), (FALL, 0, GAP), id="too-long"),
        pytest.param((3, 4), (4, 4, 3), (2, 4, 4), (FALL, 0, GAP), id="by-two"),
        pytest.param((4,), (2, 4, 4, 1), (3, 1, 4, 2), (GAP, FALL, 0, GAP), id="where-it-began"),
        pytest.param((), (5, 4, 2), (4, 4, 3), (math.inf, 0, GAP), id="longer-than-any"),
        pytest.param((), (0, 4, 4, 3), (4, 4, 4, 4), (math.inf, 0, 0, GAP), id="empty"),
        pytest.param((), (4, 4, 3, 1), (4, 4, 4, 0), (0, 0, GAP, math.inf), id="after-the-end"),
    ],
)
def test_a_step_falls_short_by_what_parts_it_from_its_claim(
    wrong_at, claimed, accepted, shortfalls
):
    found = follow(
        ScriptedTarget(),
        ScriptedDraft(wrong_at),
        PROMPT,
        plain(12),
        **ROUND,
        accept_lengths=claimed,
    )
    assert found.accept_lengths == accepted
    steps = zip(claimed, accepted, found.step_shortfalls, shortfalls, strict=True)
    for claim, length, obtained, expected in steps:
        assert obtained == pytest.approx(expected), of_a_step(claim, length)


class UnsureDraft(ScriptedDraft):
    """Its first draft after the prefill nearly ties with another token, 1."""

    def forward(self, token_ids, hidden):
        out, logits = super().forward(token_ids, hidden)
        logits[2, 1] = logits[2].max() - 0.25
        return out, logits


@pytest.mark.parametrize(("claimed", "gap"), [(1, 0.25), (2, 1.0)])
def test_a_claim_that_is_too_short_is_parted_by_the_draft_that_it_lacks(claimed, gap):
    # Of a text of five the first step begins behind the prefill's token, with row 2.
    target, text = ScriptedTarget(), plain(5)
    steps = (claimed, 4 - claimed)
    found = follow(target, UnsureDraft(()), PROMPT, text, **ROUND, accept_lengths=steps)
    rms = {1: ((16 + 9 + 3.75**2) / VOCAB) ** 0.5, 2: DRAFT_RMS}[claimed]
    said = "a step that accepts too few falls short by the gap of the first draft that it refuses"
    assert found.step_shortfalls[0] == pytest.approx(gap / rms), said


def test_the_last_step_is_judged_past_the_text_as_far_as_the_target_is_sure():
    given = {**ROUND, "accept_lengths": (4, 4, 4)}  # Thirteen tokens, of which the text has ten.
    found = follow(ScriptedTarget(), ScriptedDraft(()), PROMPT, plain(10), **given)
    assert (found.accept_lengths, found.step_shortfalls) == ((4, 4, 4), (0, 0, 0))
    assert len(found.shortfalls) == 10
    # The last step drafts with rows 10 to 12: one token of the text, two past it.
    found = follow(ScriptedTarget(), ScriptedDraft((12,)), PROMPT, plain(10), **given)
    assert found.accept_lengths == (4, 4, 3)
    # The target's own margin past the text is 2, less than the draft's fall of 4.
    assert found.step_shortfalls == pytest.approx((0, 0, 2 / (20 / VOCAB) ** 0.5))
    rms = ((16 + 4 + 4.25**2) / VOCAB) ** 0.5
    for torn in (12, 13):  # The first token past the text, and the second.
        target = TornTarget(torn, 0.25)
        found = follow(target, ScriptedDraft(()), PROMPT, plain(10), **given)
        said = (
            "a step falls short by no more than the least sure of the target's tokens past the text"
        )
        assert found.step_shortfalls == pytest.approx((0, 0, 0.25 / rms)), said


def test_no_accept_length_makes_the_target_say_more_than_a_step_verifies():
    class Counting(ScriptedTarget):
        asked = 0

        def forward(self, token_ids):
            self.asked += 1
            return super().forward(token_ids)

    target = Counting()
    given = {**ROUND, "accept_lengths": (4, 4, 200)}
    found = follow(target, ScriptedDraft(()), PROMPT, plain(10), **given)
    assert found.step_shortfalls == (0, 0, math.inf)
    # Three drafts are verified past the text, and then the text is judged.
    said = "an absurd accept length costs the judge no more than the longest right one"
    assert target.asked == 3 + 1, f"{said}: the target was asked {target.asked} times"


@pytest.mark.parametrize("foreign", [VOCAB, -1, 99])
def test_nothing_is_known_behind_a_token_that_the_vocabulary_lacks(foreign):
    text = [*plain(3), foreign, 5, 6]
    found = follow(ScriptedTarget(), ScriptedDraft(()), PROMPT, text, **ROUND)
    assert found.shortfalls == (0, 0, 0, math.inf)
    assert list(found.best_ids) == plain(4)
    found = follow(ScriptedTarget(), ScriptedDraft(()), [5], [foreign], **ROUND)
    assert (found.shortfalls, found.best_ids) == ((math.inf,), (10,))
