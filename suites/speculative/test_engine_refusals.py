"""An engine refuses what it cannot serve in one line, and keeps nothing of it allocated."""

from __future__ import annotations

import pytest

from fixtures.toys.toy import expected_generation
from fixtures.toys.toy_engine import PROMPTS, spec_config, toy_engine
from harness.engine.scheduler import Scheduler
from harness.engine.spec_config import SpecConfig
from harness.errors import CapacityError, UsageError


@pytest.mark.parametrize(
    ("prompt", "count", "message"),
    [
        ([], 3, r"prompt = \[\] .* at least one token"),
        ([1, 2], 0, r"max_new_tokens = 0 .* 1 … 1[89] after [12]"),
        ([1, 2], 19, r"max_new_tokens = 19 .* 1 … 18 after 2"),
    ],
    ids=["empty", "nothing", "too_long"],
)
def test_a_prompt_that_cannot_be_served(prompt: list[int], count: int, message: str) -> None:
    toy = toy_engine(max_context_len=20)
    with pytest.raises(UsageError, match=message):
        toy.engine.submit(prompt, count)
    with pytest.raises(UsageError, match=message):
        toy.engine.generate([[3], prompt], count)
    assert not toy.engine.waiting


@pytest.mark.parametrize(
    "spec", [None, spec_config(3, 4, 1), spec_config(3, 4)], ids=["target_only", "v1", "v2"]
)
@pytest.mark.parametrize(
    "count", [pytest.param(2, id="at_admission"), pytest.param(30, id="while_running")]
)
def test_a_request_too_large_for_the_pools_leaves_nothing(
    spec: SpecConfig | None, count: int
) -> None:
    prompt = PROMPTS[2] * 2 if count == 2 else PROMPTS[0]
    toy = toy_engine(spec, num_pages=6, max_context_len=60)
    free = toy.free
    with pytest.raises(CapacityError, match="pages = "):
        toy.engine.generate([prompt], count)
    assert toy.free == free
    assert toy.engine.idle, "a request that fails is aborted: it neither waits nor runs"
    assert (
        toy.engine.generate([PROMPTS[1]], 3)[0].token_ids
        == expected_generation(PROMPTS[1], 3, 1, 2).tokens
    )


def test_a_request_that_fills_the_pools_to_the_last_token_is_served() -> None:
    """Five pages of four hold 7 tokens, 9 that are generated before the last round, and its 4."""
    toy = toy_engine(spec_config(3, 4), num_pages=6)
    with pytest.raises(UsageError, match=r"tokens of a request and a round = 21 .* <= 20"):
        toy.engine.submit(PROMPTS[0], 11)
    request = toy.engine.submit(PROMPTS[0], 10)
    while not toy.engine.idle:
        toy.engine.step()
    assert request.generation.completion_tokens == 10


def test_an_engine_that_cannot_work() -> None:
    with pytest.raises(UsageError, match="max_bs = 0"):
        toy_engine(max_bs=0)
    toy = toy_engine(spec_config(5, 3), max_context_len=20)
    with pytest.raises(UsageError, match=r"max_context_len = 21 .* <= 20"):
        Scheduler(toy.worker, toy.slots, max_bs=1, max_context_len=21)
