"""A lost device shows as one line, and every later trial has a red record without running."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fixtures.pytest_plugin import device_loss
from fixtures.pytest_plugin.nested_runs import run_forked
from harness.core.paths import ROOT
from harness.core.record import Verdict, read_records

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.untraced

# Stands in for CUDA: two GPUs, and a context that ends with the process's first fault.
CONFTEST = """
import torch
from fixtures.pytest_plugin import gpu_lane
from harness.kernels.packages import WANTED

lost = []

def synchronize(device):
    if lost:
        raise RuntimeError("CUDA error: device-side assert triggered\\nCompile with TORCH_USE_...")

torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 2
torch.cuda.set_device = lambda device: None
torch.cuda.get_device_name = lambda device: "NVIDIA H200"
torch.cuda.get_device_capability = lambda device: (9, 0)
torch.cuda.synchronize = synchronize
gpu_lane.installed = dict(map(str.split, WANTED.values())).get
pytest_plugins = ["fixtures.pytest_plugin.plugin"]
"""
TESTS = """
import pytest
from conftest import lost
from fixtures.fakes.sample_records import trial
from harness.core.record import Verdict

@pytest.mark.parametrize("case", ["before", "wrong", "fatal", "after", "last"])
def test_trial(record_trial, device, case):
    record_trial(trial(case, Verdict.ERROR, device=str(device)))
    assert not lost, "nothing runs on a lost device"
    if case == "fatal" and device.index == 0:
        lost.append(device)
    if lost or case == "wrong":
        record_trial(trial(case, Verdict.WRONG_NUMBERS, message="row 3", device=str(device)))
        raise RuntimeError(f"of {case}")
    record_trial(trial(case, device=str(device)))

def test_late_record(record_trial, device):
    raise RuntimeError("of a trial that leaves no record")

@pytest.mark.parametrize("number", range(3))
def test_no_trial(cuda, number):
    assert False, "nothing runs on a lost device"
"""
AFTER = (Verdict.ERROR, "device lost during test_trial[fatal]")
EXPECTED = {
    "before": (Verdict.PASSED, ""),
    "wrong": (Verdict.WRONG_NUMBERS, "row 3"),
    "fatal": (Verdict.ERROR, "device lost: CUDA error: device-side assert triggered"),
    "after": AFTER,
    "last": AFTER,
}


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TESTS)
    return pytester


Told = dict[str, tuple[Verdict, str]]


def run(project: pytest.Pytester, *args: str) -> tuple[pytest.RunResult, dict[str, Told]]:
    """Also verdict and message by device and case."""
    common = ("-p", "no:cacheprovider", "--device", "cuda", "--report", "out", "-ra")
    result = run_forked(project, *common, *args)
    told: dict[str, Told] = {}
    for record in read_records(project.path / "out" / "records.jsonl"):
        told.setdefault(record.device, {})[record.case] = (record.verdict, record.message)
    return result, told


def test_later_trials_are_recorded_and_do_not_run(project: pytest.Pytester) -> None:
    result, told = run(project, "-n0")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1, failed=3, skipped=5)
    assert told == {"cuda:0": EXPECTED}
    shown = result.stdout.str()
    assert shown.count("RuntimeError: of wrong") == shown.count("RuntimeError: of") > 0
    lines = [line for line in result.outlines if "device lost during" in line]
    [folded] = [line for line in lines if line.startswith("SKIPPED")]
    assert folded.startswith("SKIPPED [5] ")
    assert folded.endswith(": device lost during test_trial[fatal]")


def test_each_worker_has_a_gpu_and_loses_it_alone(project: pytest.Pytester) -> None:
    result, told = run(project, "-n2", "--dist", "each", "-k", "before or fatal or after")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    passed = (Verdict.PASSED, "")
    assert told == {
        "cuda:0": {case: EXPECTED[case] for case in ("before", "fatal", "after")},
        "cuda:1": dict.fromkeys(("before", "fatal", "after"), passed),
    }


@pytest.mark.parametrize(
    ("device", "answer", "told"),
    [
        ("cpu", RuntimeError("never asked"), ""),
        ("cuda", None, ""),
        (
            "cuda",
            RuntimeError("CUDA error: unspecified launch failure\nmore"),
            "CUDA error: unspec",
        ),
    ],
)
def test_the_device_itself_is_asked(
    monkeypatch: pytest.MonkeyPatch, device: str, answer: RuntimeError | None, told: str
) -> None:
    def synchronize(_: torch.device) -> None:
        if answer is not None:
            raise answer

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    found = device_loss.ask(device)
    assert found.startswith(told)
    assert bool(found) is bool(told)
    assert "\n" not in found


def test_what_needs_no_device_fails_for_a_reason_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_loss, "ask", lambda device: "CUDA error")
    config = SimpleNamespace(stash=pytest.Stash(), getoption=lambda name: "cuda:0")
    reasons = {}
    for fixture in ("goldens", "device", "goldens"):
        item: Any = SimpleNamespace(
            name=fixture, fixturenames=[fixture], config=config, stash=pytest.Stash()
        )
        report = SimpleNamespace(failed=True, longrepr="its own")
        hook = device_loss.pytest_runtest_makereport(item)
        next(hook)
        with pytest.raises(StopIteration):
            hook.send(report)  # type: ignore[arg-type]
        reasons[fixture] = report.longrepr
    told = "a golden that fails beside a lost device tells its own reason"
    assert reasons == {"device": "device lost: CUDA error", "goldens": "its own"}, told
