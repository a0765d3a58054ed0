"""Whatever number of a golden changes, something turns red and says that it is the golden."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from fixtures.pytest_plugin import followed, goldens
from fixtures.pytest_plugin.goldens import GoldenPrompt, load_prompt, load_row
from fixtures.tables import find
from harness.core.case import Case, Execution
from harness.core.record import Verdict
from harness.core.tolerance import Budget
from harness.differential import judge
from harness.differential.compare import Comparison
from harness.differential.expected import Answer, Expected, expect
from harness.differential.forward import run_forward
from harness.differential.golden import Golden, GoldenStore, judge_by_golden, kept, project
from harness.differential.inputs import make_trial_inputs
from harness.differential.trial import run_trial
from harness.errors import GoldenError
from harness.oracle import FollowedText
from harness.subjects import SUBJECTS
from suites.differential import test_goldens
from suites.speculative import test_golden_prompts

EAGER, GRAPH = Execution.EAGER, Execution.GRAPH
ROWS = {
    "mha-multi_step_draft-bs2_ragged": "trtllm_mha/xqa",
    "mla-target_verify-bs2_ragged": "trtllm_mla/trtllm_gen",
}
# What there is to change, and by how much: a multiple of the largest element.
TENSORS = {"logits": 0.5, "hidden_states": 0.5}
PROMPT = ("gqa", 0)
WRONG = {"token_ids": lambda token: 7 if token != 7 else 8, "accept_lengths": lambda n: n % 4 + 1}

pytestmark = pytest.mark.usefixtures("recorded")


def recorded(case: Case) -> Golden:
    golden = load_row(case)
    assert golden is not None
    return golden


def changed(golden: Golden, name: str, element: int, by: float) -> Golden:
    tensor = golden.tensors[name].clone()
    tensor.view(-1)[element] += by * tensor.abs().max()
    return replace(golden, tensors={**golden.tensors, name: tensor})


class Store(GoldenStore):
    """Has one golden."""

    def __init__(self, golden: Golden) -> None:
        self.golden = golden

    def settle(self, *_: Any) -> Any:
        """The golden, whatever is asked for."""
        return self.golden, None


@pytest.mark.parametrize("row", ROWS)
def test_the_tables_below_have_every_number(row: str) -> None:
    assert recorded(find(row)).tensors.keys() == TENSORS.keys()
    names = {field.name for field in fields(GoldenPrompt)}
    assert names == WRONG.keys()
    found = goldens.settle_prompt(GoldenStore(goldens.FOLDER), *PROMPT)
    assert (found.facts.keys(), found.tensors.keys()) == (names, set())


@pytest.mark.parametrize("execution", [EAGER, GRAPH])
@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("row", ROWS)
def test_a_row_names_its_golden(row: str, name: str, execution: Execution) -> None:
    case, subject = find(row), SUBJECTS[ROWS[row]]
    golden = recorded(case)
    fine = run_trial(case, subject, execution, golden=golden)
    assert fine.verdict is Verdict.PASSED
    assert {f"golden.{n}" for n in TENSORS} < {quantity.name for quantity in fine.quantities}
    for element in (0, golden.tensors[name].numel() // 2, -1):
        record = run_trial(
            case, subject, execution, golden=changed(golden, name, element, TENSORS[name])
        )
        assert record.verdict is Verdict.WRONG_GOLDEN, record.message
        assert record.message.startswith(f"golden.{name}: 1 of ")
        assert record.message.endswith("; the oracle agrees: it has changed, or the golden has")


def test_a_golden_is_not_blamed_for_what_the_oracle_refuses_in_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row, subject = next(iter(ROWS.items()))
    case, allowed = find(row), judge._budgets
    golden = changed(recorded(case), "logits", 0, TENSORS["logits"])

    def no_logits(*words: Any) -> dict[str, Budget]:
        return allowed(*words) | {"logits": Budget(floor=0.0, factor=0.0, why="a test")}

    monkeypatch.setattr(judge, "_budgets", no_logits)
    message = run_trial(case, SUBJECTS[subject], EAGER, golden=golden).message
    assert "; logits: " in message
    assert "; golden.logits: " in message
    assert "refuses it too" in message
    assert "it has changed" not in message


def test_a_wrong_cache_does_not_make_the_oracle_refuse_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row, subject = next(iter(ROWS.items()))
    golden = changed(recorded(find(row)), "logits", 0, TENSORS["logits"])
    wrong = Comparison(
        quantity="kv_cache.key0", verdict=Verdict.WRONG_NUMBERS, error=1.0, message="a wrong key"
    )
    monkeypatch.setattr(judge, "_cache", lambda *_: [wrong])
    message = run_trial(find(row), SUBJECTS[subject], EAGER, golden=golden).message
    said = "the oracle agrees to an answer that is right, whatever the cache holds after it"
    assert "a wrong key; golden.logits: " in message, said
    assert message.endswith("; the oracle agrees: it has changed, or the golden has"), said


@pytest.mark.parametrize("name", ["hidden_states", "next_token_logits"])
def test_an_answer_of_another_shape_is_left_to_the_oracle(name: str) -> None:
    row = "mla-target_verify-bs2_ragged"
    case, subject = find(row), SUBJECTS[ROWS[row]]
    right = run_forward(subject, make_trial_inputs(case), EAGER)
    short: dict[str, Any] = {name: getattr(right.output, name)[:-1]}
    wrong = replace(right, output=replace(right.output, **short))
    said = f"{name} of a row too few are told as such, and no golden is compared with them"
    try:
        found = judge.judge(wrong, EAGER, subject.numerics("cpu"), (), golden=recorded(case))
    except IndexError as error:
        pytest.fail(f"{said}, and the judge ends with no {error!r}")
    quantity = name.removeprefix("next_token_")
    red = [(c.quantity, c.verdict) for c in found if not c.passed]
    assert red == [(quantity, Verdict.WRONG_SHAPE)], f"{said}: {red}"
    assert not any(c.quantity.startswith("golden.") for c in found), said


@pytest.mark.parametrize("row", ROWS)
def test_an_oracle_that_changed_is_contradicted(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of oracle and plain implementation alike, as a mistake in the dense problem would be.
    def wrong(*args: Any, **kwargs: Any) -> Expected:
        found = expect(*args, **kwargs)
        both = {
            name: replace(answer, logits=answer.logits * 1.1)
            for name, answer in vars(found).items()
            if isinstance(answer, Answer)
        }
        return replace(found, **both)

    def agreeing(*args: Any) -> Answer:
        answer = answer_of(*args)
        return replace(answer, logits=answer.logits * 1.1)

    answer_of = judge._answer
    monkeypatch.setattr(judge, "expect", wrong)
    monkeypatch.setattr(judge, "_answer", agreeing)
    case, subject = find(row), SUBJECTS[ROWS[row]]
    assert run_trial(case, subject, EAGER).verdict is Verdict.PASSED
    record = run_trial(case, subject, EAGER, golden=recorded(case))
    assert record.verdict is Verdict.WRONG_GOLDEN
    assert record.message.startswith("golden.logits: ")


@pytest.mark.parametrize("row", ROWS)
def test_a_change_too_small_for_any_budget_is_seen_by_the_oracle_itself(row: str) -> None:
    golden = recorded(find(row))
    test_goldens.test_row(find(row), Store(golden))
    for name in TENSORS:
        with pytest.raises(AssertionError, match="Mismatched elements: 1 /"):
            test_goldens.test_row(find(row), Store(changed(golden, name, 5, 1e-4)))


def test_rows_without_a_golden() -> None:
    row = find("mha-decode-bs2_ragged")
    assert load_row(row) is not None
    assert load_row(replace(row, id="other")) is None
    assert load_row(replace(row, prefix_lens=(1, 2))) is None


def test_a_missing_golden_is_an_error(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goldens, "_verified", lambda: GoldenStore(tmp_path))
    with pytest.raises(GoldenError, match="has no golden 'mha-decode-bs2_ragged'; record it with"):
        load_row(find("mha-decode-bs2_ragged"))


def random_rows(seed: int) -> torch.Tensor:
    """400 hidden states."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(400, 2048, generator=generator, dtype=torch.float64)


