"""``python3 -m ci LANE`` needs Python alone and runs exactly the lane it was asked for."""

from __future__ import annotations

import ast
import configparser
import os
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from ci import __main__ as ci

ROOT = Path(__file__).resolve().parents[2]


def test_lanes_are_the_tox_environments() -> None:
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    environments = {
        name.removeprefix("testenv:") for name in tox.sections() if name.startswith("testenv:")
    }
    assert set(ci.lanes()) == environments
    assert {name.strip() for name in tox["tox"]["env_list"].split(",")} == environments


def test_entry_point_imports_the_standard_library_alone() -> None:
    tree = ast.parse((ROOT / "ci" / "__main__.py").read_text(encoding="utf-8"))
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= sys.stdlib_module_names


def test_every_requirement_of_the_cpu_lanes_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [Requirement(r) for r in (*project["dependencies"], *extras["test"], *extras["lint"])]
    lines = (ROOT / "ci" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.lower().split("==") for line in lines if not line.startswith("#"))
    assert "tox" in pins
    for requirement in wanted:
        assert requirement.specifier.contains(pins[requirement.name.lower()]), requirement


def test_ci_runs_the_test_lane() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text(encoding="utf-8").splitlines()[-1] == "exec python3 -m ci test"


def test_without_a_lane_the_menu_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert ci.main([]) == 0
    shown = capsys.readouterr().out
    for name, description in ci.lanes().items():
        assert any(line.split(None, 1) == [name, description] for line in shown.splitlines())


def test_unknown_lane_lists_the_lanes(capsys: pytest.CaptureFixture[str]) -> None:
    assert ci.main(["tset"]) == 2
    first, *menu = capsys.readouterr().err.splitlines()
    assert first == "ci: lane = 'tset' is not accepted; accepted:"
    assert [line.split()[0] for line in menu] == list(ci.lanes())


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What would have been started; every command ends with 3."""
    started: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        started.append(command)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(ci.subprocess, "run", run)
    return started


@pytest.mark.parametrize(
    ("argv", "handed_on"),
    [
        (["lint"], ["-e", "lint"]),
        (["test", "--"], ["-e", "test"]),
        (["test", "--", "-k", "v2", "--", "-x"], ["-e", "test", "--", "-k", "v2", "--", "-x"]),
    ],
)
def test_lane_gets_its_arguments_and_returns_its_code(
    monkeypatch: pytest.MonkeyPatch,
    commands: list[list[str]],
    argv: list[str],
    handed_on: list[str],
) -> None:
    monkeypatch.setattr(ci, "tool_environment", lambda: Path("python-with-tox"))
    assert ci.main(argv) == 3
    [command] = commands
    assert command[:4] == ["python-with-tox", "-m", "tox", "run"]
    assert command[command.index("-e") :] == handed_on


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
