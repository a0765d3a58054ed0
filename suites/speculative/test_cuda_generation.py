"""Real kernels write the oracle's text in bf16, and the same text again."""

from __future__ import annotations

import pytest
import torch

from fixtures.models import shipped
from fixtures.models.shipped import Setup
from fixtures.pytest_plugin.goldens import prompts
from harness.core.case import Execution
from harness.differential.generated_text import judge_text
from harness.engine.spec_config import SpecVersion

SETUPS = {
    setup.id: setup
    for pair, kernel in shipped.ON_HOPPER
    for execution in Execution
    for setup in (
        Setup(pair=pair, kernel=kernel, page_size=64, version=None, execution=execution),
        Setup(pair=pair, kernel=kernel, page_size=64, version=SpecVersion.V1, execution=execution),
        Setup(pair=pair, kernel=kernel, page_size=64, execution=execution),
        Setup(pair=pair, kernel=kernel, page_size=64, overlap=True, execution=execution),
    )
}
each_setup = pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)


@each_setup
@pytest.mark.usefixtures("recorded")
def test_every_token_is_the_oracles_or_ties_with_it(setup: Setup, cuda: torch.device) -> None:
    run = shipped.run(setup, cuda)
    for index, text in enumerate(run.texts):
        found = judge_text(text, shipped.expected(setup, index, text), setup.dtype, shipped.NEW)
        assert [c.message for c in found if not c.passed] == []
    assert run.lost_pages == 0


@each_setup
def test_a_second_run_repeats_the_first(setup: Setup, cuda: torch.device) -> None:
    again = shipped.decode(setup, prompts(setup.pair)[: setup.prompts], cuda)
    assert again.texts == shipped.run(setup, cuda).texts
