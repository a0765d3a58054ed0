"""The shipped pairs generate the oracle's text, in the oracle's rounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import mean

import pytest
import torch

from fixtures.models import shipped
from fixtures.models.shipped import FAMILIES, Setup
from fixtures.pytest_plugin.run_again import run_again
from harness.core.case import Dtype, Execution
from harness.core.environment import environment
from harness.core.record import Record, Verdict
from harness.differential.generated_text import judge_text
from harness.engine.spec_config import SpecVersion

EAGER, V1 = Execution.EAGER, SpecVersion.V1
FEW, MANY = Setup.prompts, 32
OF_A_DRAFT = ("DraftRunner", "DraftExtendRunner")
SETUPS = {
    setup.id: setup
    for pair in FAMILIES
    for setup in (
        Setup(pair=pair, version=None, execution=EAGER),
        Setup(pair=pair, version=None),
        Setup(pair=pair, version=V1, execution=EAGER),
        Setup(pair=pair, version=V1),
        Setup(pair=pair, execution=EAGER, page_size=1),
        Setup(pair=pair, prompts=MANY),
        Setup(pair=pair, overlap=True, execution=EAGER),
        Setup(pair=pair, overlap=True, max_bs=3),
        Setup(pair=pair, kernel="trtllm_gen", page_size=32),
        Setup(pair=pair, kernel="trtllm_gen", page_size=32, version=V1),
    )
} | {
    setup.id: setup
    for setup in (
        Setup(pair="gqa", kernel="xqa"),
        Setup(pair="gqa", kernel="xqa", version=V1),
        Setup(pair="gqa", kernel="xqa", version=V1, execution=EAGER),
        Setup(pair="mla", kernel="flash_mla", page_size=64, overlap=True),
    )
}
# At less, ties part the texts of two right engines.
FLOAT32 = [setup for setup in SETUPS.values() if setup.dtype is Dtype.FP32 and setup.version]
# What asks the same engine runs next to it.
for_each = partial(pytest.mark.parametrize, "setup", ids=lambda setup: setup.id, scope="module")
each_setup = for_each(SETUPS.values())


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("index", range(FEW), ids="prompt{}".format)
@each_setup
def test_text(setup: Setup, index: int, judge: Callable[[Setup, int], None]) -> None:
    judge(setup, index)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("index", range(FEW, MANY), ids="prompt{}".format)
@for_each([setup for setup in SETUPS.values() if setup.prompts == MANY])
def test_text_of_later_requests(
    setup: Setup, index: int, judge: Callable[[Setup, int], None]
) -> None:
    judge(setup, index)


@pytest.fixture
def judge(
    device: torch.device, record_trial: Callable[[Record], None], request: pytest.FixtureRequest
) -> Callable[[Setup, int], None]:
    """Judges and records a prompt of a setup; red, or refused, where the trial is."""
    command = run_again(f"pytest '{request.node.nodeid}'", request.config)

    def judge_prompt(setup: Setup, index: int) -> None:
        blank = untried(setup, index, device, command)
        record_trial(blank)
        if reason := setup.refusal(device):
            record_trial(replace(blank, verdict=Verdict.REFUSED, message=reason))
            pytest.skip(reason)
        record = trial(setup, index, device, blank)
        record_trial(record)
        if record.verdict.is_red:
            pytest.fail(f"{record.message}\nreproduce: {record.reproduce}", pytrace=False)

    return judge_prompt


def untried(setup: Setup, index: int, device: torch.device, reproduce: str) -> Record:
    """The record of a prompt that has not run: an error without a cause."""
    return Record(
        case=f"{setup.pair}/prompt{index}",
        subject=setup.subject.name,
        family=setup.subject.family,
        mode=setup.mode,
        execution=setup.execution,
        device=str(device),
        verdict=Verdict.ERROR,
        environment=environment(str(device)),
        reproduce=reproduce,
    )


def trial(setup: Setup, index: int, device: torch.device, blank: Record) -> Record:
    """One prompt of one setup, judged; the message of a passed one counts ties."""
    started = time.perf_counter()
    generations = shipped.run(setup, device).generations
    if isinstance(generations, str):
        return replace(blank, message=generations)
    text = generations[index]
    due = shipped.expected(setup, index, text)
    found = judge_text(text, due, setup.dtype, shipped.NEW)
    bad = [comparison for comparison in found if not comparison.passed]
    return replace(
        blank,
        verdict=bad[0].verdict if bad else Verdict.PASSED,
        message="; ".join(c.message for c in bad or found if c.message),
        quantities=tuple(comparison.to_quantity() for comparison in found),
        accept_lengths=tuple(text.accept_lengths),
        tokens=found[0].tokens,
        seconds=time.perf_counter() - started,
    )


@each_setup
def test_every_page_comes_back_and_nothing_races(setup: Setup, device: torch.device) -> None:
    if reason := setup.refusal(device):
        pytest.skip(reason)
    run = shipped.run(setup, device)
    assert run.lost_pages == 0
    assert run.hazards == ()


@each_setup
def test_every_captured_graph_is_replayed(setup: Setup, device: torch.device) -> None:
    if reason := setup.refusal(device):
        pytest.skip(reason)
    replays = shipped.run(setup, device).replays
    if setup.execution is EAGER:
        assert replays == {}
        return
    assert replays.keys() == {"TargetVerifyRunner", *(OF_A_DRAFT if setup.version else ())}
    # A round drafts once, verifies once and extends once.
    [rounds] = set(replays.values())
    assert rounds >= (shipped.NEW - 1) // (shipped.NUM_DRAFT_TOKENS if setup.version else 1)


@for_each(FLOAT32)
def test_speculation_changes_no_token(setup: Setup, device: torch.device) -> None:
    target_only = shipped.run(Setup(pair=setup.pair, version=None), device).texts
    texts = zip(shipped.run(setup, device).texts[: len(target_only)], target_only, strict=True)
    assert all(spec.token_ids == due.token_ids for spec, due in texts)


@pytest.mark.parametrize("pair", FAMILIES)
def test_drafts_are_worth_it_and_some_are_rejected(pair: str, device: torch.device) -> None:
    texts = shipped.run(Setup(pair=pair, prompts=MANY), device).texts
    lengths = [n for text in texts for n in text.accept_lengths]
    assert mean(lengths) >= 2.0
    assert set(lengths) == {1, 2, 3, 4}
