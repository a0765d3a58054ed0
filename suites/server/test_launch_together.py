"""Servers of a wave are waited for and stopped side by side, and a hung one is given up early."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.bench.arms import STRAGGLER, stopped_together, wait_together
from harness.errors import NotReady
from harness.serving.launch import ROOT, Running
from suites.server.test_launch import SOON_S, alive, pids, stub

LONG_S = 300.0


def test_a_hung_server_costs_a_wave_no_more_than_a_few_times_what_the_others_took(
    tmp_path: Path,
) -> None:
    with stopped_together() as started:
        for number, traits in enumerate(((), ("ill",), (), ())):
            started.append(Running(stub(*traits, ready_s=LONG_S), tmp_path / f"{number}.log"))
        began = time.monotonic()
        wait_together(started)
        assert time.monotonic() - began < SOON_S
        others = [started[i].wait_ready() for i in (0, 2, 3)]
        with pytest.raises(NotReady, match=f"not ready after {started[1].patience_s:.4g} s"):
            started[1].wait_ready()
        assert started[1].patience_s < STRAGGLER * (max(others) + 1.0)


def test_nobody_is_given_up_while_half_are_still_starting(tmp_path: Path) -> None:
    with stopped_together() as started:
        for number in range(2):
            spec = stub("ill", ready_s=1.5)
            started.append(Running(spec, tmp_path / f"{number}.log"))
        wait_together(started)
        assert [server.patience_s for server in started] == [1.5, 1.5]


def test_stopping_many_takes_as_long_as_stopping_one(tmp_path: Path) -> None:
    logs = [tmp_path / f"{number}.log" for number in range(4)]
    with stopped_together() as started:
        started += [Running(stub("stubborn", grace_s=1.0), log) for log in logs]
        wait_together(started)
        found = [pid for log in logs for pid in pids(log)]
        asked = time.monotonic()
    assert time.monotonic() - asked < 3.5
    assert alive(found) == []


def test_who_is_interrupted_while_waiting_waits_no_longer(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    code = f"""
from pathlib import Path
from harness.bench.arms import stopped_together, wait_together
from harness.serving.launch import Launch, Running
with stopped_together() as started:
    started.append(Running({stub("ill", ready_s=LONG_S)!r}, Path({str(log)!r})))
    print("waiting", flush=True)
    wait_together(started)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == b"waiting\n"
        time.sleep(0.5)
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(SOON_S) != 0
    assert alive(pids(log)) == []
