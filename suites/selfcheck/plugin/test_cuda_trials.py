"""A trial on CUDA leaves its record whatever it did, and says when it lost the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fixtures.drivers import cuda_trials
from fixtures.drivers.cuda_trials import cuda_trial, keeps_device
from fixtures.tables import CASES
from harness.core.case import Case, Execution
from harness.core.record import Record, Verdict
from harness.differential.trial import untried
from harness.subjects import SUBJECTS, Subject

CASE, SUBJECT = CASES["mha-decode-bs1_short"], SUBJECTS["trtllm_mha/xqa"]


class CompilationError(Exception):
    """As Triton's, which is none of the errors that a trial keeps."""


def passed(case: Case, subject: Subject, execution: Execution, device: str) -> Record:
    return replace(untried(case, subject, execution, device), verdict=Verdict.PASSED, message="")


def ask() -> Record:
    return cuda_trial(CASE, SUBJECT, Execution.EAGER, "cpu")


def test_a_record_of_a_device_that_answers_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_trials, "run_trial", passed)
    assert ask() == passed(CASE, SUBJECT, Execution.EAGER, "cpu")
    assert keeps_device(ask())


def test_what_escapes_a_trial_is_named_by_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Record:
        raise CompilationError("at 160:16:\n    tl.load(\n    ^\n  the cause ")

    monkeypatch.setattr(cuda_trials, "run_trial", fail)
    record = ask()
    assert (record.verdict, record.message) == (Verdict.ERROR, "CompilationError: the cause")
    assert keeps_device(record)


def test_a_lost_device_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(device: torch.device) -> str:
        return "CUDA error: an illegal memory access was encountered"

    monkeypatch.setattr(cuda_trials, "run_trial", passed)
    monkeypatch.setattr(cuda_trials, "ask", lost)
    record = ask()
    assert record.verdict is Verdict.ERROR
    assert record.message.startswith("device lost: CUDA error: an illegal memory access")
    assert not keeps_device(record)
