"""``python3 -m ci LANE`` needs Python alone and runs exactly the lane it was asked for."""

from __future__ import annotations

import configparser
import os
import runpy
import signal
import subprocess
import sys
import time
import tomllib
import venv
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from ci import __main__ as ci
from ci import clients
from fixtures.pytest_plugin.poll import eventually
from harness.core.paths import ROOT
from harness.core.signals import hear_sigint


def test_lanes_are_the_tox_environments() -> None:
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    environments = {
        name.removeprefix("testenv:") for name in tox.sections() if name.startswith("testenv:")
    }
    assert set(ci.lanes()) == environments
    assert {name.strip() for name in tox["tox"]["env_list"].split(",")} == environments


def test_entry_point_needs_no_package() -> None:
    words = [sys.executable, "-S", "-m", "ci"]  # without site-packages
    told = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "lanes:" in told.stdout


def pins(*names: str) -> dict[str, str]:
    """Package in lower case -> version, of files that agree on no package."""
    files = [(ROOT / "ci" / name).read_text(encoding="utf-8").splitlines() for name in names]
    found = [line.lower() for lines in files for line in lines if not line.startswith("#")]
    assert len({line.partition("==")[0].replace("_", "-") for line in found}) == len(found)
    return dict(line.replace("_", "-").split("==") for line in found)


