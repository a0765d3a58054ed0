"""Every row agrees with the float64 oracle and its golden on every subject that can run it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from fixtures.covering.rows import values_of_trial
from fixtures.plan import DRAW, custom_trials, trials
from fixtures.pytest_plugin.goldens import load_row
from fixtures.pytest_plugin.run_again import run_again
from fixtures.tables import LONG
from harness.core.case import Case, Execution
from harness.core.record import Record, Verdict
from harness.differential.trial import explanation, run_trial, untried
from harness.subjects import Subject, custom_subjects


def alone(device: torch.device) -> FileLock:
    """Held by one long row at a time: what two of them take may not fit a GPU.

    Where a process sees one GPU of several, each has the index 0 and another name.
    """
    name = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace("/", "-") or "all"
    file = f"specgate-{device.type}-{name}-{device.index or 0}.lock"
    return FileLock(Path(tempfile.gettempdir(), file))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    custom = metafunc.config.getoption("--kernel")
    covering, number = map(metafunc.config.getoption, ("--covering", "--draw"))
    planned = trials(metafunc.config.getoption("--device"), covering=covering)
    if custom is not None:
        planned = custom_trials(custom_subjects(custom))
    if number:
        # Inputs are drawn from the id.
        planned = ((replace(c, id=f"{c.id}{DRAW}{number}"), s, e) for c, s, e in planned)
    metafunc.parametrize(
        ("case", "subject", "execution"),
        [pytest.param(c, s, e, id=f"{c.id}-{s.name}-{e}") for c, s, e in planned],
    )


@pytest.mark.usefixtures("recorded")
def test_case(
    case: Case,
    subject: Subject,
    execution: Execution,
    device: torch.device,
    record_trial: Callable[[Record], None],
    pytestconfig: pytest.Config,
) -> None:
    row, _, _ = case.id.partition(DRAW)
    blank = untried(case, subject, execution, device)
    axes = values_of_trial(case, subject.kernel, execution)
    command = run_again(blank.reproduce, pytestconfig)
    record_trial(replace(blank, axes=axes, reproduce=command))
    with alone(device) if row in LONG else nullcontext():
        record = run_trial(case, subject, execution, device, load_row(case))
    record = replace(record, axes=axes, reproduce=command)
    record_trial(record)
    if record.verdict is Verdict.REFUSED:
        pytest.skip(record.message)
    if record.verdict.is_red:
        pytest.fail(explanation(record), pytrace=False)