def answer(hidden_states: torch.Tensor) -> Answer:
    return Answer(hidden_states=hidden_states, logits=hidden_states[:, :8])


def judged(golden: Golden, own: Answer, rounding: Answer, fed: Any = None) -> dict[str, Comparison]:
    allowed = Budget(floor=1e-4, factor=2.0, why="a test")
    found = judge_by_golden(
        golden,
        own,
        rounding,
        fed,
        {"hidden_states": allowed, "logits": allowed},
        [f"row {i}" for i in range(len(own.logits))],
        oracle_agrees=True,
    )
    return {comparison.quantity: comparison for comparison in found}


@pytest.mark.parametrize("error", [1e-6, 1e-3])
def test_one_element_wrong_by_four_budgets_is_seen_in_sixteen_sums(error: float) -> None:
    exact = random_rows(0)
    plain, own = (exact + random_rows(seed) * error for seed in (1, 2))
    golden = replace(recorded(find("mha-decode-bs2_ragged")), tensors=kept(answer(exact)))
    fine = judged(golden, answer(own), answer(plain - exact))["golden.hidden_states"]
    assert fine.passed
    budgets = 2 * (plain - exact).norm(dim=-1)
    budgets = budgets.clamp(min=1e-4 * exact.norm(dim=-1))
    rows = torch.arange(len(own))
    own[rows, (rows * 1031) % own.shape[1]] += 4 * budgets
    found = judged(golden, answer(own), answer(plain - exact))["golden.hidden_states"]
    assert (found.bad_rows, found.verdict) == (len(own), Verdict.WRONG_GOLDEN)


