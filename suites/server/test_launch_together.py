"""Several servers are waited for and stopped in parallel, and a hung one is given up early."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.bench.server_pool import GRACE_S, STRAGGLER, stopped_together, wait_together
from harness.errors import NotReady
from harness.server.launch.process import ROOT, ServerProcess
from suites.server.test_launch import SOON_S, alive, pids, stub

LONG_S = 60.0


def test_a_hung_server_costs_a_wave_little_more_than_the_others_took(tmp_path: Path) -> None:
    with stopped_together() as started:
        for number, traits in enumerate(((), ("ill",), ())):
            spec = stub(*traits, ready_s=LONG_S)
            started["one arm"].append(ServerProcess(spec, tmp_path / f"{number}.log"))
        began = time.monotonic()
        wait_together(started)
        took_s = time.monotonic() - began
        assert took_s < STRAGGLER * SOON_S, "a patience that is cut short meanwhile ends the wait"
        well, hung, other = started["one arm"]
        with pytest.raises(NotReady, match=f"not ready after {hung.patience_s:.4g} s"):
            hung.wait_ready()
        first = min(well.wait_ready(), other.wait_ready())
        assert hung.patience_s == pytest.approx(STRAGGLER * first + GRACE_S)


def test_an_arm_that_takes_longer_than_the_other_is_not_given_up(tmp_path: Path) -> None:
    with stopped_together() as started:
        started["A"].append(ServerProcess(stub(), tmp_path / "a.log"))
        started["B"].append(ServerProcess(stub("ill", ready_s=1.5), tmp_path / "b.log"))
        wait_together(started)
        assert started["A"][0].patience_s < SOON_S + GRACE_S
        assert started["B"][0].patience_s == 1.5


class Instant:
    """A server that is ready at once, or never."""

    url, pid, alive = "http://127.0.0.1:9", None, True

    def __init__(self, *, is_well: bool = True) -> None:
        self.patience_s, self._is_well = LONG_S, is_well

    def wait_ready(self) -> float:
        """No time, or the end of patience."""
        if not self._is_well:
            raise NotReady("it hangs")
        return 0.0

    def stop(self) -> None:
        """Nothing runs."""


def test_an_arm_s_patience_is_no_matter_of_how_soon_the_other_was_ready() -> None:
    with stopped_together() as started:
        started["A"] += [Instant(), Instant(is_well=False)]
        started["B"] += [Instant(is_well=False)]
        wait_together(started)
        left = {arm: [one.patience_s for one in alike] for arm, alike in started.items()}
    said = "a server that was ready at once leaves its own arm 5 s, and the other arm its 60"
    assert left == {"A": [GRACE_S] * 2, "B": [LONG_S]}, f"{said}: {left}"


def test_stopping_many_takes_as_long_as_stopping_one(tmp_path: Path) -> None:
    logs = [tmp_path / f"{number}.log" for number in range(4)]
    with stopped_together() as started:
        started["A"] += [ServerProcess(stub("stubborn", grace_s=1.0), log) for log in logs]
        wait_together(started)
        found = [pid for log in logs for pid in pids(log)]
        asked = time.monotonic()
    assert time.monotonic() - asked < 3.5
    assert alive(found) == []


def test_who_is_interrupted_while_waiting_waits_no_longer(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    code = f"""
import signal
from pathlib import Path
from harness.bench.server_pool import stopped_together, wait_together
from harness.server.launch.process import ServerProcess, ServerSpec
# Whoever runs this in the background of a shell may have had it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
with stopped_together() as started:
    started['A'].append(ServerProcess({stub("ill", ready_s=LONG_S)!r}, Path({str(log)!r})))
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
