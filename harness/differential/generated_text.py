"""Comparison of a generated text, and its accept lengths, with the oracle's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

from harness.differential.compare import Comparison, compare_exact, compare_tokens
from harness.engine.request import Generation
from harness.engine.scheduler import Scheduler
from harness.errors import FAILURES, first_line


class ExpectedText(Protocol):
    """The oracle's answer to one prompt, or a golden of it; see ``oracle.OracleGeneration``."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens."""
        ...

    @property
    def accept_lengths(self) -> tuple[int, ...]:
        """Tokens per round."""
        ...

    @property
    def margins(self) -> tuple[float, ...]:
        """Top-1 minus top-2 logit of every token, in units of the RMS."""
        ...

    @property
    def step_margins(self) -> tuple[float, ...]:
        """Smallest margin of every round."""
        ...


def transcribe(
    engine: Callable[[], Scheduler], prompts: Sequence[Sequence[int]], count: int
) -> list[Generation] | str:
    """``count`` tokens after every prompt, or the engine's failure in one line."""
    try:
        return engine().generate(prompts, count)
    except FAILURES as error:
        return first_line(error)


def judge_text(obtained: Generation, expected: ExpectedText, tie: float) -> list[Comparison]:
    """Comparisons of tokens, accept lengths and their sum.

    After a tie two right texts part ways, and so do their rounds: accept lengths are judged as
    far as the texts agree.

    Args:
        obtained: the engine's text.
        expected: the oracle's.
        tie: largest margin at which either of two tokens may win, see ``tolerance.tie_margin``.
    """
    tokens = compare_tokens(obtained.token_ids, expected.token_ids, expected.margins, tie)
    rounds = _agreed_rounds(obtained.token_ids, expected)
    return [
        tokens,
        compare_tokens(
            obtained.accept_lengths[:rounds],
            expected.accept_lengths[:rounds],
            expected.step_margins,
            tie,
            "accept_lengths",
        ),
        compare_exact(
            "completion_tokens",
            obtained.prefills + sum(obtained.accept_lengths) - obtained.cut,
            obtained.completion_tokens,
        ),
    ]


def _agreed_rounds(obtained: Sequence[int], expected: ExpectedText) -> int | None:
    """Expected rounds before the one in which the texts part ways, None where they never do."""
    pairs = enumerate(zip(obtained, expected.token_ids, strict=False))
    parted = next((i for i, (a, b) in pairs if a != b), None)
    if parted is None:
        return None
    return sum(1 + emitted <= parted for emitted in accumulate(expected.accept_lengths))
