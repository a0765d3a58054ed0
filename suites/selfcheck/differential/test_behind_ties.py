"""A wrong token behind a tie is red wherever the text of a shipped pair is judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any

import pytest
import torch

from fixtures.models import shipped
from fixtures.models.shipped import Setup
from fixtures.pytest_plugin.answers import check_answers
from fixtures.pytest_plugin.followed import followed
from fixtures.pytest_plugin.goldens import load_prompt, oracle, prompts
from fixtures.tables.workloads import WORKLOADS
from harness.bench.arms import parse
from harness.core.case import Dtype
from harness.core.record import TokenCounts, Verdict
from harness.core.tolerance import tie_margin
from harness.differential.generated_text import judge_text
from harness.engine.request import Generation
from harness.errors import ContractError
from harness.oracle import FollowedText, follow, greedy, relative_margins, speculate
from harness.server.client.sglang import Answer
from harness.server.client.vllm import NOTHING
from suites.server import test_tokens
from suites.speculative import test_shipped_pairs

pytestmark = [pytest.mark.usefixtures("recorded"), pytest.mark.untraced]
PAIR, TIE = "gqa", tie_margin(Dtype.BF16)
NEXT, BEHIND = 1, 3
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Parted:
    """A text that parts from the golden at a tie, and the same with one token made wrong."""

    tied: int
    right: tuple[int, ...]
    wrong: tuple[int, ...]
    due: int

    @property
    def said(self) -> str:
        """Of the wrong token."""
        at = self.tied + BEHIND
        return f"tokens: item {at} is {self.wrong[at]}, expected {self.due}; it falls short by "


def continued(prompt: Sequence[int], *texts: Sequence[int]) -> tuple[int, ...]:
    """So many tokens that a text is whole, by the oracle's own choice."""
    known = [token for text in texts for token in text]
    more, _ = greedy(oracle(PAIR)[0], [*prompt, *known], shipped.NEW - len(known))
    return (*known, *more)


@cache
def parted(index: int) -> Parted:
    """Of a prompt, at the first tie of its golden."""
    golden, prompt = load_prompt(PAIR, index), prompts(PAIR)[index]
    _, logits = oracle(PAIR)[0].forward(torch.tensor([*prompt, *golden.token_ids]))
    choices = logits[len(prompt) - 1 : -1]
    assert tuple(choices.argmax(-1).tolist()) == golden.token_ids
    tied = int((relative_margins(choices) <= TIE).nonzero()[0])
    second = int(choices[tied].topk(2).indices[NEXT])
    right = continued(prompt, golden.token_ids[:tied], [second])
    at = tied + BEHIND
    _, logits = oracle(PAIR)[0].forward(torch.tensor([*prompt, *right[:at]]))
    wrong = continued(prompt, right[:at], [int(logits[-1].argmin())])
    return Parted(tied, right, wrong, right[at])


class Client:
    """Answers with the given texts, and with the goldens where none is given."""

    def __init__(self, given: dict[int, tuple[int, ...]]) -> None:
        self.texts = {
            prompt: given.get(index, load_prompt(PAIR, index).token_ids)
            for index, prompt in enumerate(prompts(PAIR))
        }

    def generate(self, prompt: tuple[int, ...], count: int) -> Answer:
        """The first so many tokens."""
        ids = self.texts[prompt][:count]
        return replace(NOTHING, output_ids=ids, text="text", prompt_tokens=len(prompt))

    def generate_batch(self, texts: Sequence[tuple[int, ...]], count: int) -> list[Answer]:
        """Of each."""
        return [self.generate(prompt, count) for prompt in texts]


@dataclass(frozen=True)
class Server:
    """Stands for one of sglang in bfloat16."""

    client: Client
    pair: str = PAIR
    kind: str = "sglang"


def reds(setup: Setup, ids: Sequence[int], lengths: Sequence[int]) -> list[str]:
    """What is wrong with an engine's text of the first prompt."""
    cut = 1 + sum(lengths) - len(ids)
    obtained = Generation(list(ids), list(lengths), prefills=1, cut=cut)
    found = judge_text(obtained, shipped.expected(setup, 0, obtained), setup.dtype, shipped.NEW)
    assert found[0].tokens == replace(found[0].tokens, judged=len(ids), unjudged=0)
    return [comparison.message for comparison in found if not comparison.passed]


def test_the_engines_text() -> None:
    text, one_by_one = parted(0), [1] * (shipped.NEW - 1)
    setup = Setup(pair=PAIR, kernel="xqa", version=None)
    assert reds(setup, text.right, one_by_one) == []
    [said] = reds(setup, text.wrong, one_by_one)
    assert said.startswith(text.said)