@pytest.mark.parametrize(("stack", "extras"), [("cpu", ("test", "lint")), ("gpu", ("test", "gpu"))])
def test_every_requirement_of_a_lane_is_pinned(stack: str, extras: tuple[str, ...]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    chosen = [project["optional-dependencies"][extra] for extra in extras]
    pinned = pins("constraints.txt", f"constraints-{stack}.txt")
    for requirement in map(Requirement, sum(chosen, project["dependencies"])):
        assert requirement.specifier.contains(pinned[requirement.name.lower()]), requirement


def test_tox_is_pinned() -> None:
    assert "tox" in pins("constraints.txt")


def test_ci_runs_the_test_lane() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text(encoding="utf-8").splitlines()[-1] == "exec python3 -m ci test"


def test_without_a_lane_the_menu_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert ci.main([]) == 0
    shown = capsys.readouterr().out
    words = " ".join(shown.split())
    for name, description in ci.lanes().items():
        assert f" {name} {description} " in words
    assert max(map(len, shown.splitlines())) <= 80


def test_unknown_lane_lists_the_lanes(capsys: pytest.CaptureFixture[str]) -> None:
    assert ci.main(["tset"]) == 2
    first, *menu = capsys.readouterr().err.splitlines()
    assert first == "ci: lane = 'tset' is not accepted; accepted:"
    lanes = [line.split()[0] for line in menu if not line.startswith(" " * 3)]
    assert lanes == list(ci.lanes())


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What would have been started; every command ends with 3."""
    started: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        started.append(command)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(ci.subprocess, "run", run)
    monkeypatch.setattr(ci, "carried_out", lambda command, _: run(command).returncode)
    return started


@pytest.mark.parametrize(
    ("argv", "handed_on"),
    [
        (["lint"], ["-e", "lint"]),
        (["test", "--"], ["-e", "test"]),
        (["test", "--", "-k", "v2", "--", "-x"], ["-e", "test", "--", "-k", "v2", "--", "-x"]),
        (["test", "-k", "v2", "--", "-x"], ["-e", "test", "--", "-k", "v2", "--", "-x"]),
        (
            ["cluster", "--address", "auto", "gpu"],
            ["-e", "cluster", "--", "--address", "auto", "gpu"],
        ),
    ],
)
def test_lane_gets_its_arguments_and_returns_its_code(
    monkeypatch: pytest.MonkeyPatch,
    commands: list[list[str]],
    argv: list[str],
    handed_on: list[str],
) -> None:
    monkeypatch.setattr(ci, "tool_environment", lambda: Path("python-with-tox"))
    monkeypatch.setattr(ci, "has_gpu", lambda: False)
    assert ci.main(argv) == 3
    [command] = commands
    assert command[:4] == ["python-with-tox", "-m", "tox", "run"]
    assert command[command.index("-e") :] == handed_on


TIDIES = """
import os, pathlib, signal, sys, time
def hurry(*_):  # as tox, which leaves everything as it is
    pathlib.Path(sys.argv[1]).write_text("told twice")
    os._exit(3)
def tidy(*_):
    signal.signal(signal.SIGINT, hurry)
    time.sleep(0.5)
    pathlib.Path(sys.argv[1]).write_text("tidied")
    sys.exit(130)
signal.signal(signal.SIGINT, tidy)
pathlib.Path(sys.argv[1]).write_text("began")
for _ in range(600):  # a signal just before one long sleep would be heard after it
    time.sleep(0.1)
"""


@pytest.mark.parametrize(
    ("told", "number", "told_s"),
    [(os.killpg, signal.SIGINT, 30), (os.kill, signal.SIGINT, 2.0), (os.kill, signal.SIGTERM, 30)],
    ids=["by_a_terminal", "alone", "by_a_scheduler"],
)
def test_an_interrupted_lane_puts_things_in_order(
    tmp_path: Path, told: Callable[[int, int], None], number: int, told_s: float
) -> None:
    said = tmp_path / "said"
    command = [sys.executable, "-c", TIDIES, str(said)]
    script = f"from ci import child; child.TOLD_S = {told_s}; child.carried_out({command!r}, {{}})"
    program = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=hear_sigint,
    )
    eventually(lambda: said.exists() and said.read_text())
    told(program.pid, number)
    began = time.monotonic()
    name = signal.Signals(number).name
    due = f"{name} to the process that started a lane ends the lane within 20 s"
    try:
        _, errors = program.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(program.pid, signal.SIGKILL)
        program.communicate()
        pytest.fail(f"{due}: it runs on after 60 s")
    took = time.monotonic() - began
    assert took < 20, f"{due}: it took {took:.0f} s"
    assert said.read_text() == "tidied", "a lane that is told, and tidies, is not told again"
    last = errors.splitlines()[-1:]
    assert last == ["KeyboardInterrupt"], f"{name} to a lane's process is an interrupt: {last}"
    code = program.returncode
    assert code == -signal.SIGINT, f"{name} ends a lane's process as SIGINT does, -2: {code}"


def test_a_lane_of_a_script_s_background_hears_its_end(tmp_path: Path) -> None:
    said = tmp_path / "said"
    lane = f"import pathlib, time; pathlib.Path({str(said)!r}).write_text('began'); time.sleep(600)"
    command = [sys.executable, "-c", lane]
    program = subprocess.Popen(
        [sys.executable, "-c", f"from ci.child import carried_out; carried_out({command!r}, {{}})"],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # as `&` does there
    )
    try:
        eventually(lambda: said.exists() and said.read_text())
        program.terminate()
        with suppress(subprocess.TimeoutExpired):
            program.wait(timeout=20)
        ended = program.returncode
    finally:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()
    told = "SIGTERM to a command that a script began with `&` ends its lane, and it, within 20 s"
    assert ended == -signal.SIGINT, f"{told}: returncode {ended}, expected {-signal.SIGINT}"


@pytest.mark.parametrize(
    ("tool", "listed", "code", "stack"),
    [
        (None, b"", 0, None),
        ("nvidia-smi", b"GPU 0: NVIDIA H200 (UUID: GPU-0)\n", 0, "gpu"),
        ("nvidia-smi", b"No devices found.\n", 0, None),
        ("nvidia-smi", b"GPU 0: gone\n", 9, None),
    ],
)
def test_lane_gets_real_kernels_where_a_gpu_is(
    monkeypatch: pytest.MonkeyPatch,
    tool: str | None,
    listed: bytes,
    code: int,
    stack: str | None,
) -> None:
    environments: list[Mapping[str, str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess(command, code, stdout=listed)

    monkeypatch.delenv("SPECGATE_STACK", raising=False)
    monkeypatch.setattr(ci, "tool_environment", lambda: Path("python-with-tox"))
    monkeypatch.setattr(ci.shutil, "which", lambda name: tool)
    monkeypatch.setattr(ci.subprocess, "run", run)
    monkeypatch.setattr(ci, "carried_out", lambda _, environment: environments.append(environment))
    ci.main(["run"])
    assert environments[-1].get("SPECGATE_STACK") == stack
    assert environments[-1]["PATH"] == os.environ["PATH"]
    monkeypatch.setenv("SPECGATE_STACK", "test")
    ci.main(["run"])
    told = "SPECGATE_STACK of the environment is used, on a machine with a GPU too"
    assert environments[-1]["SPECGATE_STACK"] == "test", told


@pytest.mark.parametrize("is_there", [False, True])
def test_a_lane_that_needs_a_gpu_says_so_before_anything_is_installed(
    monkeypatch: pytest.MonkeyPatch,
    commands: list[list[str]],
    capsys: pytest.CaptureFixture[str],
    is_there: bool,
) -> None:
    monkeypatch.setattr(ci, "has_gpu", lambda: is_there)
    monkeypatch.setattr(ci, "tool_environment", lambda: commands.append([]) or Path("python"))
    told = "ci: lane gpu needs a CUDA device, and nvidia-smi lists no GPU here\n"
    assert ci.main(["gpu"]) == (3 if is_there else 2)
    assert capsys.readouterr().err == ("" if is_there else told)
    assert len(commands) == (2 if is_there else 0)


class Failed(Exception):
    """Stands in for tox's way to end an environment."""


@pytest.mark.parametrize(
    ("lane", "is_there", "ends"),
    [("gpu", False, True), ("gpu", True, False), ("test", False, False)],
)
def test_tox_ends_such_a_lane_before_it_installs(
    monkeypatch: pytest.MonkeyPatch, lane: str, is_there: bool, ends: bool
) -> None:
    parts = {"impl": lambda hook: hook, "ToxEnv": object, "Fail": Failed}
    for name in ("tox", "tox.plugin", "tox.tox_env", "tox.tox_env.api", "tox.tox_env.errors"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**parts))
    monkeypatch.setattr(ci, "has_gpu", lambda: is_there)
    hook = runpy.run_path(str(ROOT / "toxfile.py"))["tox_on_install"]
    with pytest.raises(Failed, match="needs a CUDA device") if ends else nullcontext():
        hook(SimpleNamespace(conf=SimpleNamespace(name=lane)))


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "tools"
    monkeypatch.setattr(ci, "TOOLS", folder)
    monkeypatch.setattr(venv, "create", lambda folder, **_: folder.mkdir())
    return folder


