"""Prompts of a workload: slices of a text, drawn from the workload's id."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

from harness.bench.session_records import Workload
from harness.errors import UsageError, rejected


def prompts(workload: Workload, text: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """One prompt per request, the same on every machine.

    No two begin with the same token: not even a prefix cache with pages of one token finds anything
    of one prompt in another, so that a cached token always means a cache that was not flushed.

    Args:
        workload: how many, and how long.
        text: token ids.

    Raises:
        UsageError: the text is too short, or knows too few tokens.
    """
    starts = len(text) - workload.input_len + 1
    firsts = sorted(set(text))
    if starts < 1 or len(firsts) < workload.requests:
        accepted = f"at most {len(text)} tokens per prompt and {len(firsts)} requests"
        raise UsageError(rejected(f"workload {workload.id}", workload, accepted))
    seed = hashlib.sha256(workload.id.encode()).digest()
    drawn = random.Random(seed)
    begins = drawn.sample(firsts, workload.requests)
    offsets = [drawn.randrange(starts) for _ in begins]
    length = workload.input_len
    return tuple(
        (begin, *text[offset + 1 : offset + length])
        for begin, offset in zip(begins, offsets, strict=True)
    )
