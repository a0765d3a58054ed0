"""Trials are followed along the packages that moved between two releases, sglang's files last."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures import bisect, bisect_packages
from fixtures.bisect import main
from fixtures.bisect_packages import (
    MixedEnvironment,
    NotImportable,
    Package,
    environments,
    moved,
)
from fixtures.fakes.sample_records import trial
from harness.core.environment import environment
from harness.core.record import Verdict, write_records
from harness.sglang.releases import FOLDER, Release, find_release, packages_of, source_of

OLD, NEW = find_release("0.5.20"), find_release("0.5.22")
CLEAN = replace(environment(), dirty=False)
PACKAGES = {
    OLD: {"Zlib_ng": "1", "einops": "8", "httpx": "3", "transformers": "5.12"},
    NEW: {"Zlib_ng": "2", "einops": "8", "orjson": "4", "transformers": "5.19"},
}
STEPS = [
    "sglang 0.5.20",
    "orjson none to 4",
    "transformers 5.12 to 5.19",
    "zlib-ng 1 to 2",
    "httpx 3 to none",
    "sglang 0.5.20 to 0.5.22",
]
"""By hand from ``PACKAGES``: einops did not move."""


@pytest.fixture
def unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two releases as they are installed: each package's file has its version, sglang's as well."""
    folder = tmp_path / "upstream"
    monkeypatch.setenv(FOLDER, str(folder))
    for release, packages in PACKAGES.items():
        sglang = folder / f"sglang-{release.version}" / "sglang"
        sglang.mkdir(parents=True)
        (sglang / "version").write_text(release.version, encoding="utf-8")
        for name, version in packages.items():
            home = packages_of(release)
            info = home / f"{name}-{version}.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n", encoding="utf-8")
            (home / name).mkdir()
            (home / name / "version").write_text(version, encoding="utf-8")
            (home / "__pycache__").mkdir(exist_ok=True)  # of every package that is one module
            listed = [f"../../bin/{name}", f"{name}/version", f"{info.name}/METADATA"]
            listed += [f"__pycache__/{name}.cpython-311.pyc"]
            rows = "".join(f"{path},,\n" for path in (*listed, f"{info.name}/RECORD"))
            (info / "RECORD").write_text(rows, encoding="utf-8")
    return folder


def versions(one: MixedEnvironment, folder: Path) -> dict[str, str]:
    """What an environment holds, read through its links."""
    files = one.link(folder).glob("*/*/version")
    return {path.parent.name: path.read_text(encoding="utf-8") for path in files}


@pytest.mark.usefixtures("unpacked")
def test_each_environment_moves_one_thing(tmp_path: Path) -> None:
    made = list(environments(OLD, NEW))
    assert [one.name for one in made] == STEPS
    assert [one.release for one in made] == [OLD] * 5 + [NEW]
    kept = {"sglang": "0.5.20", "einops": "8"}
    assert [versions(one, tmp_path / "made") for one in made] == [
        kept | {"Zlib_ng": "1", "httpx": "3", "transformers": "5.12"},
        kept | {"Zlib_ng": "1", "httpx": "3", "transformers": "5.12", "orjson": "4"},
        kept | {"Zlib_ng": "1", "httpx": "3", "transformers": "5.19", "orjson": "4"},
        kept | {"Zlib_ng": "2", "httpx": "3", "transformers": "5.19", "orjson": "4"},
        kept | {"Zlib_ng": "2", "transformers": "5.19", "orjson": "4"},
        {"sglang": "0.5.22", "einops": "8", "Zlib_ng": "2", "transformers": "5.19", "orjson": "4"},
    ]


