"""A text is judged up to a tie and not beyond, its rounds as far as the text agrees."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fixtures.toys.tiny_engine import CONFIG, TinyPair
from fixtures.toys.toy_engine import spec_config
from harness.core.record import Verdict
from harness.differential.generated_text import judge_text, transcribe
from harness.engine.models.loader import Pair
from harness.engine.request import Generation
from harness.engine.scheduler import Scheduler
from harness.engines import EngineBuilder
from harness.errors import CapacityError, UsageError
from harness.oracle import OracleGeneration
from harness.subjects import SUBJECTS

TIE, SURE, UNSURE = 0.01, 1.0, 0.005
# The prefill's token, then rounds of 3, 1 and 2 tokens.
TOKENS, ROUNDS = (7, 1, 2, 3, 4, 5, 6), (3, 1, 2)


def answer(unsure_token: int | None = None, unsure_round: int | None = None) -> OracleGeneration:
    """The oracle's, sure of everything but what is named."""
    return OracleGeneration(
        token_ids=TOKENS,
        accept_lengths=ROUNDS,
        top_ids=None,  # type: ignore[arg-type]
        top_logits=None,  # type: ignore[arg-type]
        margins=tuple(UNSURE if i == unsure_token else SURE for i in range(len(TOKENS))),
        step_margins=tuple(UNSURE if i == unsure_round else SURE for i in range(len(ROUNDS))),
    )


def verdicts(
    expected: OracleGeneration, tokens: tuple[int, ...] = TOKENS, rounds: tuple[int, ...] = ROUNDS
) -> list[bool]:
    """Whether tokens, accept lengths and their sum pass; the sum is made to fit."""
    cut = 1 + sum(rounds) - len(tokens)
    obtained = Generation(list(tokens), list(rounds), prefills=1, cut=cut)
    return [comparison.passed for comparison in judge_text(obtained, expected, TIE)]


def test_the_answer_itself_passes() -> None:
    assert verdicts(answer()) == [True, True, True]


def test_another_token_is_wrong_where_the_oracle_is_sure() -> None:
    changed = (7, 1, 2, 3, 9, 5, 6)
    assert verdicts(answer(), changed) == [False, True, True]
    assert verdicts(answer(unsure_token=3), changed) == [False, True, True]
    assert verdicts(answer(unsure_token=4), changed) == [True, True, True]


@pytest.mark.parametrize(
    ("at", "rounds", "passes"),
    [
        (4, (3, 2, 1), True),
        (4, (2, 2, 2), False),
        (1, (1, 1, 1), True),
        (0, (1, 4, 1), True),
        (6, (3, 1, 1, 1), True),
        (6, (3, 2, 1), False),
    ],
)
def test_rounds_are_judged_until_the_texts_part(
    at: int, rounds: tuple[int, ...], passes: bool
) -> None:
    changed = (*TOKENS[:at], 9, *TOKENS[at + 1 :])
    assert verdicts(answer(unsure_token=at), changed, rounds) == [True, passes, True]


def test_another_round_is_wrong_where_the_oracle_is_sure() -> None:
    assert verdicts(answer(), rounds=(3, 2, 1)) == [True, False, True]
    assert verdicts(answer(unsure_round=0), rounds=(3, 2, 1)) == [True, False, True]
    assert verdicts(answer(unsure_round=1), rounds=(3, 2, 1)) == [True, True, True]
    assert verdicts(answer(), rounds=(3, 1, 1)) == [True, False, True]


def test_tokens_that_no_round_emitted_are_reported() -> None:
    obtained = Generation(list(TOKENS), list(ROUNDS), prefills=1, cut=1)
    *_, total = judge_text(obtained, answer(), TIE)
    assert total.verdict is Verdict.BROKEN_INVARIANT


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