def test_tool_environment_is_made_once_and_again_when_outdated(
    monkeypatch: pytest.MonkeyPatch, commands: list[list[str]], tools: Path, tmp_path: Path
) -> None:
    assert ci.tool_environment() == ci.tool_environment() == tools / "bin" / "python"
    assert len(commands) == 1
    assert commands[0][-3:] == ["--constraint", str(ROOT / "ci" / "constraints.txt"), "tox"]
    newer = tmp_path / "constraints.txt"
    newer.write_text("tox==99\n")
    monkeypatch.setattr(ci, "CONSTRAINTS", newer)
    ci.tool_environment()
    assert len(commands) == 2
    monkeypatch.setattr(ci, "sys", SimpleNamespace(executable=sys.executable, version="3.99.0"))
    ci.tool_environment()
    assert len(commands) == 3, "a newer Python under the same name imports nothing of the older one"


def test_failed_installation_is_one_line_and_made_anew(
    monkeypatch: pytest.MonkeyPatch, tools: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: list[str], **_: object) -> None:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(ci.subprocess, "run", run)
    for _ in range(2):
        assert ci.main(["test"]) == 1
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("ci: no tool environment: ")
    assert not (tools / "stamp").exists()


def test_clients_of_another_python_or_of_other_pins_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "CLIENTS_FOLDER", tmp_path)
    monkeypatch.setattr(clients, "STAMP", tmp_path / "installed.txt")
    pins = tmp_path / "clients.txt"
    pins.write_text("openai==1.0\n")
    monkeypatch.setattr(clients, "REQUIREMENTS", pins)
    assert clients.python() is None
    clients.STAMP.write_text(f"{sys.version}\nopenai==1.0\n")
    said = "what this Python installed, of these pins, is used"
    assert clients.python() == tmp_path / "bin" / "python", said
    with monkeypatch.context() as another:
        another.setattr(clients, "sys", SimpleNamespace(version="3.99.0"))
        assert clients.python() is None, "what another Python installed is not importable here"
    pins.write_text("openai==1.1\n")
    assert clients.python() is None, "the pins have moved on"
