"""The first release, commit or arm that has a defect is found, each trial by itself."""

from __future__ import annotations

import argparse
import random
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fixtures import bench, bisect
from fixtures.bisect import Turned, commits_between, main, search
from fixtures.compare_releases import Side
from fixtures.fakes import synthetic_bench
from harness.bench.jsonl import append
from harness.core.environment import environment
from harness.core.record import Record, Verdict, write_records
from harness.sglang.releases import FOLDER

pytestmark = pytest.mark.untraced
REFUSED = "mha-decode-bs4_unequal"
PLANTED = {
    "mha-decode-bs1_short": 3,
    "mha-decode-bs2_ragged": 5,
    "mha-extend-bs1_short": 0,
    REFUSED: 4,
}
"""Case -> the place of the first candidate that has its defect; 0 has it from the start.

REFUSED cannot be run before its place, so that nobody knows when it turned."""
CLEAN = replace(environment(), dirty=False)


def asked(place: int, turned: dict[str, int], silent: set[int]) -> dict[str, bool | None]:
    return {name: None if place in silent else place >= at for name, at in turned.items()}


@pytest.mark.parametrize("seed", range(20))
def test_every_trial_is_followed_to_where_it_turned(seed: int) -> None:
    drawn = random.Random(seed)
    last = drawn.randint(1, 40)
    silent = {place for place in range(1, last) if drawn.random() < 0.2}
    turned = {f"t{i}": drawn.randint(1, last) for i in range(drawn.randint(1, 5))}
    asks: Counter[tuple[int, str]] = Counter()

    def ask(place: int, trials: frozenset[str]) -> dict[str, bool | None]:
        asks.update((place, name) for name in trials)
        return asked(place, turned, silent)

    found = list(search(frozenset(turned), 0, last, ask))
    assert sorted(name for one in found for name in one.trials) == sorted(turned)
    for one in found:
        assert {name for name in one.trials if not one.good < turned[name] <= one.bad} == set()
        assert set(range(one.good + 1, one.bad)) <= silent
    assert set(asks.values()) <= {1}
    if not silent:
        most = last.bit_length() + 1
        assert max(Counter(name for _, name in asks).values(), default=0) <= most


def test_neighbours_are_not_asked() -> None:
    def ask(place: int, trials: frozenset[str]) -> dict[str, bool | None]:
        pytest.fail(f"{place} was asked of {trials}")

    assert list(search(frozenset({"t"}), 0, 1, ask)) == [Turned(0, 1, frozenset({"t"}))]


def record(case: str, release: str, *, is_bad: bool, planned: int) -> Record:
    return Record(
        case=case,
        subject=f"sglang-{release}/trtllm_mha/xqa",
        family="mha",
        mode="decode",
        execution="eager",
        device="cpu",
        verdict=Verdict.WRONG_NUMBERS
        if is_bad
        else Verdict.REFUSED
        if case == REFUSED
        else Verdict.PASSED,
        environment=CLEAN,
        planned=planned,
        message="hidden_states: 3 of 4 rows wrong" if is_bad else "",
        reproduce="specgate upstream",
    )


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """Runs of candidates: which, and the arguments of pytest. Its place is the end of its name."""
    seen: list[tuple[str, list[str]]] = []

    def run(self: Side, folder: Path, args: Sequence[str]) -> int:
        release, tree = self.name, Path(self.name) / "sglang" / "place"
        place = (
            int(tree.read_text(encoding="utf-8"))
            if tree.is_file()
            else list(bisect.RELEASES).index(release)
        )
        seen.append((release, list(args)))
        folder.mkdir(parents=True, exist_ok=True)
        words = args[args.index("-k") + 1] if "-k" in args else ""
        cases = [case for case in PLANTED if case in words or words.strip("()") in case]
        path = folder / "records.jsonl"
        path.unlink(missing_ok=True)
        bad = {case: place >= PLANTED[case] for case in cases}
        planned = len(cases)
        write_records(path, [record(c, str(place), is_bad=bad[c], planned=planned) for c in cases])
        return 1

    monkeypatch.setattr(Side, "run", run)
    monkeypatch.setattr(bisect, "environment", lambda: CLEAN)
    return seen


