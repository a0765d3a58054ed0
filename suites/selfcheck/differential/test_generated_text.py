"""A text is judged token by token and step by step, and what is not judged is counted."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fixtures.toys.tiny_engine import CONFIG, TinyPair
from fixtures.toys.toy_engine import spec_config
from harness.core.case import Dtype
from harness.core.record import TokenCounts, Verdict
from harness.core.tolerance import tie_margin
from harness.differential.generated_text import judge_text, judge_tokens, transcribe
from harness.engine.models.loader import Pair
from harness.engine.request import Generation
from harness.engine.scheduler import Scheduler
from harness.engines import EngineBuilder
from harness.errors import CapacityError, UsageError
from harness.oracle import FollowedText
from harness.subjects import SUBJECTS

TIE = tie_margin(Dtype.BF16)
# The prefill's token, then rounds of 3, 1 and 2 tokens.
TOKENS, BEST, ROUNDS = (7, 1, 2, 3, 4, 5, 6), (7, 1, 2, 3, 9, 5, 8), (3, 1, 2)


def along(
    shortfalls: tuple[float, ...] = (0,) * 7, steps: tuple[float, ...] = (0,) * 3
) -> FollowedText:
    """The oracle along the text."""
    return FollowedText(
        shortfalls=shortfalls,
        best_ids=BEST[: len(shortfalls)],
        accept_lengths=(3, 2, 2),
        step_shortfalls=steps,
    )


def verdicts(expected: FollowedText, prefills: int = 1) -> list[bool]:
    """Whether tokens, accept lengths and their sum pass."""
    obtained = Generation(list(TOKENS), list(ROUNDS), prefills=prefills)
    return [c.passed for c in judge_text(obtained, expected, Dtype.BF16, count=7)]


@pytest.mark.parametrize(
    ("expected", "passes"),
    [
        pytest.param(along(), [True, True, True], id="own"),
        pytest.param(along(shortfalls=(0, 0, 0, 0, TIE, 0, 0)), [True, True, True], id="tie"),
        pytest.param(along(shortfalls=(0, 0, 0, 0, TIE, 0, 1)), [False, True, True], id="behind"),
        pytest.param(along(shortfalls=(0, 0, 0, 0, 0, 0, math.nan)), [False, True, True], id="nan"),
        pytest.param(along(steps=(0, TIE, 0)), [True, True, True], id="tied-step"),
        pytest.param(along(steps=(TIE, 0, 1)), [True, False, True], id="step-behind-a-tie"),
    ],
)
def test_a_tie_ends_no_judgement(expected: FollowedText, passes: list[bool]) -> None:
    assert verdicts(expected) == passes


def test_tokens_that_no_round_emitted_are_reported() -> None:
    obtained = Generation(list(TOKENS), list(ROUNDS), prefills=2)
    *_, total = judge_text(obtained, along(), Dtype.BF16, count=7)
    assert total.verdict is Verdict.BROKEN_INVARIANT


def test_messages_name_item_obtained_expected_and_shortfall() -> None:
    expected = along(shortfalls=(0, 0, 0, 0, 0.04, 0, 0.2), steps=(0, 0.125, 0))
    obtained = Generation(list(TOKENS), list(ROUNDS), prefills=1)
    tokens, steps, _ = judge_text(obtained, expected, Dtype.BF16, count=7)
    assert tokens.message == (
        "tokens: item 6 is 6, expected 8; it falls short by 0.2 RMS, a tie by 0.045 at most"
    )
    assert (tokens.verdict, tokens.where, tokens.bad_rows) == (Verdict.WRONG_TOKENS, "item 6", 1)
    assert tokens.tokens == TokenCounts(judged=7, tied=1, unjudged=0)
    assert steps.message == (
        "accept_lengths: item 1 is 1, expected 2; "
        "it falls short by 0.125 RMS, a tie by 0.045 at most"
    )
    twice = judge_tokens(TOKENS, along((0, 0, 0, 0, 0.1, 0, 0.2)), Dtype.BF16, count=7)
    said = "of several wrong tokens the first is named, behind which a text is another one"
    assert twice.message.startswith("tokens: item 4 is 4, expected 9; "), said
    assert (twice.where, twice.bad_rows) == ("item 4", 2), said
    tied = judge_tokens(TOKENS, along((0.04, 0, 0, 0, 0.03, 0, 0)), Dtype.BF16, count=7)
    assert tied.message == "tokens: 2 of 7 tie with the oracle's choice"
    assert (tied.error, tied.where, tied.to_quantity().ratio < 1) == (0.04, "item 0", True)


def test_a_token_that_falls_short_by_the_margin_itself_is_counted_as_tied() -> None:
    found = judge_tokens(TOKENS, along((0, 0, 0, 0, TIE, 0, 0)), Dtype.BF16, count=7)
    assert (found.passed, found.tokens) == (True, TokenCounts(judged=7, tied=1))


@pytest.mark.parametrize(("count", "came"), [(8, "7 came, expected 8"), (6, "7 came, expected 6")])
def test_a_text_has_as_many_tokens_as_were_asked_for(count: int, came: str) -> None:
    found = judge_tokens(TOKENS, along(), Dtype.BF16, count)
    assert (found.verdict, found.message) == (Verdict.WRONG_TOKENS, f"tokens: {came}")
    assert found.to_quantity().ratio > 1


@pytest.mark.parametrize(
    ("dtype", "unjudged", "passes"),
    [
        (Dtype.FP32, 0, True),
        (Dtype.FP32, 1, False),
        (Dtype.BF16, 4, True),
        (Dtype.BF16, 5, False),
    ],
)
def test_tokens_without_judgement_are_counted_and_limited(
    dtype: Dtype, unjudged: int, passes: bool
) -> None:
    known = 200 - unjudged
    expected = replace(along(), shortfalls=(0,) * known, best_ids=(1,) * known)
    found = judge_tokens([1] * 200, expected, dtype, count=200)
    assert found.tokens == TokenCounts(judged=known, tied=0, unjudged=unjudged)
    assert found.passed == passes
    if not passes:
        counts = f"{known} judged, 0 tied, {unjudged} unjudged of 200"
        limit = {Dtype.FP32: "0%", Dtype.BF16: "2%"}[dtype]
        assert found.message == f"tokens: {counts}, at most {limit} may be unjudged"


def test_counts_add_up() -> None:
    first, second = TokenCounts(judged=5, tied=2), TokenCounts(judged=3, tied=1, unjudged=4)
    assert first + second == TokenCounts(judged=8, tied=3, unjudged=4)


def test_a_failing_engine_becomes_a_line() -> None:
    def broken() -> Scheduler:
        raise CapacityError("pages = 2 is not accepted\nand more")

    assert transcribe(broken, [[1]], 4) == "CapacityError: pages = 2 is not accepted"


@pytest.fixture(scope="module")
def pair() -> Pair:
    return TinyPair("gqa").pair


def test_a_pair_of_another_family_is_refused(pair: Pair) -> None:
    with pytest.raises(UsageError, match=r"subject = 'trtllm_mla/reference' .* family mha"):
        EngineBuilder(pair, SUBJECTS["trtllm_mla/reference"], None, CONFIG)


@pytest.mark.parametrize("capture_bs", [(), (1, 2)], ids=["eager", "graph"])
def test_a_single_step_drafts_nothing_more(pair: Pair, capture_bs: tuple[int, ...]) -> None:
    config = replace(CONFIG, capture_bs=capture_bs)
    subject, prompts = SUBJECTS["trtllm_mha/reference"], [[5, 9, 3], [14]]
    target_only = EngineBuilder(pair, subject, None, config).scheduler().generate(prompts, 6)
    spec = EngineBuilder(pair, subject, spec_config(1, 2), config).scheduler().generate(prompts, 6)
    assert [text.token_ids for text in spec] == [text.token_ids for text in target_only]
    assert {n for text in spec for n in text.accept_lengths} <= {1, 2}
