"""A launched server is waited for, and its processes outlive neither it nor their launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from fixtures.fakes.stub_server import Reply, StubServer, script
from fixtures.pytest_plugin.poll import eventually
from harness.errors import NotReady, ServerError
from harness.server.launch import process as launching
from harness.server.launch.ports import free_port
from harness.server.launch.process import (
    ROOT,
    ServerProcess,
    ServerSpec,
    attached,
    launch,
    run_guarded,
)

SOON_S = 10.0


def stub(*traits: str, **fields: object) -> ServerSpec:
    port = free_port()
    spec = ServerSpec(
        name="stub",
        argv=(sys.executable, "-m", "fixtures.fakes.stub_process", str(port), *traits),
        url=f"http://127.0.0.1:{port}",
        ready_s=SOON_S,
    )
    return replace(spec, **fields)  # type: ignore[arg-type]


def pids(log: Path) -> list[int]:
    """Of the server, of its child and of the orphan in a session of its own."""
    words = [line.split() for line in log.read_text().splitlines()]
    found = [int(word[1]) for word in words if word[:1] == ["pid"]]
    assert len(found) == 3, log.read_text()
    return found


def server_of(log: Path) -> int:
    """The one of its processes that answers."""
    return next(p for p in pids(log) if "stub_process" in "".join(psutil.Process(p).cmdline()))


def alive(found: list[int]) -> list[int]:
    return [pid for pid in found if psutil.pid_exists(pid)]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "server.log"


def test_nothing_outlives_a_server(log: Path) -> None:
    with launch(stub(env={"STUB_HOME": "here"}), log) as running:
        assert running.alive
        assert running.pid is not None
        found = pids(log)
        assert alive(found) == found
        family = psutil.Process(running.pid).children(recursive=True)
        assert set(found) <= {process.pid for process in family}
        assert "home here" in log.read_text()
        eventually(lambda: log.read_text().splitlines().count("up") == 2)
        assert os.getsid(running.pid) != os.getsid(0), "a terminal's Ctrl-C must not reach it"
    assert alive(found) == []
    assert log.read_text().count("asked") == 2, "its children may put things in order"
    assert not running.alive
    running.stop()


def test_who_does_not_end_is_killed(log: Path) -> None:
    with launch(stub("stubborn", grace_s=0.3), log):
        found = pids(log)
        asked = time.monotonic()
    assert alive(found) == []
    assert 0.3 <= time.monotonic() - asked < 5


def test_nothing_outlives_a_launcher_killed_by_9(log: Path) -> None:
    spec = stub()
    code = f"""
