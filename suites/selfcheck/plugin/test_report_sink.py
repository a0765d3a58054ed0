"""Every trial leaves one whole record, whichever process ran it and however it ended."""

from __future__ import annotations

import pytest

from harness.core.paths import ROOT
from harness.core.record import Record, Verdict, read_records

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.untraced

TESTS = """
import os, signal
import pytest
from fixtures.fakes.sample_records import trial
from harness.core.record import Verdict

@pytest.mark.parametrize("case", ["one", "two"])
def test_passes(record_trial, case):
    record_trial(trial(case))

def test_last_record_counts(record_trial):
    record_trial(trial("last", Verdict.ERROR))
    record_trial(trial("last", Verdict.WRONG_NUMBERS, message="row 3"))
    assert False, "the record knows better than this"

def test_raises_after_an_early_record(record_trial):
    record_trial(trial("early", Verdict.ERROR))
    raise ValueError("no such page\\nand a second line")

def test_fails_behind_a_passed_record(record_trial):
    record_trial(trial("behind"))
    assert 1 == 2

def test_skips_behind_its_record(record_trial):
    record_trial(trial("refused", Verdict.REFUSED, message="head_dim"))
    pytest.skip("head_dim")

@pytest.fixture
def breaks_later():
    yield
    raise OSError("late")

def test_breaks_in_teardown(record_trial, breaks_later):
    record_trial(trial("late"))

def test_without_a_trial():
    pass

def test_interrupted(record_trial):
    record_trial(trial("never"))
    os.kill(os.getpid(), signal.SIGKILL)
"""
EXPECTED = {
    "one": (Verdict.PASSED, ""),
    "two": (Verdict.PASSED, ""),
    "last": (Verdict.WRONG_NUMBERS, "row 3"),
    "early": (Verdict.ERROR, "ValueError: no such page"),
    "behind": (Verdict.ERROR, "AssertionError: assert 1 == 2"),
    "refused": (Verdict.REFUSED, "head_dim"),
    "late": (Verdict.ERROR, "OSError: late"),
}


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeconftest('pytest_plugins = ["fixtures.pytest_plugin.records"]')
    pytester.makepyfile(test_trials=TESTS)
    return pytester


def run(project: pytest.Pytester, *args: str, killed: bool = False) -> pytest.RunResult:
    start = project.runpytest_subprocess if killed else project.runpytest_inprocess
    return start("-p", "no:cacheprovider", "--report", "out/deep", *args)


def by_case(project: pytest.Pytester) -> dict[str, Record]:
    records = list(read_records(project.path / "out" / "deep" / "records.jsonl"))
    assert len({record.case for record in records}) == len(records)
    return {record.case: record for record in records}


@pytest.mark.parametrize("workers", ["0", "2"])
def test_each_trial_leaves_its_final_record(project: pytest.Pytester, workers: str) -> None:
    run(project, "-n", workers, "-k", "not interrupted").assert_outcomes(
        passed=4, failed=3, skipped=1, errors=1
    )
    records = by_case(project)
    assert {case: (r.verdict, r.message) for case, r in records.items()} == EXPECTED
    assert {record.planned for record in records.values()} == {len(EXPECTED)}


def test_killed_run_keeps_whole_lines_and_its_plan(project: pytest.Pytester) -> None:
    run(project, "-n", "0", "-k", "passes or interrupted", killed=True)
    records = by_case(project)
    assert set(records) == {"one", "two"}
    assert {record.planned for record in records.values()} == {3}


def test_new_run_starts_an_empty_file(project: pytest.Pytester) -> None:
    run(project, "-n", "0", "-k", "passes and one")
    run(project, "-n", "0", "-k", "passes and two")
    assert set(by_case(project)) == {"two"}


def test_unwritable_folder_is_one_line(project: pytest.Pytester) -> None:
    (project.path / "out").write_text("a file, not a folder")
    result = run(project, "-n", "0")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    [line] = [line for line in result.errlines if line]
    assert "--report = 'out/deep' is not accepted" in line
