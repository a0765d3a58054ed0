"""Processes that keep GPUs busy beside a measurement."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fixtures import accept_lengths, busy_gpu
from harness.errors import UsageError

WAITS = "import time; time.sleep(60)"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, subprocess.Popen[bytes]]]:
    """The GPU of each process that was started, and a process that waits in its stead."""
    found: list[tuple[str, subprocess.Popen[bytes]]] = []
    popen = subprocess.Popen

    def start(command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        assert command == [sys.executable, "-m", "fixtures.busy_gpu"]
        assert set(os.environ) - {"CUDA_VISIBLE_DEVICES"} <= set(env)
        found.append((env["CUDA_VISIBLE_DEVICES"], popen([sys.executable, "-S", "-c", WAITS])))
        return found[-1][1]

    monkeypatch.setattr(busy_gpu.subprocess, "Popen", start)
    return found


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def test_each_gpu_is_kept_busy_and_freed(started: list[Any]) -> None:
    with busy_gpu.busy(["1", "GPU-ab"], 2):
        assert [gpu for gpu, _ in started] == ["1", "GPU-ab", "1", "GPU-ab"]
        assert all(process.poll() is None for _, process in started)
    assert all(process.returncode for _, process in started), "none outlives the measurement"


def test_none_outlives_a_measurement_that_failed(started: list[Any]) -> None:
    with pytest.raises(KeyError), busy_gpu.busy(["0"], 2):
        {}["lost"]
    assert all(process.returncode for _, process in started)


def test_a_gpu_that_was_not_busy_to_the_end_is_told(started: list[Any]) -> None:
    told = "exit code of a process that keeps a GPU busy = -9 is not accepted; accepted: none"
    with pytest.raises(UsageError, match=told), busy_gpu.busy(["0", "1"], 1):
        end(started[1][1])
    assert all(process.returncode for _, process in started)


def test_accept_lengths_are_asked_beside_them(
    monkeypatch: pytest.MonkeyPatch, started: list[Any], tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    alive: list[int] = []

    def compare(*_: object) -> int:
        alive.append(sum(process.poll() is None for _, process in started))
        return 1

    monkeypatch.setattr(accept_lengths, "compare", compare)
    for words, there in (([], 0), (["--beside", "2"], 4)):
        assert accept_lengths.main(["--arm", "sglang:pair=gqa", *words]) == 1
        assert alive[-1] == there
    assert [gpu for gpu, _ in started] == ["2", "3", "2", "3"], "every GPU that is to be used"


def test_without_a_gpu_there_is_nothing_to_keep_busy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("harness.bench.nvml.count", lambda: 0)
    monkeypatch.setattr(accept_lengths, "compare", lambda *_: pytest.fail("no server starts"))
    with pytest.raises(SystemExit, match="2"):
        accept_lengths.main(["--arm", "sglang:pair=gqa", "--beside", "1"])
    told = "GPUs of this machine = 0 is not accepted; accepted: 1 or more"
    assert told in capsys.readouterr().err
