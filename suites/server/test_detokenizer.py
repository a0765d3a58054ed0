"""Incremental detokenization gives the text of all tokens so far, at every boundary."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer

from harness.core.paths import MODELS
from harness.server.engine_process.detokenizer import IncrementalDetokenizer

TEXTS = (
    "def first(items):\n    return",
    "h\u00e9\u00e9 \u6f22\u5b57 \U0001f600 x",
    "\ufffd e\u0301 \ufffd",
)
REPLACEMENT = "\ufffd"


@pytest.fixture(scope="module", params=["gqa", "mla"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer.from_file(str(MODELS / request.param / "target" / "tokenizer.json"))


@pytest.mark.parametrize("text", TEXTS)
def test_every_prefix_of_a_text(tokenizer: Tokenizer, text: str) -> None:
    ids, detokenize = tokenizer.encode(text).ids, IncrementalDetokenizer(tokenizer)
    found = [detokenize([token]) for token in ids]
    expected = [tokenizer.decode(ids[: n + 1]) for n in range(len(ids))]
    told = f"a text so far is what its tokens decode to, U+FFFD for a part of a character: {found}"
    assert found == expected, told
    assert found[-1] == tokenizer.decode(ids) == text, f"all tokens give the text: {found[-1]}"


@pytest.mark.parametrize("seed", range(20))
def test_every_prefix_of_random_tokens_in_chunks(tokenizer: Tokenizer, seed: int) -> None:
    """Pieces of characters, special tokens and none at all, in chunks of up to five."""
    draw = random.Random(seed)
    ids = [*range(tokenizer.get_vocab_size())]
    pieces = [token for token in ids if REPLACEMENT in tokenizer.decode([token])]
    detokenize, sent = IncrementalDetokenizer(tokenizer), list[int]()
    unfinished = 0
    for _ in range(40):
        chunk = draw.choices([*pieces, 0, *draw.sample(ids, 20)], k=draw.randrange(6))
        sent += chunk
        found = detokenize(chunk)
        assert found == tokenizer.decode(sent)
        unfinished += found.endswith(REPLACEMENT)
    assert unfinished
