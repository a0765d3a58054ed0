"""Speculative greedy output is the target's own, with the accept lengths of whole sequences."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fixtures.toys.toy import DRAFT, TARGET, VOCAB, expected_generation
from fixtures.toys.toy_engine import PROMPTS, spec_config, toy_engine
from harness.engine.request import Generation

NEW = 14
SHAPES = ((1, 2), (2, 2), (2, 3), (3, 3), (3, 4), (4, 3), (5, 6), (5, 2))


def test_target_only_output_is_the_dense_models_greedy_continuation() -> None:
    generations = toy_engine().engine.generate(PROMPTS, NEW)
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        tokens = list(prompt)
        for _ in range(NEW):
            tokens.append(int(TARGET.dense(tokens).next_token_logits[-1].argmax()))
        assert generation.token_ids == tokens[len(prompt) :]
        assert generation.accept_lengths == [1] * (NEW - 1)


@pytest.mark.parametrize("version", [1, 2], ids=["draft_extend_v1", "draft_extend_v2"])
@pytest.mark.parametrize(("steps", "width"), SHAPES, ids=lambda n: str(n))
def test_tokens_and_accept_lengths_are_those_of_whole_sequences(
    steps: int, width: int, version: int
) -> None:
    generations = toy_engine(spec_config(steps, width, version)).engine.generate(PROMPTS, NEW)
    assert_as_expected(generations, steps, width)


@pytest.mark.parametrize("chunk_size", [1, 3, 4, 5, 100])
@pytest.mark.parametrize("version", [1, 2], ids=["draft_extend_v1", "draft_extend_v2"])
def test_chunks_change_nothing(chunk_size: int, version: int) -> None:
    toy = toy_engine(spec_config(3, 4, version), chunk_size=chunk_size)
    generations = toy.engine.generate(PROMPTS, NEW)
    chains = toy.trace.of("target_verify")[0].input_ids.view(-1, 4).tolist()
    for prompt, (first, draft, *_) in zip(PROMPTS, chains, strict=False):
        hidden = TARGET.dense(prompt).hidden_states
        logits = DRAFT.dense([*prompt[1:], first], hidden).next_token_logits
        told = "a request's drafts follow its own prompt, whichever chunk that ends in"
        assert draft == int(logits[-1].argmax()), told
    assert_as_expected(generations, 3, 4)


CROWD = [[(7 * i + j * j) % VOCAB for j in range(1 + 5 * i % 23)] for i in range(37)]
"""More requests than run at a time, of no two lengths in a row."""


@pytest.mark.parametrize("version", [1, 2], ids=["draft_extend_v1", "draft_extend_v2"])
@pytest.mark.parametrize(("steps", "width"), [(9, 10), (15, 16)], ids=lambda n: str(n))
def test_a_crowd_of_wide_chains(steps: int, width: int, version: int) -> None:
    config = spec_config(steps, width, version)
    engine = toy_engine(config, max_bs=33, max_context_len=128, num_pages=1024).engine
    assert_as_expected(engine.generate(CROWD, NEW), steps, width, CROWD)


def assert_as_expected(
    generations: list[Generation],
    steps: int,
    width: int,
    prompts: Sequence[Sequence[int]] = PROMPTS,
) -> None:
    for prompt, generation in zip(prompts, generations, strict=True):
        expected = expected_generation(prompt, NEW, steps, width)
        assert generation.token_ids == expected.tokens
        assert generation.accept_lengths == expected.accept_lengths