def test_the_signs_never_change() -> None:
    first = ["++----++--+--+--", "++-------++--+--"]
    assert project(torch.eye(2)).abs().unique().tolist() == [0.25]
    assert ["".join("+" if x > 0 else "-" for x in row) for row in project(torch.eye(2))] == first


def test_a_draft_is_judged_up_to_the_token_that_differs() -> None:
    logits = torch.eye(8, dtype=torch.float64)[[3, 4, 5, 1, 2, 6]]  # Two requests of three steps.
    exact = Answer(hidden_states=logits, logits=logits)
    golden = replace(recorded(find("mha-decode-bs2_ragged")), tensors=kept(exact))
    followed_path = torch.tensor([[9, 3, 4], [9, 1, 2]])
    nothing = Answer(hidden_states=logits * 0, logits=logits * 0)
    count = judged(golden, exact, nothing, followed_path)["golden.logits"].rows
    said = "the golden judges the logits of every step of a draft that chose the golden's tokens"
    assert count == 6, f"{said}: 6 rows, not {count}"
    parted = torch.tensor([[9, 7, 4], [9, 1, 7]])
    other = replace(exact, logits=logits.clone())
    other.logits[[1, 2, 5]] += 1
    found = judged(golden, other, nothing, parted)["golden.logits"]
    said = "the golden judges the logits of no step behind a token that differs"
    assert (found.rows, found.passed) == (3, True), f"{said}: 3 rows, not {found.rows}"
    other.logits[4] += 1
    found = judged(golden, other, nothing, parted)["golden.logits"]
    said = "wrong logits of the step that chose the differing token are told with their row"
    assert (found.bad_rows, found.where) == (1, "row 4"), f"{said}: row 4, not {found.where}"
    coarse = torch.zeros_like(logits)
    coarse[4] = 1
    rounded = Answer(hidden_states=nothing.logits, logits=coarse)
    found = judged(golden, other, rounded, parted)["golden.logits"]
    assert found.passed, "a row that is judged has its own rounding, whichever rows are left out"


