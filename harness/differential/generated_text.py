"""A generated text beside the oracle's: from the prompts to comparisons that a record keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

from harness.differential.compare import Comparison, compare_exact, compare_tokens
from harness.engine.request import Generation
from harness.engine.scheduler import Scheduler
from harness.errors import FAILURES, first_line


class ExpectedText(Protocol):
    """What the oracle, or a golden of its, says of one prompt; see ``oracle.Generation``."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens."""
        ...

    @property
    def accept_lengths(self) -> tuple[int, ...]:
        """Tokens a round."""
        ...

    @property
    def margins(self) -> tuple[float, ...]:
        """How decided every token is."""
        ...

    @property
    def step_margins(self) -> tuple[float, ...]:
        """How decided every round is."""
        ...


def transcribe(
    engine: Callable[[], Scheduler], prompts: Sequence[Sequence[int]], count: int
) -> list[Generation] | str:
    """``count`` tokens behind every prompt, or in one line how the engine failed."""
    try:
        return engine().generate(prompts, count)
    except FAILURES as error:
        return first_line(error)


def judge_text(obtained: Generation, expected: ExpectedText, tie: float) -> list[Comparison]:
    """Tokens, accept lengths and their sum against the answer.

    Behind a tie two right texts part ways, and so do their rounds: accept lengths are judged as
    far as the texts agree.

    Args:
        obtained: what an engine made of the prompt.
        expected: what it should have made.
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
