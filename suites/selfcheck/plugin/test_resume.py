"""A run that was cut short goes on with --resume: what passed is not run again, nothing is lost."""

from __future__ import annotations

import errno
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from ci import gate
from fixtures.pytest_plugin.nested_runs import run_forked
from fixtures.pytest_plugin.shards import Shard
from harness.core.paths import python_path
from harness.core.record import Record, Verdict, read_records, record_lines, write_records

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.untraced

# Trials of this machine; "case3" fails until a file says otherwise, and each run is told apart.
TESTS = """
import os
from pathlib import Path
import pytest
from fixtures.fakes.sample_records import trial
from harness.core.environment import environment
from harness.core.record import Verdict

@pytest.mark.parametrize("number", range(6))
def test_trial(record_trial, number):
    with Path("ran.txt").open("a") as file:
        file.write(f"{number} ")
    if number == 4 and os.environ.get("KILLED"):
        os._exit(9)
    red = number == 3 and not Path("mended").exists()
    verdict = Verdict.WRONG_NUMBERS if red else Verdict.PASSED
    facts = {"environment": environment(), "message": "off" if red else ""}
    record_trial(trial(f"case{number}", verdict, **facts))
    assert not red

def test_without_a_trial():
    pass
"""
RED_AGAIN = "--resume runs trials that were red, or have no record, again"
ARGS = ("-p", "no:cacheprovider", "--report", "out")


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", python_path())
    plugins = [f"fixtures.pytest_plugin.{name}" for name in ("resume", "shards", "records")]
    pytester.makeconftest(f"pytest_plugins = {plugins}")
    pytester.makepyfile(test_trials=TESTS)
    return pytester


def ran(project: pytest.Pytester) -> list[int]:
    """Trials that ran since it was last asked."""
    path = project.path / "ran.txt"
    numbers = [int(word) for word in path.read_text().split()] if path.exists() else []
    path.unlink(missing_ok=True)
    return sorted(numbers)


def records(project: pytest.Pytester) -> dict[str, Record]:
    found = list(read_records(project.path / "out" / "records.jsonl"))
    twice = sorted(c for c, times in Counter(r.case for r in found).items() if times > 1)
    assert not twice, f"a trial has one record, also when it was red and has run again: {twice}"
    return {record.case: record for record in found}


