"""Nights are kept on a branch of their own, none is lost, and nothing else moves."""

from __future__ import annotations

import gzip
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from ci.bench import history
from ci.nightly import __main__ as command
from ci.nightly import checks, history_branch, machine, nightly_run, stages, trials
from ci.nightly.checks import NightlyCheck
from ci.nightly.history_branch import HistoryBranch, compact, free, night_of
from fixtures.fakes import synthetic_bench
from fixtures.fakes.fake_nvml import Driver
from harness.bench.jsonl import append
from harness.errors import UsageError
from suites.selfcheck.ci.test_history import USUAL

ENTRY = replace(USUAL, night="2026-11-23T01:17:00+00:00", sku="NVIDIA H200", e=1.5)
LATER = replace(ENTRY, night="2026-11-24T01:17:00+00:00", e=2.5)
NAME = "nights-h200"


def git(repository: Path, *words: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@t"]
    done = subprocess.run(
        ["git", "-C", str(repository), *who, *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a commit, something staged and something changed; git knows no user."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    (folder / "source.py").write_text("1", encoding="utf-8")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "source")
    (folder / "staged.py").write_text("2", encoding="utf-8")
    git(folder, "add", "staged.py")
    (folder / "source.py").write_text("3", encoding="utf-8")
    return folder


def files(entry: history.Entry) -> dict[str, bytes]:
    return {history.FILE: f"{entry.to_json()}\n".encode(), "summary.md": entry.night.encode()}


def test_two_nights_in_a_row_are_read_back_and_nothing_else_moves(repository: Path) -> None:
    before = git(repository, "status", "--porcelain=v2"), git(repository, "rev-parse", "HEAD")
    index = (repository / ".git" / "index").read_bytes()
    branch = HistoryBranch(NAME, repository)
    assert branch.entries() == []
    assert branch.add("2026-11-23-nvidia-h200", files(ENTRY)) == "2026-11-23-nvidia-h200"
    assert branch.entries() == [ENTRY]
    assert branch.add("2026-11-24-nvidia-h200", files(LATER)) == "2026-11-24-nvidia-h200"
    assert branch.entries() == [ENTRY, LATER]
    assert git(repository, "show", f"{NAME}:2026-11-24-nvidia-h200/summary.md") == LATER.night
    assert git(repository, "rev-list", "--count", NAME) == "2"
    assert git(repository, "ls-tree", "--name-only", f"{NAME}~1") == "2026-11-23-nvidia-h200"
    with pytest.raises(subprocess.CalledProcessError):
        git(repository, "merge-base", NAME, "main")
    after = git(repository, "status", "--porcelain=v2"), git(repository, "rev-parse", "HEAD")
    assert after == before
    assert (repository / ".git" / "index").read_bytes() == index
    assert not list(repository.glob("2026*"))


def test_a_second_night_of_one_date_has_a_folder_of_its_own(repository: Path) -> None:
    branch = HistoryBranch(NAME, repository)
    names = [branch.add("2026-11-23-nvidia-h200", files(one)) for one in (ENTRY, LATER, ENTRY)]
    assert names == [f"2026-11-23-nvidia-h200{end}" for end in ("", "-2", "-3")]
    assert sorted(entry.e for entry in branch.entries()) == [1.5, 1.5, 2.5]


@pytest.mark.parametrize("is_first", [True, False], ids=["new branch", "known branch"])
def test_a_branch_that_moved_meanwhile_keeps_both_nights(
    repository: Path, monkeypatch: pytest.MonkeyPatch, *, is_first: bool
) -> None:
    branch = HistoryBranch(NAME, repository)
    if not is_first:
        branch.add("2026-11-22-nvidia-h200", {})
    ran, others = HistoryBranch._ran, [LATER]

    def overtaken(self: HistoryBranch, *words: str, given: bytes = b"") -> object:
        if words[0] == "update-ref" and others:
            HistoryBranch(NAME, repository).add("2026-11-23-nvidia-h200", files(others.pop()))
        return ran(self, *words, given=given)

    monkeypatch.setattr(HistoryBranch, "_ran", overtaken)
    assert branch.add("2026-11-23-nvidia-h200", files(ENTRY)) == "2026-11-23-nvidia-h200-2"
    assert sorted(branch.entries(), key=lambda entry: entry.e) == [ENTRY, LATER]
    assert git(repository, "rev-list", "--count", NAME) == ("2" if is_first else "3")


def test_a_branch_that_cannot_be_written_is_an_error_in_the_end(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_branch, "ATTEMPTS", 2)
    (repository / ".git" / "refs" / "heads" / f"{NAME}.lock").touch()
    with pytest.raises(UsageError, match=r"branch nights-h200 was not written: .*lock"):
        HistoryBranch(NAME, repository).add("2026-11-23-nvidia-h200", files(ENTRY))
    assert HistoryBranch(NAME, repository).entries() == []


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("main", "'main' is not accepted; accepted: a branch that no work tree has checked out"),
        (
            "old",
            "'old' is not accepted; accepted: a branch of nights alone, which has no source.py",
        ),
        (
            "copied",
            "'copied' is not accepted; accepted: a branch of nights alone, which has no "
            "2026-11-23-nvidia-h200_old",
        ),
        ("a..b", "'a..b' is not accepted; accepted: the name of a branch"),
        ("broken", "broken:2026-11-23-nvidia-h200/history.jsonl:1: line = 'no entry"),
    ],
)
def test_what_is_no_branch_of_nights_is_refused(repository: Path, name: str, told: str) -> None:
    git(repository, "branch", "old")
    HistoryBranch("copied", repository).add("2026-11-23-nvidia-h200_old", files(ENTRY))
    HistoryBranch("broken", repository).add("2026-11-23-nvidia-h200", {history.FILE: b"no entry\n"})
    before = git(repository, "for-each-ref")
    with pytest.raises(UsageError) as refused:
        HistoryBranch(name, repository).description("2026-11-24-nvidia-h200")
    assert told in str(refused.value)
    if name != "broken":
        with pytest.raises(UsageError):
            HistoryBranch(name, repository).add("2026-11-24-nvidia-h200", files(ENTRY))
        assert git(repository, "for-each-ref") == before


def test_a_folder_that_is_no_repository_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"git of {tmp_path}: fatal: not a git repository"):
        HistoryBranch(NAME, tmp_path).entries()


