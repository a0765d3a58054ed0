"""Judgement of a generated text, and its accept lengths, by what the oracle says along it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from harness.core.case import Dtype
from harness.core.record import TokenCounts, Verdict
from harness.core.tolerance import tie_margin, unjudged_share
from harness.differential.compare import Comparison, compare_exact
from harness.engine.request import Generation
from harness.engine.scheduler import Scheduler
from harness.errors import FAILURES, first_line
from harness.oracle import FollowedText


def transcribe(
    engine: Callable[[], Scheduler], prompts: Sequence[Sequence[int]], count: int
) -> list[Generation] | str:
    """``count`` tokens after every prompt, or the engine's failure in one line."""
    try:
        return engine().generate(prompts, count)
    except FAILURES as error:
        return first_line(error)


def judge_text(
    obtained: Generation, expected: FollowedText, dtype: Dtype, count: int
) -> list[Comparison]:
    """Comparisons of tokens, accept lengths and their sum.

    Args:
        obtained: the engine's text, of one prefill.
        expected: along that text and its accept lengths.
        dtype: that the engine computes in.
        count: tokens asked for.
    """
    due, shortfalls = expected.accept_lengths, expected.step_shortfalls
    return [
        judge_tokens(obtained.token_ids, expected, dtype, count),
        _choices("accept_lengths", obtained.accept_lengths, due, shortfalls, dtype),
        compare_exact(
            "completion_tokens",
            obtained.prefills + sum(obtained.accept_lengths) - obtained.cut,
            obtained.completion_tokens,
        ),
    ]


def judge_tokens(
    obtained: Sequence[int], expected: FollowedText, dtype: Dtype, count: int
) -> Comparison:
    """Every token is the oracle's choice behind the tokens before it, or ties with that.

    Args:
        obtained: the subject's text.
        expected: along that text.
        dtype: that the subject computes in.
        count: tokens asked for.
    """
    judged, limit = len(expected.shortfalls), unjudged_share(dtype)
    known = obtained[:judged]
    found = _choices("tokens", known, expected.best_ids, expected.shortfalls, dtype)
    counts = TokenCounts(
        judged=judged,
        tied=sum(0 < shortfall <= tie_margin(dtype) for shortfall in expected.shortfalls),
        unjudged=len(obtained) - judged,
    )
    found = replace(found, tokens=counts)
    if not found.passed:
        return found
    if len(obtained) != count:
        return _red(found, f"{len(obtained)} came, expected {count}")
    if counts.unjudged > limit * count:
        return _red(found, f"{counts} of {count}, at most {limit:.0%} may be unjudged")
    return found


def _red(found: Comparison, cause: str) -> Comparison:
    message = f"{found.quantity}: {cause}"
    return replace(found, verdict=Verdict.WRONG_TOKENS, error=math.inf, where="", message=message)


def _choices(
    quantity: str,
    obtained: Sequence[int],
    due: Sequence[int],
    shortfalls: Sequence[float],
    dtype: Dtype,
) -> Comparison:
    """Items whose shortfall is that of a tie at most; the message of passed ones counts ties."""
    tie = tie_margin(dtype)
    wrong = [i for i, shortfall in enumerate(shortfalls) if not shortfall <= tie]
    at = wrong[0] if wrong else max(range(len(shortfalls)), key=shortfalls.__getitem__, default=0)
    tied = sum(shortfall > 0 for shortfall in shortfalls)
    message = f"{quantity}: {tied} of {len(due)} tie with the oracle's choice" if tied else ""
    if wrong:
        what = f"{quantity}: item {at} is {obtained[at]}, expected {due[at]}"
        message = f"{what}; it falls short by {shortfalls[at]:.3g} RMS, a tie by {tie:.3g} at most"
    return Comparison(
        quantity=quantity,
        verdict=Verdict.WRONG_TOKENS if wrong else Verdict.PASSED,
        error=shortfalls[at] if shortfalls else 0.0,
        allowed=tie,
        where=f"item {at}" if tied else "",
        rows=len(due),
        bad_rows=len(wrong),
        message=message,
    )
