"""Every row on every backend of one release of sglang, or of a checkout: ``--release VERSION``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

from fixtures.drivers.cuda_trials import cuda_trial, keeps_device
from fixtures.drivers.imported_release import import_release
from fixtures.drivers.release_effects import count_effects
from fixtures.plan import effect_trials, upstream_trials
from fixtures.pytest_plugin.run_again import run_again
from fixtures.tables.findings import EFFECTS, FINDINGS, find_finding
from harness.core.case import Case, Execution
from harness.core.record import Record, Verdict
from harness.differential.isolated import TrialProcess
from harness.differential.trial import explanation, untried
from harness.plugin_subjects import PREFIX, plugin_subjects
from harness.sglang.flashinfer_source import hold_to
from harness.sglang.releases import find_release
from harness.sglang_subjects import SGLangSubject, sglang_subjects

COMPILING_S = 600.0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    version = metafunc.config.getoption("--release")
    source = metafunc.config.getoption("--sglang-source")
    device = metafunc.config.getoption("--device")
    planned = []
    if version is not None:
        wanted = metafunc.config.getoption("--backends")
        release = find_release(version)
        subjects = [
            subject
            for subject in (
                *sglang_subjects(release, source, device),
                *plugin_subjects(release, source, device),
            )
            if wanted == "all" or subject.classes.name.startswith((wanted, PREFIX))
        ]
        counted = metafunc.function.__name__ == test_effects.__name__
        trials = effect_trials(subjects) if counted else upstream_trials(subjects)
        name = EFFECTS if counted else ""
        planned = [pytest.param(c, s, e, id=f"{name}{c.id}-{s.name}-{e}") for c, s, e in trials]
    if not planned:
        reason = "needs --release VERSION: specgate upstream"
        planned = [pytest.param(None, None, None, marks=pytest.mark.skip(reason), id="none")]
    metafunc.parametrize(("case", "subject", "execution"), planned)


@pytest.fixture(scope="session")
def released(request: pytest.FixtureRequest) -> None:
    """Import the release, in this process."""
    release = find_release(request.config.getoption("--release"))
    source = request.config.getoption("--sglang-source")
    flashinfer = request.config.getoption("--flashinfer")
    if flashinfer is not None:
        hold_to(flashinfer)
    import_release(release, source)


@pytest.fixture(scope="session")
def trial_process(request: pytest.FixtureRequest, device: torch.device) -> Iterator[TrialProcess]:
    """Runs trials in forks of a process that has imported the release; on CUDA in a new process."""
    if device.type == "cuda":
        run = partial(cuda_trial, device=str(device))
        process = TrialProcess(
            run, keeps_device, patience_s=COMPILING_S, start="spawn", device=device
        )
    else:
        request.getfixturevalue("released")
        process = TrialProcess(is_known=lambda record: find_finding(record, FINDINGS) is not None)
    yield process
    process.close()


@pytest.fixture(scope="session")
def effect_process(released: None) -> Iterator[TrialProcess]:
    """Counts effects in forks of a process that has imported the release."""
    process = TrialProcess(count_effects)
    yield process
    process.close()


def test_case(
    case: Case,
    subject: SGLangSubject,
    execution: Execution,
    trial_process: TrialProcess,
    device: torch.device,
    record_trial: Callable[[Record], None],
    pytestconfig: pytest.Config,
) -> None:
    blank = untried(case, subject, execution, device)
    command = run_again(blank.reproduce, pytestconfig)
    record_trial(replace(blank, reproduce=command))
    record = replace(trial_process.run(case, subject, execution), reproduce=command)
    record_trial(record)
    if record.verdict is Verdict.REFUSED:
        pytest.skip(record.message)
    if record.verdict.is_red:
        pytest.fail(explanation(record), pytrace=False)


def test_effects(
    case: Case,
    subject: SGLangSubject,
    execution: Execution,
    effect_process: TrialProcess,
    record_trial: Callable[[Record], None],
) -> None:
    record_trial(untried(case, subject, execution))
    record = effect_process.run(case, subject, execution)
    record_trial(record)
    if record.verdict.is_red:
        pytest.fail(explanation(record), pytrace=False)