def test_a_night_is_named_by_date_and_gpu() -> None:
    assert night_of("2026-11-23", "NVIDIA H200 (SXM)") == "2026-11-23-nvidia-h200-sxm"


def test_a_night_has_a_number_only_where_its_name_is_taken() -> None:
    night, others = "2026-11-23-nvidia-h200", [f"2026-11-{day}-nvidia-h200" for day in (20, 21, 22)]
    assert free(night, others) == night, "nights of other dates take no name"
    taken = [*others, night, f"{night}-2"]
    assert free(night, taken) == f"{night}-3", "the third night of a date is its number 3"


@pytest.mark.parametrize("value", ["", "A Runner"])
def test_nights_are_committed_by_the_job_whoever_runs_it(
    repository: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", value)
        monkeypatch.setenv(f"GIT_{role}_EMAIL", value)
    HistoryBranch(NAME, repository).add("2026-11-23-nvidia-h200", files(ENTRY))
    who = git(repository, "log", "-1", "--format=%an <%ae>, %cn <%ce>", NAME)
    job = "specgate nightly <specgate@localhost>"
    assert who == f"{job}, {job}", f"the environment's name, {value!r}, is none of a night's: {who}"


def test_records_are_packed_alike_each_time(tmp_path: Path) -> None:
    (tmp_path / "bench.jsonl").write_text("a line\n", encoding="utf-8")
    (tmp_path / "records.jsonl").write_text("large\n", encoding="utf-8")
    kept = compact(tmp_path, [ENTRY])
    assert sorted(kept) == ["bench.jsonl.gz", "history.jsonl"]
    assert gzip.decompress(kept["bench.jsonl.gz"]) == b"a line\n"
    assert kept == compact(tmp_path, [ENTRY])
    stamp = kept["bench.jsonl.gz"][4:8]  # of gzip's header, in whole seconds (RFC 1952)
    assert stamp == bytes(4), (
        f"equal records have equal bytes at any time: no moment, not {stamp!r}"
    )


@pytest.fixture
def nights(monkeypatch: pytest.MonkeyPatch, repository: Path) -> None:
    """Nights of a fixed date on an H200, whose benchmark is synthetic, in the repository."""

    def run_stages(night: list[stages.Stage], folder: Path) -> dict[str, int]:
        folder.mkdir(parents=True, exist_ok=True)
        for line in synthetic_bench.run_lines({}, workloads=synthetic_bench.WORKLOADS[1:]):
            append(folder / stages.BENCH, line)
        return {stage.name: 0 for stage in night}

    holds = [NightlyCheck("packages", True, "as pinned")]
    monkeypatch.setattr(checks, "checks", lambda *_, **__: holds)
    monkeypatch.setattr(trials, "planned", lambda sm: [])
    monkeypatch.setattr(nightly_run, "run_stages", run_stages)
    monkeypatch.setattr(nightly_run.outputs, "page", lambda *_: "a page")
    monkeypatch.setattr(machine, "pynvml", Driver(("NVIDIA H200", (9, 0))))
    monkeypatch.setattr(command, "HistoryBranch", lambda name: HistoryBranch(name, repository))


@pytest.mark.usefixtures("nights")
def test_a_night_adds_what_the_branch_lacks_and_reads_what_it_has(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    branch = HistoryBranch(NAME, repository)
    branch.add("2026-11-22-nvidia-h200", files(ENTRY))
    report = tmp_path / "report"
    asked = ["--report", str(report), "--history-branch", NAME]
    assert command.main([*asked, "--dry-run"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("history: branch nights-h200: 1 nights, 1 entries; a night adds 20")
    assert said.endswith("-nvidia-h200/: history.jsonl, summary.md, bench.jsonl.gz")
    assert len(branch.nights(branch.tip())) == 1
    assert command.main(asked) == 0
    first, second = branch.nights(branch.tip())
    assert first == "2026-11-22-nvidia-h200"
    held = git(repository, "ls-tree", "--name-only", branch.nights(branch.tip())[second])
    assert held.split() == ["bench.jsonl.gz", "history.jsonl", "summary.md"]
    entries = branch.entries()
    assert entries[0] == ENTRY
    assert len(entries) > 1
    assert history.read(report / history.FILE) == entries


@pytest.mark.usefixtures("nights")
def test_a_branch_is_refused_before_the_night_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nightly_run, "run_stages", lambda *_: pytest.fail("started"))
    assert command.main(["--report", str(tmp_path / "r"), "--history-branch", "main"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("nightly: --history-branch = 'main' is not accepted")
