"""A pytest that is asked for tests names what ended it, and nothing outlives whoever asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ci.cluster.pytest_process import PytestProcess, Run
from fixtures.pytest_plugin.nested_runs import VARIABLES
from fixtures.pytest_plugin.poll import eventually
from harness.core.paths import python_path
from harness.core.record import Record, Verdict
from harness.errors import UsageError

pytestmark = pytest.mark.untraced

PLUGINS = ("kinds", "resume", "shards", "records", "asked_tests")
TESTS = """
import os, signal, subprocess, sys, time
from pathlib import Path
import pytest
from fixtures.fakes.sample_records import trial
from harness.core.record import Verdict
from fixtures.pytest_plugin.device_loss import LOST

@pytest.fixture(scope="module", autouse=True)
def shared():
    with Path("made.txt").open("a") as file:
        file.write("made ")
    yield
    with Path("made.txt").open("a") as file:
        file.write("torn ")

def test_passes(record_trial):
    time.sleep(0.2)
    record_trial(trial("one"))

def test_is_red(record_trial):
    record_trial(trial("two", Verdict.WRONG_NUMBERS, message="row 3"))
    assert 1 == 2

def test_is_skipped():
    pytest.skip("no such kernel")

def test_last(record_trial):
    time.sleep(0.2)
    record_trial(trial("last", seconds=0.01))

@pytest.fixture
def breaks():
    yield
    raise RuntimeError("not put back")

def test_skips_and_breaks(breaks):
    pytest.skip("no such kernel")

def test_fails_and_breaks(breaks):
    assert 1 == 2

def test_exits(record_trial):
    record_trial(trial("exits", Verdict.ERROR))
    os._exit(7)

def test_faults(record_trial):
    os.kill(os.getpid(), signal.SIGSEGV)

def test_hangs():
    time.sleep(60)

def test_loses_the_device(request, record_trial):
    record_trial(trial("lost"))
    request.config.stash[LOST] = "test_loses_the_device"

def test_starts_a_process():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path("started.txt").write_text(str(process.pid))
    time.sleep(60)
