"""A command of a node brings its verdict and its files home, and ends with whoever started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ci.cluster import node as nodes
from ci.cluster.node import command_end, plan, run
from ci.cluster.work import Ended, LaneWork, Node, Plan, Refused
from fixtures.pytest_plugin.poll import eventually
from harness.core.paths import ROOT
from harness.core.tree import digest

HERE = Node(id="x", name="here")
WRITES = """
import sys
open(sys.argv[1] + "/said.txt", "w").write(sys.argv[2])
print("done", sys.argv[2])
"""


def work(*argv: str, **facts: object) -> LaneWork:
    usual: dict[str, object] = {"lane": "any", "kind": "cpu", "tree": digest(), "item": "one"}
    return LaneWork(argv=argv, **usual | facts)  # type: ignore[arg-type]


def test_an_item_is_filled_in_and_its_files_come_back() -> None:
    end = command_end(work("-c", WRITES, "{report}", "{item}"), "seven")
    assert (end.unit, end.outcome, end.message) == ("seven", "passed", "done seven")
    assert dict(end.files) == {"said.txt": b"seven", "output.txt": b"done seven\n"}
    assert end.seconds > 0


def test_files_that_come_back_are_limited_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "LARGEST_FILES", 3 << 20)
    writes = (
        "import sys\nfor one in 'cab': open(f'{sys.argv[1]}/{one}', 'wb').write(bytes(2 << 20))"
    )
    files = dict(command_end(work("-c", writes, "{report}/"), "one").files)
    told = files.pop("output.txt").decode().splitlines()
    assert files == {"a": bytes(2 << 20)}, "of all files of a command"
    assert told == [f"left on the node, over 3 MiB with the others: {name}" for name in "bc"]


def test_files_of_just_the_size_that_is_allowed_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "LARGEST_FILES", 5)
    writes = "import sys\nfor n in (2, 3): open(f'{sys.argv[1]}/{n}', 'wb').write(bytes(n))"
    files = dict(command_end(work("-c", writes, "{report}"), "one").files)
    told = f"files of 2 and 3 bytes are not over 5: {[*files]}, {files['output.txt'].decode()}"
    assert files == {"2": bytes(2), "3": bytes(3), "output.txt": b""}, told


def test_a_command_may_say_what_is_no_text() -> None:
    says = "import sys; sys.stdout.buffer.write(b'caf\\xe9\\n')"
    end = command_end(work("-c", says), "one")
    assert (end.outcome, end.message) == ("passed", "caf\ufffd"), "what it says decides nothing"
    assert end.files["output.txt"].decode() == "caf\ufffd\n"


def test_a_command_that_fails_or_hangs_is_red() -> None:
    failed = command_end(work("-c", "raise SystemExit('off')"), "one")
    assert (failed.outcome, failed.message) == ("failed", "off")
    hangs = (
        "import sys, time; print('begun', flush=True); "
        "print('no lock', file=sys.stderr, flush=True); time.sleep(60)"
    )
    slow = command_end(work("-c", hangs, limit_s=5.0), "one")
    assert (slow.outcome, slow.message) == ("failed", "over 5 s")
    said = "where and why it hung can be read, on standard output and error"
    assert slow.files["output.txt"] == b"begun\nno lock\n", said


class IdleProcess:
    """Stands in for a pytest: it is alive until it is closed."""

    def __init__(self, *_: object) -> None:
        self.is_alive = True

    def close(self) -> None:
        self.is_alive = False


def test_a_worker_that_gets_another_gpu_starts_another_pytest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nodes, "PytestProcess", IdleProcess)
    monkeypatch.setattr(nodes, "_kept", {})
    held = []
    for gpu in ("0", "0", "1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpu)
        held.append(nodes.kept_process(work("-m", "pytest")))
    assert held[0] is held[1]
    assert held[2] is not held[0]
    assert [process.is_alive for process in held] == [False, False, True]


def test_items_are_what_a_command_prints() -> None:
    printed = work(items=("-c", "print('a'); print('b')"), item="")
    assert plan(printed, HERE) == Plan(units=("a", "b"), node=HERE)
    assert plan(work(), HERE) == Plan(units=("one",), node=HERE)
    broken = work(items=("-c", "raise SystemExit('no table')"), item="")
    assert plan(broken, HERE) == Refused(node=HERE, reasons=("no items: no table",))


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"versions": {"torch": "1.0"}}, "torch = '2."),
        ({"versions": {"no-such-package": "1.0"}}, "no-such-package = 'none' is not accepted"),
        ({"tree": "0" * 64}, "is not accepted; accepted: 000000000000"),
    ],
)
def test_a_node_with_other_versions_runs_nothing(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, object], reason: str
) -> None:
    monkeypatch.setattr(nodes, "command_end", None)
    for answer in (plan(work(**facts), HERE), run(work(**facts), ("one",), HERE)):
        assert isinstance(answer, Refused)
        assert reason in " ".join(answer.reasons)


@pytest.mark.parametrize(("gpu", "place"), [("", "here (x)"), ("1", "here (x), GPU 1")])
def test_a_batch_of_items_ends_item_by_item(
    monkeypatch: pytest.MonkeyPatch, gpu: str, place: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpu)
    answer = run(work("-c", "print('{item}')"), ("a", "b"), HERE)
    assert isinstance(answer, Ended)
    assert [(end.unit, end.message) for end in answer.units] == [("a", "a"), ("b", "b")]
    assert [end.place for end in answer.units] == [place] * 2, "which GPU of which node ran it"


@pytest.mark.parametrize("killed", [False, True], ids=["alive", "its_child_killed_by_ray"])
def test_a_guarded_command_ends_with_its_input(tmp_path: Path, killed: bool) -> None:
    told = tmp_path / "pids"
    sleeps = "import time; time.sleep(60)"
    starts = (
        "import os, subprocess, sys, time; "
        f"own = subprocess.Popen([sys.executable, '-c', {sleeps!r}]); "
        f"open({str(told)!r}, 'w').write(f'{{os.getpid()}} {{own.pid}}.'); time.sleep(60)"
    )
    words = [sys.executable, "-m", "ci.cluster.guarded", "-c", starts]
    with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE) as process:
        said = eventually(
            lambda: told.exists() and told.read_text().endswith(".") and told.read_text()
        )
        pids = [int(word) for word in said.rstrip(".").split()]
        if killed:
            process.kill()
            process.wait(10)
            assert all(psutil.pid_exists(pid) for pid in pids)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(10) == (-signal.SIGKILL if killed else 128 + signal.SIGKILL)
    eventually(lambda: not any(map(psutil.pid_exists, pids)))


def test_nothing_of_ray_is_handed_to_what_a_node_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_JOB_ID"):
        monkeypatch.setenv(name, "somewhere")
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    handed_on = [name for name in nodes.variables() if name.startswith("RAY_")]
    assert not handed_on, f"what a worker starts is no part of its cluster: {handed_on}"
    assert nodes.variables()["PYTHONPATH"] == os.pathsep.join((str(ROOT), "elsewhere"))


@pytest.mark.parametrize(
    ("found", "needed", "is_wrong"),
    [
        ("2.1", "2.1", False),
        ("2.1+cu130", "2.1", False),
        ("2.10.1", "2.1", True),
        ("2.1", "2.10.1", True),
        ("2.1.1", "2.1", True),
        ("2.1.post1", "2.1", True),
    ],
)
def test_a_version_is_the_pinned_one_or_wrong(
    monkeypatch: pytest.MonkeyPatch, found: str, needed: str, is_wrong: bool
) -> None:
    monkeypatch.setattr(nodes, "version", lambda name: found)
    told = [f"torch = {found!r} is not accepted; accepted: {needed}"] if is_wrong else []
    assert list(nodes.wrong_versions({"torch": needed})) == told, (
        "a version that begins alike is another"
    )