def test_releases_of_the_table(
    runs: list[tuple[str, list[str]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--good", "0.5.12", "--bad", "0.5.23", "--report", str(tmp_path)]
    assert main(words) == 0
    first, *cause, second, _, _ = capsys.readouterr().out.splitlines()
    is_told = any(REFUSED in line for line in cause)
    assert not is_told, "a trial that the good release refused was never good: nothing turned it"
    assert first == "0.5.16: 1 turned, 0.5.14 was good"
    assert cause == [
        "  trtllm_mha/xqa mha-decode-bs1_short eager: hidden_states: 3 of 4 rows wrong",
        "    reproduce: specgate upstream",
    ]
    assert second == "0.5.20: 1 turned, 0.5.18 was good"
    assert [release for release, _ in runs][:3] == ["0.5.12", "0.5.23", "0.5.18"]
    assert runs[2][1] == ["-k", "(mha-decode-bs1_short or mha-decode-bs2_ragged)"]
    assert len(runs) == len({release for release, _ in runs})
    runs.clear()
    assert main(words) == 0
    assert runs == []


def test_what_turned_first_is_told_first(
    runs: list[tuple[str, list[str]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def found_last_first(*asked: Any) -> list[Turned]:
        return [*search(*asked)][::-1]  # as of trials that a candidate in between refuses

    monkeypatch.setattr(bisect, "search", found_last_first)
    assert main(["--good", "0.5.12", "--bad", "0.5.23", "--report", str(tmp_path)]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line[0] != " "]
    turned = [line.partition(":")[0] for line in told]
    told_of = "what turned is told oldest first, and of no trial that GOOD refused or lacks"
    assert turned == ["0.5.16", "0.5.20"], f"{told_of}: 0.5.16, 0.5.20, not {turned}"


def test_an_interrupted_search_goes_on(
    runs: list[tuple[str, list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--good", "0.5.12", "--bad", "0.5.23", "--report", str(tmp_path), "-k", "decode"]
    run = Side.run

    def until_the_third(self: Side, folder: Path, args: Sequence[str]) -> int:
        if len(runs) == 2:
            raise KeyboardInterrupt
        return run(self, folder, args)

    monkeypatch.setattr(Side, "run", until_the_third)
    with pytest.raises(KeyboardInterrupt):
        main(words)
    monkeypatch.setattr(Side, "run", run)
    runs.clear()
    assert main(words) == 0
    assert "0.5.12" not in {release for release, _ in runs}
    assert runs[0][1][-1].startswith("(decode) and (")


@pytest.mark.parametrize(("commit", "dirty"), [("another", False), (CLEAN.commit, True)])
def test_verdicts_of_another_checkout_are_asked_again(
    runs: list[tuple[str, list[str]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    commit: str,
    dirty: bool,
) -> None:
    words = ["--good", "0.5.12", "--bad", "0.5.23", "--report", str(tmp_path), "-k", "decode"]
    assert main(words) == 0
    asked = list(runs)
    runs.clear()
    here = replace(CLEAN, commit=commit, dirty=dirty)
    monkeypatch.setattr(bisect, "environment", lambda: here)
    assert main(words) == 0
    assert runs == asked


def test_another_search_asks_its_own_questions(
    runs: list[tuple[str, list[str]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for good in ("0.5.12", "0.5.13"):
        runs.clear()
        assert main(["--good", good, "--bad", "0.5.23", "--report", str(tmp_path)]) == 0
        said = [line for line in capsys.readouterr().out.splitlines() if line[0] != " "]
        assert said == [
            "0.5.16: 1 turned, 0.5.14 was good",
            "0.5.20: 1 turned, 0.5.18 was good",
        ]
        assert [release for release, _ in runs][:2] == [good, "0.5.23"]


def test_other_words_ask_other_trials(
    runs: list[tuple[str, list[str]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--good", "0.5.12", "--bad", "0.5.23", "--report", str(tmp_path), "-k"]
    assert main([*given, "bs1_short"]) == 0
    runs.clear()
    assert main([*given, "bs2_ragged"]) == 0
    asked = [("0.5.12", ["-k", "(bs2_ragged)"])]
    assert runs[:1] == asked, "what was kept of other words answers nothing"
    assert "bs1_short" not in capsys.readouterr().out.rpartition("0.5.20: 1 turned")[2]


@pytest.mark.parametrize("end", ["0.5.12", "0.5.23"])
def test_an_end_whose_run_broke_off_is_no_answer(
    runs: list[tuple[str, list[str]]],
    end: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = Side.run

    def broken(self: Side, folder: Path, args: Sequence[str]) -> int:
        code = run(self, folder, args)
        path = folder / "records.jsonl"
        if self.name == end:
            path.write_text(path.read_text(encoding="utf-8").partition("\n")[0] + "\n")
        return code

    monkeypatch.setattr(Side, "run", broken)
    with pytest.raises(SystemExit) as ended:
        main(["--good", "0.5.12", "--bad", "0.5.23", "--report", str(tmp_path)])
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("specgate bisect: a run at an end of the search broke off: ")


def test_what_a_changed_checkout_said_is_known_until_the_search_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OneAtATime:
        def run(self, folder: Path, args: Sequence[str], /) -> int:
            case = args[-1].strip("()")
            folder.mkdir(exist_ok=True)
            (folder / "records.jsonl").unlink(missing_ok=True)
            write_records(folder / "records.jsonl", [record(case, "3", is_bad=True, planned=1)])
            return 1

    monkeypatch.setattr(bisect, "environment", lambda: replace(CLEAN, dirty=True))
    steps = bisect.DifferentialSteps([OneAtATime], tmp_path, "", [])
    names = [f"trtllm_mha/xqa {case} eager" for case in list(PLANTED)[:2]]
    for name in names:
        assert steps.ask(0, frozenset({name})) == {name: True}
    told = "a candidate that is asked of other trials still knows the cause of the first ones"
    assert list(steps.records[0]) == names, told


def test_records_of_a_few_do_not_stand_for_the_plan_of_all() -> None:
    cut_short = record("mha-decode-bs1_short", "0.5.12", is_bad=False, planned=3)
    named = record("mha-decode-bs2_ragged", "0.5.12", is_bad=False, planned=1)
    for order in ([cut_short, named], [named, cut_short]):
        assert not bisect._holds(bisect.by_name(order), None), "2 of 3 planned trials are known"
    whole = [replace(named, planned=2), replace(cut_short, planned=2)]
    assert bisect._holds(bisect.by_name(whole), None)


def git(repository: Path, *words: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@t"]
    done = subprocess.run(
        ["git", "-C", str(repository), *who, *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture(params=["python/sglang", "sglang"])
def repository(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, list[str]]:
    """A repository of seven commits, each with its place in a file, and their hashes."""
    folder, commits = tmp_path / "repository", []
    package = folder / request.param
    package.mkdir(parents=True)
    git(folder, "init", "-q")
    for place in range(7):
        (package / "place").write_text(str(place), encoding="utf-8")
        git(folder, "add", "-A")
        git(folder, "commit", "-q", "-m", f"change {place}")
        commits.append(git(folder, "rev-parse", "HEAD"))
    return folder, commits


def test_commits_of_a_checkout(
    runs: list[tuple[str, list[str]]],
    repository: tuple[Path, list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, commits = repository
    given = ["--source", str(folder), "--report", str(tmp_path / "report")]
    assert main([*given, "--good", commits[0], "--bad", "HEAD"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert lines == [
        f"{commits[3][:7]} change 3: 1 turned, {commits[2][:7]} change 2 was good",
        f"{commits[5][:7]} change 5: 1 turned, {commits[4][:7]} change 4 was good",
    ]
    assert git(folder, "status", "--short") == ""
    assert git(folder, "worktree", "list").count("\n") == 0


def test_commits_of_a_merged_branch_are_not_asked(tmp_path: Path) -> None:
    def commit(message: str) -> str:
        git(tmp_path, "commit", "-q", "--allow-empty", "-m", message)
        return git(tmp_path, "rev-parse", "HEAD")

    git(tmp_path, "init", "-q", "-b", "main")
    first = commit("first")
    git(tmp_path, "switch", "-q", "-c", "branch")
    commit("never a state of main")
    git(tmp_path, "switch", "-q", "main")
    second = commit("second")
    git(tmp_path, "merge", "-q", "--no-ff", "-m", "merge", "branch")
    merge = git(tmp_path, "rev-parse", "HEAD")
    assert commits_between(tmp_path, first, "main") == [first, second, merge]


def test_commits_of_flashinfer_are_run_under_the_release_that_is_named(
    repository: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder, _ = repository
    (package,) = folder.rglob("sglang")
    git(folder, "mv", str(package), str(package.with_name("flashinfer")))
    git(folder, "commit", "-q", "-m", "another package")
    git(folder, "commit", "-q", "--allow-empty", "-m", "the last")
    options = argparse.Namespace(
        good="HEAD~1", bad="HEAD", k=None, bench=False, packages=False, between=[],
        source=None, flashinfer=folder, like="0.5.14", report=tmp_path / "report",
    )  # fmt: skip
    steps = bisect.candidates(options, []).steps
    assert isinstance(steps, bisect.DifferentialSteps)
    side = steps._sides[1]()
    assert isinstance(side, Side)
    assert (side.name, side.like) == ("0.5.14", "0.5.14")
    assert side.flashinfer is not None
    assert (side.flashinfer / "flashinfer" / "place").read_text(encoding="utf-8") == "6"


def test_every_question_has_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual: dict[str, object] = {
        "k": None, "bench": False, "packages": False, "source": None, "flashinfer": None,
        "like": "0.5.23", "report": tmp_path,
    }  # fmt: skip
    others: list[dict[str, object]] = [
        {"k": "decode"},
        {"bench": True},
        {"packages": True},
        {"source": tmp_path},
        {"flashinfer": tmp_path},
        {"like": "0.5.22"},
    ]

    def folder(changes: dict[str, object], *args: str, names: Sequence[str] = ("a", "b")) -> Path:
        return bisect._folder(argparse.Namespace(**usual | changes), names, args)

    made = [folder({}), *map(folder, others), folder({}, "-x"), folder({}, names=("a", "c"))]
    assert folder({}) == made[0], "a search that was interrupted finds what it kept"
    monkeypatch.setenv(FOLDER, str(tmp_path / "other"))
    made.append(folder({}))  # releases that were unpacked elsewhere
    questions = ["usual", *(next(iter(one)) for one in others), "args", "names", FOLDER]
    shared = [asked for asked, at in zip(questions, made, strict=True) if made.count(at) > 1]
    assert len(set(made)) == len(made) == 10, (
        f"questions that differ in one share a folder: {shared}"
    )


def test_of_many_cases_none_is_named(tmp_path: Path) -> None:
    steps = bisect.DifferentialSteps([], tmp_path, "decode", ["-x"])
    few, many = (frozenset(f"b/k case{i:02} eager" for i in range(n)) for n in (40, 41))
    named = " or ".join(f"case{i:02}" for i in range(40))
    assert steps._chosen(few) == ["-x", "-k", f"(decode) and ({named})"]
    assert steps._chosen(many) == ["-x", "-k", "(decode)"], "a command line has an end"


def test_nothing_turned(
    runs: list[tuple[str, list[str]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--good", "0.5.12", "--bad", "0.5.14", "--report", str(tmp_path)]
    assert main(words) == 1
    assert capsys.readouterr().out == "nothing that 0.5.12 has good is bad in 0.5.14\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--good", "0.5.23", "--bad", "0.5.12"], "bad = '0.5.12' .* a release after 0.5.23"),
        (["--good", "0.1", "--bad", "0.5.12"], "release = '0.1' .* accepted: 0.5.12, "),
        (["--good", "x", "--bad", "HEAD", "--source", "REPO"], "git of REPO: fatal: "),
        (["--good", "HEAD", "--bad", "HEAD", "--source", "REPO"], "a commit that HEAD leads to"),
        (["--good", "HEAD~1", "--bad", "HEAD", "--flashinfer", "REPO"], "with flashinfer/"),
        (["--good", "what:", "--bad", "embedded:", "--bench"], "arm = 'what:'"),
        (["--good", "0.5.12", "--bad", "0.5.14", "--between", "x"], "--between = 'x' .* --bench"),
    ],
)
def test_what_cannot_be_searched_is_named(
    words: list[str],
    told: str,
    repository: tuple[Path, list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    named = [str(repository[0]) if word == "REPO" else word for word in words]
    with pytest.raises(SystemExit) as ended:
        main([*named, "--report", str(tmp_path / "report")])
    assert ended.value.code == 2
    said = capsys.readouterr().err.replace(str(repository[0]), "REPO")
    assert re.search(told, said), said


def test_arms_of_a_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slower = {"embedded:page_size=1": 0.0, "embedded:page_size=2": 0.0, "embedded:page_size=4": 0.3}
    measured: list[str] = []

    def main_of_bench(argv: list[str]) -> int:
        spec, out = argv[argv.index("--b") + 1], Path(argv[argv.index("--out") + 1])
        assert argv[argv.index("--a") + 1] == "embedded:page_size=1"
        assert argv[-2:] == ["--seed", "7"]
        measured.append(spec)
        for line in synthetic_bench.run_lines({"tpot": slower[spec], "step_time": slower[spec]}):
            append(out, line)
        return int(slower[spec] > 0)

    monkeypatch.setattr(bench, "main", main_of_bench)
    (tmp_path / "r").mkdir()
    words = ["--good", "embedded:page_size=1", "--bad", "embedded:page_size=4", "--bench"]
    words += ["--between", "embedded:page_size=2", "--report", str(tmp_path / "r")]
    assert main([*words, "--", "--seed", "7"]) == 0
    first, *cases = capsys.readouterr().out.splitlines()
    assert first == "embedded:page_size=4: 4 turned, embedded:page_size=2 was good"
    assert all(line.endswith(": regressed") for line in cases)
    assert measured == ["embedded:page_size=4", "embedded:page_size=2"]


def test_a_benchmark_that_cannot_start_answers_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "main", lambda argv: 2)
    words = ["--good", "embedded:page_size=1", "--bad", "embedded:page_size=4", "--bench"]
    with pytest.raises(SystemExit, match="2"):
        main([*words, "--report", str(tmp_path)])
    [line] = capsys.readouterr().err.splitlines()
    assert "arm = 'embedded:page_size=4'" in line, "the arm that could not be measured is named"


def test_an_interrupted_benchmark_blames_no_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "main", lambda argv: 130)
    words = ["--good", "embedded:page_size=1", "--bad", "embedded:page_size=4", "--bench"]
    with pytest.raises(KeyboardInterrupt):
        main([*words, "--report", str(tmp_path)])
    assert capsys.readouterr().err == "", "an arm is named only where it cannot be measured"


def test_an_arm_whose_session_settled_nothing_is_not_called_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main_of_bench(argv: list[str]) -> int:
        spec, out = argv[argv.index("--b") + 1], Path(argv[argv.index("--out") + 1])
        slower, blocks = (0.3, 10) if spec == "embedded:page_size=4" else (0.0, 1)
        effects = {"tpot": slower, "step_time": slower}
        for line in synthetic_bench.run_lines(effects, blocks=blocks):
            append(out, line)
        return 1

    monkeypatch.setattr(bench, "main", main_of_bench)
    words = ["--good", "embedded:page_size=1", "--bad", "embedded:page_size=4", "--bench"]
    words += ["--between", "embedded:page_size=2", "--report", str(tmp_path)]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith(
        "one of embedded:page_size=2, embedded:page_size=4: 4 turned, embedded:page_size=1 was good"
    )
