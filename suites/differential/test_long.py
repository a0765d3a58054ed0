"""Rows of production length agree with the oracle on the kernels of a GPU; one at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fixtures.plan import long_trials
from harness.core.case import Case, Execution
from harness.core.record import Record, Verdict
from harness.differential.trial import explanation, run_trial, untried
from harness.subjects import Subject


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" not in metafunc.fixturenames:
        return
    planned = long_trials(metafunc.config.getoption("--device"))
    metafunc.parametrize(
        ("case", "subject", "execution"),
        [pytest.param(c, s, e, id=f"{c.id}-{s.name}-{e}") for c, s, e in planned],
    )


@pytest.mark.usefixtures("recorded")
@pytest.mark.xdist_group("long")
def test_long_case(
    case: Case,
    subject: Subject,
    execution: Execution,
    device: torch.device,
    record_trial: Callable[[Record], None],
) -> None:
    record_trial(untried(case, subject, execution, device))
    record = run_trial(case, subject, execution, device)
    torch.cuda.empty_cache()
    record_trial(record)
    if record.verdict is Verdict.REFUSED:
        pytest.skip(record.message)
    if record.verdict.is_red:
        pytest.fail(explanation(record), pytrace=False)