from pathlib import Path
from harness.server.launch.process import ServerProcess, ServerSpec
running = ServerProcess({spec!r}, Path({str(log)!r}))
running.wait_ready()
print("ready", flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"ready\n"
        found = pids(log)
        launcher.kill()
    assert launcher.returncode == -signal.SIGKILL
    eventually(lambda: not alive(found))


def test_nothing_outlives_a_guard_that_is_asked_to_end(log: Path) -> None:
    with launch(stub(), log) as running:
        found = pids(log)
        psutil.Process(running.pid).terminate()
        eventually(lambda: not running.alive)
        assert alive(found) == []


def test_nothing_outlives_a_server_that_died(log: Path) -> None:
    with launch(stub(), log) as running:
        found = pids(log)
        psutil.Process(server_of(log)).kill()
        eventually(lambda: not running.alive)
        assert alive(found) == []


def test_death_is_reported_at_once_with_the_end_of_the_log(log: Path) -> None:
    started = time.monotonic()
    with (
        pytest.raises(NotReady, match=r"stub at .* ended with 3 before") as raised,
        launch(stub("dies", ready_s=60.0), log),
    ):
        pytest.fail("it was never ready")
    assert time.monotonic() - started < SOON_S
    lines = str(raised.value).splitlines()
    assert lines[1].strip() == f"log: {log}"
    assert [line.strip() for line in lines[2:]] == [
        *(f"line {number}" for number in range(81, 100)),
        "no kernel image",
    ]


def test_a_log_of_any_bytes_tells_why_a_server_died(log: Path) -> None:
    says = "import sys; sys.stdout.buffer.write(b'caf\\xe9: out of memory'); sys.exit(3)"
    with (
        pytest.raises(NotReady, match=r"ended with 3 before(.|\n)*caf\ufffd: out of memory"),
        launch(stub(argv=(sys.executable, "-c", says)), log),
    ):
        pytest.fail("it was never ready")


def test_without_a_log_what_is_said_and_what_is_wrong_stay_apart(
    capfd: pytest.CaptureFixture[str],
) -> None:
    says = "import sys; print('a table'); print('a warning', file=sys.stderr)"
    assert run_guarded((sys.executable, "-c", says)) == 0
    said = capfd.readouterr()
    told = "a command without a log has the standard output and error of this process"
    assert (said.out, said.err) == ("a table\n", "a warning\n"), f"{told}: {said}"


def test_a_servers_own_environment_wins(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    tells = (sys.executable, "-c", "import os; print(os.environ['OMP_NUM_THREADS'])")
    with (
        pytest.raises(NotReady, match="ended with 0 before"),
        launch(stub(argv=tells, env={"OMP_NUM_THREADS": "3"}), log),
    ):
        pytest.fail("it was never ready")
    assert log.read_text() == "3\n", "variables of a spec win over those of its launcher"


def test_a_signal_is_told_as_a_shell_does(log: Path) -> None:
    log.parent.mkdir()
    killed = (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    ended = run_guarded(killed, log=log)
    assert ended == 137, f"a command that signal 9 ended has the exit code 128 + 9, not {ended}"


def test_a_log_is_that_of_the_last_command(log: Path) -> None:
    log.parent.mkdir()
    for word in ("first", "second"):
        assert run_guarded((sys.executable, "-c", f"print({word!r})"), log=log) == 0
    assert log.read_text() == "second\n", "a log that is there already is overwritten"


def test_a_command_that_does_not_exist_is_reported(log: Path) -> None:
    spec = stub(argv=("/no/such/command", "--port", "1"))
    with (
        pytest.raises(NotReady, match=r"ended with 127(.|\n)*cannot start /no/such/command"),
        launch(spec, log),
    ):
        pytest.fail("it was never ready")


def test_a_server_that_is_never_well_is_stopped_at_the_deadline(log: Path) -> None:
    with (
        pytest.raises(NotReady, match=r"not ready after 1.5 s(.|\n)*pid"),
        launch(stub("ill", ready_s=1.5), log),
    ):
        pytest.fail("it was never ready")
    assert alive(pids(log)) == []


def test_a_server_that_was_ready_need_only_answer(log: Path) -> None:
    answers = script(Reply(), Reply(503), Reply(401))
    with StubServer(answers) as server, launch(attached(server.url), log) as running:
        assert running.wait_ready() == running.wait_ready() > 0
        assert [asked.path for asked in server.asked] == ["/health", "/v1/models", "/v1/models"]


def test_a_server_that_was_ready_may_miss_an_answer(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = Reply(pieces=(), broken=True)
    answers = script(Reply(), cut, Reply(), cut)
    with StubServer(answers) as server, launch(attached(server.url), log) as running:
        running.patience_s = 0.0  # what it had to become ready in is over
        assert running.wait_ready() > 0, "an answer that is missed once is asked for again"
        assert [asked.path for asked in server.asked] == ["/health", "/v1/models", "/v1/models"]
        monkeypatch.setattr(launching, "ATTACH_S", 0.1)
        told = r"attached at .* gave no answer for 0.1 s after it was ready$"
        with pytest.raises(NotReady, match=told):
            running.wait_ready()


def test_a_server_that_died_when_it_was_ready_is_given_up_at_once(log: Path) -> None:
    with launch(stub(), log) as running:
        started = time.monotonic()
        psutil.Process(server_of(log)).kill()
        eventually(lambda: not running.alive)
        with pytest.raises(NotReady, match=r"ended with -?\d+ after it was ready(.|\n)*pid"):
            running.wait_ready()
        assert time.monotonic() - started < SOON_S


def test_servers_start_side_by_side(tmp_path: Path) -> None:
    both = [ServerProcess(stub(), tmp_path / f"{name}.log") for name in "ab"]
    try:
        assert all(0 < running.wait_ready() < SOON_S for running in both)
        first, second = (pids(running.log) for running in both)
        both[0].stop()
        assert alive(first) == []
        assert alive(second) == second
    finally:
        for running in both:
            running.stop()
    assert alive(second) == []


def test_what_will_not_end_is_reported(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "STOP_S", 0.05)
    with launch(stub("stubborn", grace_s=0.5), log) as running:
        found = pids(log)
        with pytest.raises(ServerError, match=r"stub at .* did not end within 0.05 s"):
            running.stop()
        monkeypatch.undo()
    assert alive(found) == []


def test_a_server_is_attached_to(log: Path) -> None:
    with StubServer(script(Reply(), Reply(), Reply(503), Reply())) as server:
        with launch(attached(f"{server.url}/"), log) as running:
            assert (running.url, running.pid, running.alive) == (server.url, None, True)
            assert not running.alive, "of an attached server that is alive which is healthy"
        assert running.alive, "an attached server is not stopped"
    assert not running.alive
    assert not log.exists()


def test_an_absent_server_is_not_attached_to(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "ATTACH_S", 0.1)
    spec = attached(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(NotReady, match=r"attached at .* not ready after 0.1 s$"), launch(spec, log):
        pytest.fail("it was never ready")
