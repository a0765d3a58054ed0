"""A text and its rounds depend on its prompt alone: not on other requests, batches or graphs."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from fixtures.models.shipped import FAMILIES, Engine, Run, Setup, run
from fixtures.pytest_plugin.goldens import prompts
from harness.core.case import Execution
from harness.engine.spec_config import SpecVersion

pytestmark = pytest.mark.untraced
COMPANY = {"alone": (2,), "of_four": (5, 2, 0, 2)}
"""Prompts of a batch, by their numbers; of a batch that has one twice, both are the same text."""
WAYS = [
    (SpecVersion.V1, False, Execution.EAGER),
    (SpecVersion.V1, False, Execution.GRAPH),
    (SpecVersion.V2, False, Execution.EAGER),
    (SpecVersion.V2, False, Execution.GRAPH),
    (SpecVersion.V2, True, Execution.EAGER),
    (SpecVersion.V2, True, Execution.GRAPH),
]
SETUPS = [
    Setup(pair=pair, version=version, overlap=overlap, execution=execution)
    for pair in FAMILIES
    for version, overlap, execution in WAYS
]
# What asks the same engine runs next to it.
each_setup = pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.id, scope="module")


@cache
def again(setup: Setup, device: torch.device) -> tuple[Run, Engine]:
    """What a second engine makes of the setup's prompts, and that engine, for further batches."""
    engine = Engine(setup, device)
    return engine.decode(prompts(setup.pair)[: setup.prompts]), engine


@each_setup
@pytest.mark.parametrize("members", COMPANY.values(), ids=COMPANY)
def test_company_changes_neither_text_nor_rounds(
    setup: Setup, members: tuple[int, ...], device: torch.device
) -> None:
    texts = tuple(prompts(setup.pair)[index] for index in members)
    due = run(setup, device).texts
    _, engine = again(setup, device)
    assert engine.decode(texts).texts == [due[index] for index in members]


@each_setup
def test_versions_graphs_and_overlap_change_neither(setup: Setup, device: torch.device) -> None:
    plainest = Setup(pair=setup.pair, version=SpecVersion.V1, execution=Execution.EAGER)
    assert run(setup, device).texts == run(plainest, device).texts


@each_setup
def test_two_runs_are_one(setup: Setup, device: torch.device) -> None:
    second, _ = again(setup, device)
    assert second == run(setup, device)


@each_setup
def test_rounds_add_up_to_the_tokens(setup: Setup, device: torch.device) -> None:
    for text in run(setup, device).texts:
        assert text.prefills == 1
        assert 1 + sum(text.accept_lengths) - text.cut == len(text.token_ids)
        assert 0 <= text.cut < text.accept_lengths[-1]