def text(name: str, place: int) -> GoldenPrompt:
    golden = load_prompt(*PROMPT)
    values = list(getattr(golden, name))
    values[place] = WRONG[name](values[place])
    return replace(golden, **{name: tuple(values)})


@pytest.mark.parametrize("place", [0, 5, -1])
@pytest.mark.parametrize("name", WRONG)
def test_a_prompts_golden_is_the_oracles(name: str, place: int) -> None:
    golden = goldens.settle_prompt(GoldenStore(goldens.FOLDER), *PROMPT)
    test_golden_prompts.test_prompt(*PROMPT, Store(golden))
    facts = {key: list(values) for key, values in vars(text(name, place)).items()}
    with pytest.raises(AssertionError):
        test_golden_prompts.test_prompt(*PROMPT, Store(replace(golden, facts=facts)))


def test_the_oracle_is_asked_about_a_text_that_is_not_the_goldens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = load_prompt(*PROMPT)
    oracles = FollowedText(
        shortfalls=(0.5,),
        best_ids=right.token_ids,
        accept_lengths=right.accept_lengths,
        step_shortfalls=(),
    )
    monkeypatch.setattr(followed, "follow", lambda *_, **__: oracles)
    monkeypatch.setattr(followed, "oracle", lambda _: ())
    found = followed.followed.__wrapped__(*PROMPT, text("token_ids", 9).token_ids)
    said = "a text that parts from the golden is judged along the oracle, not taken for the golden"
    assert found is oracles, said


def test_a_text_that_was_made_without_drafts_contradicts_no_accept_length() -> None:
    # The golden's second step accepts four tokens, long before the texts part.
    parted = text("token_ids", 9).token_ids
    assert load_prompt(*PROMPT).accept_lengths[1] == 4
    said = "a text of one token a step says nothing of the steps that a golden was made by"
    try:
        found = followed.followed.__wrapped__(*PROMPT, parted, speculative=False)
    except GoldenError as error:
        pytest.fail(f"{said}: {error}")
    assert set(found.accept_lengths) == {1}, f"{said}: {found.accept_lengths}"


@pytest.mark.parametrize(
    ("parted", "own", "due", "red"),
    [
        (11, 2, 4, True),  # parts inside the oracle's step, behind the golden's
        (11, 4, 2, True),
        (10, 2, 4, False),  # parts where the golden's step has ended
        (9, 4, 2, False),
        (20, 2, 4, True),
        (20, 4, 4, False),
    ],
)
def test_a_step_is_contradicted_by_the_tokens_that_both_texts_share(
    parted: int, own: int, due: int, red: bool
) -> None:
    golden = replace(load_prompt(*PROMPT), token_ids=tuple(range(20)), accept_lengths=(7, own))
    token_ids = [*range(parted), *range(100, 120 - parted)]
    best_ids = [*range(parted + 1), *range(200, 219 - parted)]
    told = followed.contradiction(golden, token_ids, best_ids, {1: 7, 8: due})
    said = f"the step after 8 tokens accepts {own}, the oracle's {due}" if red else ""
    assert told == said


@pytest.mark.parametrize(
    ("name", "place", "said"),
    [("token_ids", 0, "token 0 is"), ("token_ids", 9, "token 9 is"), ("accept_lengths", 2, "step")],
)
def test_a_right_text_contradicts_a_wrong_golden(
    name: str, place: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = load_prompt(*PROMPT)
    monkeypatch.setattr(followed, "load_prompt", lambda *_: text(name, place))
    with pytest.raises(GoldenError, match=rf"golden 'prompt0' of gqa: .*{said}.* the oracle's"):
        followed.followed.__wrapped__(*PROMPT, right.token_ids, right.accept_lengths)
