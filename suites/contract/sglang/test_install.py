"""A release is installed whole or not at all, whoever else installs it meanwhile."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fixtures import findings
from harness.core.record import Record
from harness.errors import UsageError
from harness.sglang import install
from harness.sglang.releases import FOLDER, find_release, packages_of, source_of
from harness.upstream import released_wheel

FIRST, SECOND = find_release("0.5.13"), find_release("0.5.14")


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder of releases."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return tmp_path


def pip(monkeypatch: pytest.MonkeyPatch, code: int = 0, rival: Path | None = None) -> None:
    """Stand in for pip, which writes a file; a rival may finish the same folder meanwhile."""

    def run(words: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        Path(words[words.index("--target") + 1], "package.py").write_text("late")
        if rival is not None:
            rival.mkdir()
            (rival / "package.py").write_text("first")
        return subprocess.CompletedProcess(list(words), code, "", "ERROR: no index\n")

    monkeypatch.setattr(install.subprocess, "run", run)


def test_packages_that_another_process_has_finished_are_kept(
    unpacked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = packages_of(SECOND)
    pip(monkeypatch, rival=folder)
    install.install(SECOND, wheel=False)
    assert [path.name for path in unpacked.iterdir()] == [folder.name]
    assert (folder / "package.py").read_text() == "first"


def test_packages_that_cannot_be_installed_leave_nothing(
    unpacked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip(monkeypatch, code=1)
    with pytest.raises(UsageError, match="cannot be installed: ERROR: no index"):
        install.install(SECOND, wheel=False)
    assert not list(unpacked.iterdir())


def test_packages_that_find_no_place_are_not_given_up(
    unpacked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Path, target: Path) -> Path:
        raise PermissionError(f"{self.name} -> {target.name}")

    pip(monkeypatch)
    monkeypatch.setattr(Path, "rename", refused)
    told = "packages that cannot be renamed to their folder are not installed: PermissionError, not"
    with pytest.raises(PermissionError, match=packages_of(SECOND).name):
        pytest.fail(f"{told} {install.install(SECOND, wheel=False)}")
    assert not packages_of(SECOND).exists(), "packages that found no place are in none"


def test_releases_that_share_packages_are_installed_one_by_one(
    unpacked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert packages_of(FIRST) == packages_of(SECOND)
    for release in (FIRST, SECOND):
        source_of(release).mkdir()
    pip(monkeypatch)

    def ran(release: str, trials: Sequence[str], folder: Path) -> list[Record]:
        assert (packages_of(FIRST) / "package.py").read_text() == "late"
        folders.append(folder)
        return []

    folders: list[Path] = []

    monkeypatch.setattr(findings, "run_trials", ran)
    findings.run_releases({"0.5.13": ["one"], "0.5.14": ["two"]})
    assert sum(path.name.startswith("transformers") for path in unpacked.iterdir()) == 1
    assert len(set(folders)) == 2, "two releases at a time keep their records apart"


def test_a_folder_of_releases_that_is_named_relatively_is_one_of_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in (FOLDER, released_wheel.FOLDER):
        monkeypatch.setenv(variable, "there")
    told = "links to it and processes in other folders are of the same one"
    assert source_of(FIRST) == tmp_path / "there" / "sglang-0.5.13", told
    assert packages_of(FIRST) == tmp_path / "there" / "transformers-5.8.1", told
    assert released_wheel.cache() == tmp_path / "there", told
