"""A run on CUDA takes what asks for a device, one GPU a worker, or refuses in one line."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fixtures.fakes.fake_gpu import INSTALLED, pretend
from fixtures.pytest_plugin import gpu_lane
from harness.core.paths import ROOT
from harness.kernels.packages import WANTED
from suites.upstream import conftest

pytest_plugins = ["pytester"]

Run = Callable[..., pytest.RunResult]
TESTS = """
import pytest
import torch

def test_on_the_device(device):
    assert device.type in ("cpu", "cuda")

def test_on_cuda(cuda):
    assert cuda == torch.device("cuda", 0)

def test_goldens(goldens):
    pass

def test_on_no_device():
    pass

@pytest.mark.parametrize("device", ["a name in a table"])
def test_about_devices(device):
    assert device == "a name in a table"
"""
HOPPER = (
    "NVIDIA H200, runs flash_mla, xqa; "
    "trtllm_gen needs compute capability 10.0 or 10.3, this device has 9.0"
)
FLASHINFER = INSTALLED["flashinfer-python"]
KERNEL = INSTALLED["sglang-kernel"]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Installed versions beside two H200s, to be changed."""
    return pretend(monkeypatch)


@pytest.fixture
def run(pytester: pytest.Pytester) -> Run:
    """Runs the tests above with arguments, in this process."""
    pytester.makepyfile(TESTS)

    def start(*args: str) -> pytest.RunResult:
        return pytester.runpytest_inprocess(
            "-p", "fixtures.pytest_plugin.plugin", "-n0", "-rs", *args
        )

    return start


def refused(result: pytest.RunResult) -> str:
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    [line] = [line for line in result.errlines if line]
    return line.removeprefix("ERROR: ")


def test_on_a_cpu_what_needs_cuda_is_skipped(run: Run) -> None:
    result = run()
    result.assert_outcomes(passed=4, skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*: needs --device cuda"])
    result.stdout.no_fnmatch_line("device: *")


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_on_cuda_the_rest_is_left_out(run: Run, hopper: dict[str, str], device: str) -> None:
    result = run("--device", device)
    result.assert_outcomes(passed=3, deselected=2)
    result.stdout.fnmatch_lines([f"device: 1 × {HOPPER}"])


def test_workers_share_all_gpus(hopper: dict[str, str]) -> None:
    assert gpu_lane.description(torch.device("cuda")) == f"device: 2 × {HOPPER}"


def test_auto_is_the_cpu_where_there_is_no_gpu(run: Run) -> None:
    run("--device", "auto").assert_outcomes(passed=4, skipped=1)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"flashinfer-python": ""},
            f"flashinfer-python {FLASHINFER} is needed, none is installed; "
            "install with: pip install '.[gpu]'",
        ),
        (
            {"flashinfer-python": "0.6.7", "sglang-kernel": ""},
            f"flashinfer-python {FLASHINFER} is needed, 0.6.7 is installed; "
            f"sglang-kernel {KERNEL} is needed, none is installed; "
            "install with: pip install '.[gpu]'",
        ),
    ],
)
@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_lost_environment_is_refused(
    run: Run, hopper: dict[str, str], device: str, changes: dict[str, str], told: str
) -> None:
    hopper.update(changes)
    assert refused(run("--device", device)) == f"--device cuda: {told}"


ASKED = ["flashinfer_python[cu13]==0.6.14", "sglang-kernel==0.4.5", "torch==2.11.0"]
PINNED = {"sglang": "0.5.16", "flashinfer-python": "0.6.14", "sglang-kernel": "0.4.5"}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (PINNED, ""),
        (PINNED | {"sglang-kernel": "0.4.4"}, "sglang-kernel 0.4.5 is needed, 0.4.4 is installed"),
        ({}, "sglang 0.5.16 is needed, none is installed"),
    ],
)
def test_a_release_asks_for_what_it_pins(
    run: Run,
    hopper: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str],
    told: str,
) -> None:
    hopper.update(changes)
    monkeypatch.setattr(gpu_lane, "requires", {"sglang": ASKED}.__getitem__)
    result = run("--device", "cuda", "--release", "0.5.16")
    if told:
        line = f"--device cuda: {told}; install with: pip install sglang==0.5.16"
        assert refused(result) == line
    else:
        result.assert_outcomes(passed=3, deselected=2)


def test_gpu_that_runs_no_kernel_is_refused(
    run: Run, hopper: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    line = refused(run("--device", "cuda"))
    assert line.startswith("--device cuda: runs no kernel: flash_mla needs compute capability 9.0")
    assert "; trtllm_gen needs compute capability 10.0 or 10.3, this device has 8.0; xqa" in line


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--device", "cuda:2"], "--device = 'cuda:2' is not accepted; accepted: an index below 2"),
        (["--device", "tpu"], "--device = 'tpu' is not accepted; accepted: cpu, cuda"),
        (["--device", "meta"], "--device = 'meta' is not accepted; accepted: cpu, cuda"),
        (["--workers-per-gpu", "0"], "--workers-per-gpu = 0 is not accepted; accepted: 1 or more"),
    ],
)
def test_impossible_option_is_refused(
    run: Run, hopper: dict[str, str], args: list[str], told: str
) -> None:
    assert refused(run(*args)).startswith(told)


def test_lost_gpu_is_refused(run: Run) -> None:
    told = f"--device cuda: no CUDA device is visible to torch {torch.__version__}"
    assert refused(run("--device", "cuda")) == told


def test_what_is_checked_is_what_the_extra_installs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    gpu = project["optional-dependencies"]["gpu"]
    exact = [line for line in gpu if "==" in line]
    assert exact == ["==".join(wanted.split()) for wanted in WANTED.values()]


@pytest.mark.parametrize(
    ("device", "release", "left_out"),
    [("cuda", None, True), ("cuda:1", "0.5.16", None), ("cpu", None, None)],
)
def test_a_gpu_lane_counts_no_trial_of_a_release_that_nobody_named(
    device: str, release: str | None, left_out: bool | None
) -> None:
    options = {"--device": device, "--release": release}
    config: Any = SimpleNamespace(getoption=options.__getitem__)
    test = ROOT / "suites/upstream/test_releases.py"
    assert conftest.pytest_ignore_collect(test, config) is left_out
    assert conftest.pytest_ignore_collect(ROOT / "suites/upstream", config) is None


def test_a_release_pins_what_it_asks_for_here_and_without_extras(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = [
        "flashinfer_python==0.6.12",
        'flashinfer-python==0.5.3; extra == "older"',
        'sglang-kernel==0.4.4; python_version >= "3"',
        'sglang-kernel==0.4.1; python_version < "3"',
    ]
    monkeypatch.setattr(gpu_lane, "requires", {"sglang": asked}.__getitem__)
    told = "of several lines on one package that counts which pip would install here"
    assert gpu_lane.pins("sglang") == ["flashinfer-python 0.6.12", "sglang-kernel 0.4.4"], told