def test_a_killed_run_goes_on(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KILLED", "1")
    run_forked(project, *ARGS)
    assert ran(project) == [0, 1, 2, 3, 4]
    assert list(records(project)) == ["case0", "case1", "case2", "case3"]
    monkeypatch.delenv("KILLED")
    (project.path / "mended").touch()
    with (project.path / "out" / "records.jsonl").open("a") as file:
        file.write('{"format": 1, "case": "ca')
    assert project.runpytest_inprocess(*ARGS, "--resume").ret == 0
    assert ran(project) == [3, 4, 5], RED_AGAIN
    found = records(project)
    assert sorted(found) == [f"case{number}" for number in range(6)]
    assert {record.verdict for record in found.values()} == {Verdict.PASSED}
    assert {record.planned for record in found.values()} == {6}
    assert {record.test for record in found.values()} == {
        f"test_trials.py::test_trial[{number}]" for number in range(6)
    }
    capsys.readouterr()
    assert gate.main([str(project.path / "out" / "records.jsonl")]) == 0


def test_a_full_disk_loses_no_record_that_was_kept(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *_: object, **__: object) -> None:
        path.write_bytes(b"")  # as a file is opened that nothing can be written to
        raise OSError(errno.ENOSPC, "No space left on device")

    project.runpytest_inprocess(*ARGS)
    before = records(project)
    with monkeypatch.context() as until_there_is_room:
        until_there_is_room.setattr(Path, "write_text", full)
        result = project.runpytest_inprocess(*ARGS, "--resume")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "No space left on device" in result.stderr.str()
    assert records(project) == before, "the file is replaced once the new one is whole"


def test_without_it_everything_runs_again(project: pytest.Pytester) -> None:
    for _ in range(2):
        project.runpytest_inprocess(*ARGS)
        assert ran(project) == [0, 1, 2, 3, 4, 5]


def test_workers_leave_out_the_same(project: pytest.Pytester) -> None:
    project.runpytest_inprocess(*ARGS)
    assert ran(project) == [0, 1, 2, 3, 4, 5]
    assert project.runpytest_inprocess(*ARGS, "-n", "2", "--resume").ret == 1, RED_AGAIN
    assert ran(project) == [3], RED_AGAIN
    assert records(project)["case3"].verdict is Verdict.WRONG_NUMBERS


def test_where_nothing_is_left_the_run_is_green(project: pytest.Pytester) -> None:
    (project.path / "mended").touch()
    project.runpytest_inprocess(*ARGS)
    ran(project)
    result = project.runpytest_inprocess(*ARGS, "--resume", "-k", "test_trial")
    assert (result.ret, ran(project), len(records(project))) == (0, [], 6)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_choice_that_matches_nothing_is_no_success(
    project: pytest.Pytester, workers: str
) -> None:
    project.runpytest_inprocess(*ARGS)
    spread = (*ARGS, "-n", workers, "--resume", "-k")
    codes = [project.runpytest_inprocess(*spread, words).ret for words in ("typo", "trial and 4")]
    typo, ended = map(int, codes)
    said = f"pytest -n {workers} --resume -k WORDS ends with"
    assert typo == pytest.ExitCode.NO_TESTS_COLLECTED, f"{said} 5 if none has the words: {typo}"
    assert ended == pytest.ExitCode.OK, f"{said} 0 if all that it chose have ended: {ended}"


def test_a_part_to_which_nothing_falls_is_no_success(project: pytest.Pytester) -> None:
    (project.path / "mended").touch()
    project.runpytest_inprocess(*ARGS)
    names = [f"test_trials.py::test_trial[{number}]" for number in range(6)]
    names.append("test_trials.py::test_without_a_trial")
    empty = next(n for n in range(1, 30) if not any(map(Shard(n, 29).has, names)))
    result = project.runpytest_inprocess(*ARGS, "--resume", "--shard", f"{empty}/29")
    said = "pytest --resume ends with 5 if it chose no test, though others have ended"
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED, f"{said}: {int(result.ret)}"


def test_a_red_trial_that_is_not_chosen_keeps_its_record(project: pytest.Pytester) -> None:
    project.runpytest_inprocess(*ARGS)
    (project.path / "mended").touch()
    for words in ("typo", "trial and 4"):
        project.runpytest_inprocess(*ARGS, "--resume", "-k", words)
        found = {case: record.verdict for case, record in records(project).items()}
        green = {f"case{number}": Verdict.PASSED for number in (0, 1, 2, 4, 5)}
        said = "case3, a red trial that was not asked again, keeps its record, as green ones do"
        assert found == green | {"case3": Verdict.WRONG_NUMBERS}, f"{said}: {found}"
    project.runpytest_inprocess(*ARGS, "--resume")
    red = [case for case, record in records(project).items() if record.verdict.is_red]
    assert not red, f"a resumed run runs red trials again: {red}, mended since, are still red"
    verdicts = {record.verdict for record in records(project).values()}
    assert verdicts == {Verdict.PASSED}, f"each record of a green run has passed: {verdicts}"


def test_a_run_killed_after_it_repeated_a_red_trial_goes_on(
    project: pytest.Pytester,
) -> None:
    project.runpytest_inprocess(*ARGS)
    ran(project)
    path = project.path / "out" / "records.jsonl"
    write_records(path, [replace(records(project)["case3"], verdict=Verdict.PASSED, message="")])
    assert project.runpytest_inprocess(*ARGS, "--resume").ret == 0
    assert ran(project) == [], "the last record of a test says how it ended"
    assert records(project)["case3"].verdict is Verdict.PASSED


FACTS = ("commit", "tree", "python", "torch", "flashinfer", "device", "driver")


@pytest.mark.parametrize("fact", FACTS)
def test_records_of_another_tree_or_machine_are_refused(
    project: pytest.Pytester, fact: str
) -> None:
    project.runpytest_inprocess(*ARGS)
    path = project.path / "out" / "records.jsonl"
    found = list(records(project).values())
    there = replace(found[1].environment, **{fact: "another"})
    path.unlink()
    write_records(path, [found[0], replace(found[1], environment=there)])
    before = path.read_bytes()
    result = project.runpytest_inprocess(*ARGS, "--resume")
    assert result.ret == pytest.ExitCode.USAGE_ERROR, f"{fact} must be what it was"
    assert f"{fact} = 'another' is not accepted; accepted: " in "\n".join(result.errlines)
    assert path.read_bytes() == before


def test_records_of_another_kinds_plan_are_refused(project: pytest.Pytester) -> None:
    names = [f"fixtures.pytest_plugin.{name}" for name in ("kinds", "resume", "shards", "records")]
    project.makeconftest(f"pytest_plugins = {names}")
    (project.path / "mended").touch()
    project.runpytest_inprocess(*ARGS, "--kind", "sm90")
    before = (project.path / "out" / "records.jsonl").read_bytes()
    result = project.runpytest_inprocess(*ARGS, "--kind", "sm100", "--resume")
    told = "what was run of sm90's plan ends no run of sm100's"
    assert result.ret == pytest.ExitCode.USAGE_ERROR, told
    [line] = filter(None, result.errlines)
    assert "--resume: kind = 'sm90' is not accepted; accepted: sm100" in line
    assert (project.path / "out" / "records.jsonl").read_bytes() == before
    assert project.runpytest_inprocess(*ARGS, "--kind", "sm90", "--resume").ret == 0


def test_every_record_is_asked_for_its_kind(project: pytest.Pytester) -> None:
    names = [f"fixtures.pytest_plugin.{name}" for name in ("kinds", "resume", "shards", "records")]
    project.makeconftest(f"pytest_plugins = {names}")
    (project.path / "mended").touch()
    project.runpytest_inprocess(*ARGS, "--kind", "sm90")
    path = project.path / "out" / "records.jsonl"
    found = list(records(project).values())
    path.write_text(record_lines([*found[:-1], replace(found[-1], kind="sm100")]))
    result = project.runpytest_inprocess(*ARGS, "--kind", "sm90", "--resume")
    said = "a trial of sm100's plan, the last of a file of sm90's records, ends no trial of sm90"
    assert result.ret == pytest.ExitCode.USAGE_ERROR, said
    assert "--resume: kind = 'sm100' is not accepted; accepted: sm90" in "".join(result.errlines)


def test_records_of_a_gpu_that_is_not_here_are_refused(project: pytest.Pytester) -> None:
    project.runpytest_inprocess(*ARGS)
    path = project.path / "out" / "records.jsonl"
    there = replace(records(project)["case1"], device="cuda:99")
    write_records(path, [there])
    before = path.read_bytes()
    result = project.runpytest_inprocess(*ARGS, "--resume")
    told = [line for line in result.errlines if line]
    said = "records of a GPU that this machine lacks are refused in one line"
    assert result.ret == pytest.ExitCode.USAGE_ERROR, f"{said}: {int(result.ret)}"
    assert len(told) == 1, f"{said}: {told}"
    assert "records.jsonl: device = 'cuda:99' is not accepted; accepted: cpu; " in told[0], said
    assert path.read_bytes() == before


def test_without_records_it_is_refused(project: pytest.Pytester) -> None:
    result = project.runpytest_inprocess(*ARGS, "--resume")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    [line] = [line for line in result.errlines if line]
    assert "--resume = " in line
    assert "is not accepted; accepted: the records of a run" in line
    [line] = filter(None, project.runpytest_inprocess(*ARGS[:2], "--resume").errlines)
    assert "--resume needs --report DIR" in line
