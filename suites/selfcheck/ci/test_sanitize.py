"""The sanitizer's sample is of trials that exist, and its lines tell clean from not."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ci import sanitize
from fixtures.plan import trials


@pytest.mark.parametrize("gpu", [(9, 0), (10, 0), (12, 0)])
def test_every_trial_of_the_sample_is_planned(gpu: tuple[int, int]) -> None:
    planned = {
        f"{sanitize.CASE_TEST}[{case.id}-{subject.name}-{execution}]"
        for case, subject, execution in trials(gpu=gpu)
    }
    for check in sanitize.SANITIZER_CHECKS:
        sample = sanitize.trials(check.execution)
        assert len(sample) == 10
        assert set(sample) <= planned


def test_a_capture_keeps_the_allocator_it_needs() -> None:
    uncached = [check.execution for check in sanitize.SANITIZER_CHECKS if check.environment]
    assert uncached == ["eager"]


@pytest.mark.parametrize(
    ("codes", "code", "said"),
    [
        ((0, 0, 0), 0, ["clean"] * 3),
        ((0, 86, 0), 1, ["clean", "errors found", "clean"]),
        ((0, 0, 1), 1, ["clean", "clean", "ended with 1"]),
    ],
)
def test_one_line_a_check(
    codes: tuple[int, ...],
    code: int,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    tool, left = tmp_path / "compute-sanitizer", list(codes)
    tool.touch()
    ran: list[list[str]] = []
    uncached: list[bool] = []

    def run(line: list[str], **options: Any) -> SimpleNamespace:
        ran.append(line)
        uncached.append("PYTORCH_NO_CUDA_MEMORY_CACHING" in options["env"])
        return SimpleNamespace(returncode=left.pop(0))

    monkeypatch.setattr(shutil, "which", lambda name: str(tool))
    monkeypatch.setattr(subprocess, "run", run)
    assert sanitize.main() == code
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(": ")[2] for line in lines] == said
    assert ran[0][:3] == [str(tool), "--tool", "memcheck"]
    assert "kns=metadata" in ran[2]
    told = "the environment of a check is its own: the graphs after it need torch's allocator"
    assert uncached == [True, False, False], f"{told}: {uncached}"


def test_without_the_tool_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/nowhere/compute-sanitizer")
    assert sanitize.main() == 2
    assert "not installed" in capsys.readouterr().err