def test_a_process_is_told_where_its_environment_is(
    unpacked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *_, last = environments(OLD, NEW)
    try:
        made = {one.name: one.link(tmp_path / one.name) for one in (first, last)}
    except FileExistsError as error:
        pytest.fail(f"__pycache__, which single modules share, is linked for no package: {error}")
    for one in (first, last):
        monkeypatch.setenv(FOLDER, str(made[one.name]))
        assert (packages_of(one.release) / "transformers").is_dir()
        assert not (packages_of(one.release) / "bin").exists()
        assert (source_of(one.release) / "sglang").is_dir()
    monkeypatch.setenv(FOLDER, str(unpacked))
    assert sorted(path.name for path in packages_of(OLD).iterdir() if "info" not in path.name) == [
        "Zlib_ng", "__pycache__", "einops", "httpx", "transformers",
    ]  # fmt: skip


class Fake:
    """Stands in for processes: which environments were run, and which cannot be imported.

    Args:
        turned: case -> the environment from which on it is red.
        broken: environments that cannot be imported.
    """

    def __init__(self, turned: dict[str, int], broken: Sequence[int] = ()) -> None:
        self.turned, self.broken = turned, broken
        self.ran: list[int] = []

    def check(self, command: Sequence[str], *, env: dict[str, str], **_: object) -> object:
        assert list(command[1:3]) == ["-m", "fixtures.drivers.imported_release"]
        place = int(Path(env[FOLDER]).parent.name)
        assert command[3] == (NEW if place == len(STEPS) - 1 else OLD).version
        said = "Traceback …\nImportError: hub>=2 is required\n" if place in self.broken else ""
        return subprocess.CompletedProcess(command, int(bool(said)), "", said)

    def run(self, release: Release, folder: Path, args: Sequence[str], *, upstream: Path) -> int:
        place = int(upstream.parent.name)
        self.ran.append(place)
        folder.mkdir(parents=True, exist_ok=True)
        records = [
            replace(
                trial(case, Verdict.WRONG_NUMBERS if place >= at else Verdict.PASSED),
                subject=f"sglang-{release.version}/trtllm_mha/xqa",
                planned=len(self.turned),
                message="rows wrong",
                environment=CLEAN,
            )
            for case, at in self.turned.items()
        ]
        write_records(folder / "records.jsonl", records)
        return 1


def searched(fake: Fake, report: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(bisect_packages.subprocess, "run", fake.check)
    monkeypatch.setattr(bisect_packages, "run_release", fake.run)
    monkeypatch.setattr(bisect, "environment", lambda: CLEAN)
    asked = ["--packages", "--good", "0.5.20", "--bad", "0.5.22", "--report", str(report)]
    return main(asked)


@pytest.mark.usefixtures("unpacked")
@pytest.mark.parametrize("at", range(1, len(STEPS)))
def test_the_package_that_turned_a_trial_is_named(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = Fake({"turns": at, "stays": 99})
    assert searched(fake, tmp_path / "report", monkeypatch) == 0
    order, answer, *_ = capsys.readouterr().out.splitlines()
    assert order == "order: " + ", ".join(STEPS)
    assert answer == f"{STEPS[at]}: 1 turned, {STEPS[at - 1]} was good"
    assert fake.ran[:2] == [0, 5]
    assert len(fake.ran) <= 5
    known = Fake({})
    assert searched(known, tmp_path / "report", monkeypatch) == 0
    assert capsys.readouterr().out.splitlines()[1] == answer
    assert known.ran == []


@pytest.mark.usefixtures("unpacked")
def test_what_cannot_be_imported_is_skipped_and_stays_a_suspect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = Fake({"turns": 3}, broken=(2, 3))
    assert searched(fake, tmp_path / "report", monkeypatch) == 0
    _, *told = capsys.readouterr().out.splitlines()
    assert told[:3] == [
        f"one of {', '.join(STEPS[2:5])}: 1 turned, {STEPS[1]} was good",
        f"  skipped: {STEPS[2]}: ImportError: hub>=2 is required",
        f"  skipped: {STEPS[3]}: ImportError: hub>=2 is required",
    ]
    assert sorted(fake.ran) == [0, 1, 4, 5]


@pytest.mark.usefixtures("unpacked")
def test_what_was_skipped_elsewhere_is_no_suspect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = Fake({"turns": 5}, broken=(3,))
    assert searched(fake, tmp_path / "report", monkeypatch) == 0
    _, answer, first, *_ = capsys.readouterr().out.splitlines()
    assert answer == f"{STEPS[5]}: 1 turned, {STEPS[4]} was good"
    assert first == "  trtllm_mha/xqa turns eager: rows wrong"


@pytest.mark.usefixtures("unpacked")
def test_an_import_that_ends_without_a_word_is_told_by_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    died = subprocess.CompletedProcess([], -11, "", "")
    monkeypatch.setattr(bisect_packages.subprocess, "run", lambda *_, **__: died)
    rule = "packages whose import ends with -11 must be NotImportable, not searched"
    with pytest.raises(NotImportable, match=r"^it ended with -11$"):
        pytest.fail(f"{rule}: {next(environments(OLD, NEW)).run(tmp_path / 'made', [])}")


@pytest.mark.usefixtures("unpacked")
@pytest.mark.parametrize("end", [0, len(STEPS) - 1])
def test_an_end_that_cannot_be_imported_is_refused(
    end: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        searched(Fake({"turns": 3}, broken=(end,)), tmp_path / "report", monkeypatch)
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("specgate bisect: an end of the search cannot be imported: ImportError")


@pytest.mark.usefixtures("unpacked")
def test_a_run_that_was_cut_short_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report"
    assert searched(Fake({"turns": 4, "also": 5}), report, monkeypatch) == 0
    whole = capsys.readouterr().out
    [records] = report.glob("*/005/records.jsonl")
    first, _ = records.read_text(encoding="utf-8").splitlines()
    records.write_text(f"{first}\n", encoding="utf-8")
    again = Fake({"turns": 4, "also": 5})
    assert searched(again, report, monkeypatch) == 0
    assert capsys.readouterr().out == whole
    assert again.ran == [5]


def test_what_is_new_moves_before_what_others_need_it_for() -> None:
    one, two = (Package(version, ()) for version in ("1", "2"))
    good = {"a": one, "b": one, "same": one}
    bad = {"b": two, "z": one, "same": one}
    assert moved(good, bad) == ["z", "b", "a"], "new, then of another version, then gone"