def test_the_record_of_an_engines_text(monkeypatch: pytest.MonkeyPatch) -> None:
    text, setup = parted(0), Setup(pair=PAIR, kernel="xqa", version=None)
    blank = test_shipped_pairs.untried(setup, 0, CPU, "pytest")
    for ids, verdict in ((text.right, Verdict.PASSED), (text.wrong, Verdict.WRONG_TOKENS)):
        generation = Generation(list(ids), [1] * (shipped.NEW - 1), prefills=1)
        run = shipped.Run([generation], hazards=(), lost_pages=0)
        monkeypatch.setattr(shipped, "run", lambda setup, device, run=run: run)
        record = test_shipped_pairs.trial(setup, 0, CPU, blank)
        assert record.verdict is verdict
        assert record.tokens == TokenCounts(judged=24, tied=1)


def test_the_engines_rounds() -> None:
    text, setup = parted(0), Setup(pair=PAIR, kernel="xqa")
    own = followed(PAIR, 0, text.right).accept_lengths
    begun = list(accumulate(own, initial=1))
    first = next(i for i, at in enumerate(begun) if at > text.tied + 1)
    # Behind the tie the text is what the oracle speculates there, its last round whole.
    prefix = [*prompts(PAIR)[0], *text.right[: begun[first] - 1]]
    count = shipped.NEW - begun[first] + 1
    rest = speculate(*oracle(PAIR), prefix, num_steps=3, num_draft_tokens=4, count=count)
    lengths = (*own[:first], *rest.accept_lengths)
    assert reds(setup, text.right, lengths) == []
    at = max(range(first, len(lengths) - 1), key=lengths.__getitem__)
    split = (*lengths[:at], 1, lengths[at] - 1, *lengths[at + 1 :])
    [said] = reds(setup, text.right, split)
    assert said.startswith(f"accept_lengths: item {at} is 1, expected {lengths[at]}; ")


def test_the_servers_answer() -> None:
    text = parted(6)  # Its tie is the second of the seven tokens that the test asks for.
    test_tokens.test_text_and_batches(Server(Client({6: text.right})))
    with pytest.raises(AssertionError, match=text.said):
        test_tokens.test_text_and_batches(Server(Client({6: text.wrong})))


def test_the_benchmarks_check() -> None:
    index = 1
    text, workload = parted(index), WORKLOADS["smoke-bs2-in32-out32"]
    arm = parse(f"sglang:pair={PAIR}")
    check_answers(arm, Client({index: text.right}), workload)  # type: ignore[arg-type]
    with pytest.raises(ContractError, match=f"prompt {index} of {PAIR}: {text.said}"):
        check_answers(arm, Client({index: text.wrong}), workload)  # type: ignore[arg-type]


def test_the_benchmarks_check_of_an_arm_that_computes_in_float32() -> None:
    index = 1
    text, workload = parted(index), WORKLOADS["smoke-bs2-in32-out32"]
    arm, told = parse(f"embedded:pair={PAIR}"), "no complaint"
    assert arm.is_exact
    try:
        check_answers(arm, Client({index: text.right}), workload)  # type: ignore[arg-type]
    except ContractError as error:
        told = str(error)
    due = f"prompt {index} of {PAIR}: tokens: item {text.tied} is {text.right[text.tied]}, "
    assert told.startswith(due), f"what ties in bfloat16 is wrong in float32: {told}"


def test_a_part_of_a_golden_has_the_steps_that_began_in_it() -> None:
    golden = load_prompt(PAIR, 0)
    first, second = golden.accept_lengths[:2]
    for count, due in ((1, ()), (1 + first, (first,)), (2 + first, (first, second))):
        found = followed(PAIR, 0, golden.token_ids[:count]).accept_lengths
        assert found == due, f"{count} tokens, of which the prefill made one: {found}"


def test_a_golden_is_its_own_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that part from it alone are followed."""
    asked: list[int] = []

    def counted(*args: Any, **options: Any) -> FollowedText:
        asked.append(1)
        return follow(*args, **options)

    monkeypatch.setattr("fixtures.pytest_plugin.followed.follow", counted)
    for index in range(4):
        golden = load_prompt(PAIR, index)
        for count in (5, 24):
            found = followed.__wrapped__(PAIR, index, golden.token_ids[:count])
            assert found.best_ids == golden.token_ids[:count]
        known = (golden.token_ids, golden.accept_lengths)
        assert followed.__wrapped__(PAIR, index, *known).accept_lengths == known[1]
    assert asked == []
    followed.__wrapped__(PAIR, 0, golden.token_ids)
    followed.__wrapped__(PAIR, 3, golden.token_ids, (1, *golden.accept_lengths))
    assert asked == [1, 1]