"""


def node_id(name: str) -> str:
    return f"test_asked.py::test_{name}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    names = [f"fixtures.pytest_plugin.{name}" for name in PLUGINS]
    (tmp_path / "conftest.py").write_text(f"pytest_plugins = {names}\n")
    (tmp_path / "test_asked.py").write_text(TESTS)
    return tmp_path


def variables() -> dict[str, str]:
    return {**os.environ, **VARIABLES, "PYTHONPATH": python_path(), "PYTEST_ADDOPTS": ""}


COMMAND = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]


@pytest.fixture
def process(folder: Path) -> Iterator[PytestProcess]:
    made = PytestProcess(COMMAND, folder, variables())
    yield made
    made.close()


def test_one_collection_serves_several_batches(process: PytestProcess, folder: Path) -> None:
    count = len(process.collected)
    assert count == 11, f"each of the folder's 11 tests is collected, not {count}"
    first = process.run([node_id("passes"), node_id("is_red"), node_id("is_skipped")], 30.0)
    outcomes = [(end.unit, end.outcome) for end in first.ended]
    assert outcomes == [
        (node_id("passes"), "passed"),
        (node_id("is_red"), "failed"),
        (node_id("is_skipped"), "skipped"),
    ], f"each test that was asked for is told with its outcome, in its order: {outcomes}"
    seconds = first.ended[0].seconds
    assert seconds >= 0.2, f"a test that sleeps 0.2 s is told to take as long, not {seconds} s"
    green, red = (Record.from_json(end.record) for end in first.ended[:2])
    said = "a test that ended is told with the record of its trial"
    assert (green.case, green.verdict, green.planned) == ("one", Verdict.PASSED, 6), (
        f"{said}: {green.case}, {green.verdict}, {green.planned} planned"
    )
    assert (red.verdict, red.message) == (Verdict.WRONG_NUMBERS, "row 3"), (
        f"{said}: {red.verdict}, {red.message}"
    )
    skipped = first.ended[2]
    assert skipped.record == "", f"a skipped test has no record: {skipped.record}"
    said = "a skipped test is told with its reason"
    assert skipped.message.endswith("no such kernel"), f"{said}: {skipped.message}"
    said = f"a batch that ended leaves no test, and none killed it: {first.left}, {first.killer!r}"
    assert (first.killer, first.left) == ("", ()), said
    assert abs(first.began - time.time()) < 60, f"a batch began just now, not at {first.began}"
    names = ("last", "skips_and_breaks", "fails_and_breaks")
    second = process.run([node_id(name) for name in names], 30.0)
    last, broken, failed = second.ended
    said = f"a test of no time has passed in 0.01 s: {last.outcome} in {last.seconds} s"
    assert (last.outcome, last.seconds) == ("passed", 0.01), said
    assert broken.outcome == "failed", "a skipped test whose teardown fails counts as failed"
    said = "a skipped test whose teardown fails is told with the teardown's error"
    assert broken.message == "test_asked.py:35: RuntimeError: not put back", (
        f"{said}: {broken.message}"
    )
    said = "a red test whose teardown fails too is told with its own failure, not the teardown's"
    assert failed.outcome == "failed", f"{said}: {failed.outcome}"
    assert failed.message == "test_asked.py:41: assert 1 == 2", f"{said}: {failed.message}"
    made = (folder / "made.txt").read_text().split()
    said = "what the tests of a batch share is made once for it, and torn down before the next"
    assert made == ["made", "torn"] * 2, f"{said}: {made}"


def test_a_process_that_is_closed_leaves_no_descriptor_open(folder: Path) -> None:
    before = os.listdir("/proc/self/fd")
    PytestProcess(COMMAND, folder, variables()).close()
    opened = {*os.listdir("/proc/self/fd")} - {*before}
    assert not opened, "both ends of its pipes are closed"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("exits", "its process ended with 7: "),
        ("faults", "its process ended by SIGSEGV"),
        ("loses_the_device", "device lost during test_loses_the_device"),
        ("hangs", "over 2 s"),
    ],
)
def test_what_ends_the_process_is_named_and_the_rest_is_left(
    process: PytestProcess, name: str, reason: str
) -> None:
    made = process.run([node_id("passes"), node_id(name), node_id("last")], 2.0)
    assert [end.unit for end in made.ended] == [node_id("passes")]
    assert (made.killer, made.left) == (node_id(name), (node_id("last"),))
    assert made.reason.startswith(reason)
    assert not process.is_alive
    if name == "exits":
        blank = Record.from_json(made.blank)
        assert (blank.case, blank.test, blank.planned) == ("exits", node_id("exits"), 6)
    if name in ("faults", "hangs"):
        said = "the blank record is of the test that ended the process, never of one before"
        assert made.blank == "", said


def test_a_pytest_that_collects_nothing_says_why(folder: Path) -> None:
    (folder / "test_asked.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(UsageError, match="its process ended with 2: "):
        PytestProcess(COMMAND, folder, variables())


def test_nothing_outlives_who_asked(folder: Path) -> None:
    script = f"""
        import os
        from pathlib import Path
        from ci.cluster.pytest_process import PytestProcess
        process = PytestProcess({COMMAND!r}, Path({str(folder)!r}), dict(os.environ))
        process.run([{node_id("starts_a_process")!r}], 60.0)
    """
    asker = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=folder, env=variables()
    )
    started = folder / "started.txt"
    eventually(started.exists)
    [asked] = psutil.Process(asker.pid).children()
    own = int(eventually(started.read_text))
    assert psutil.pid_exists(own)
    asker.send_signal(signal.SIGKILL)
    asker.wait()
    eventually(lambda: not _lives(asked.pid) and not _lives(own))


def _lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_batch_began_when_its_first_test_did() -> None:
    made = Run(["a", "b"])
    made.take({"began": "a", "at": 5.0})
    made.take({"began": "b", "at": 7.0})
    assert (made.began, made.left) == (5.0, ())


def test_a_process_that_ends_between_two_tests_was_ended_by_the_next() -> None:
    made = Run(["a", "b", "c"])
    facts = {"outcome": "passed", "message": "", "seconds": 0.1, "record": "of a"}
    for said in ({"began": "a", "at": 5.0}, {"blank": "of a"}, {"ended": "a", **facts}):
        made.take(said)
    made.ends_by("its process ended by SIGKILL")
    told = "a has ended: b is next, which ended the process, and c is left"
    assert (made.killer, made.left) == ("b", ("c",)), told
    assert made.blank == "", "the blank record of a, which has ended, is none of b's"
