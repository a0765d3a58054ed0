"""Shards of a run share its tests out without gap or overlap, and the gate misses a lost one."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci import gate, report
from fixtures.fakes.sample_records import trial
from fixtures.pytest_plugin.shards import Shard
from harness import __main__ as cli
from harness.core.record import read_records, write_records
from harness.errors import UsageError

pytest_plugins = ["pytester"]

IDS = [f"suites/test_x.py::test_y[{number}]" for number in range(200)]
TESTS = """
import pytest
from fixtures.fakes.sample_records import trial

@pytest.mark.parametrize("case", range(9))
def test_trial(record_trial, case):
    record_trial(trial(f"case{case}"))

@pytest.mark.parametrize("case", range(5))
def test_without_a_trial(case):
    pass
"""


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_every_test_falls_to_exactly_one_part(count: int) -> None:
    parts = [Shard(index, count) for index in range(1, count + 1)]
    assert all(sum(part.has(name) for part in parts) == 1 for name in IDS)
    shares = [sum(map(part.has, IDS)) for part in parts]
    assert min(shares) > 0.5 * len(IDS) / count


def test_a_part_is_a_matter_of_the_id_alone() -> None:
    # sha256sum of this id begins with 1cc11193 11498866, which leaves 3 divided by 5.
    found = [index for index in range(1, 6) if Shard(index, 5).has("suites/a.py::test_b")]
    assert found == [0x1CC1119311498866 % 5 + 1] == [4]


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/0", "a/b", "-1/2", "1/2/3", ""])
def test_a_part_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"--shard = '{text}' is not accepted; accepted: i/n"):
        Shard.parse(text)


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    pytester.makeconftest(
        'pytest_plugins = ["fixtures.pytest_plugin.shards", "fixtures.pytest_plugin.records"]'
    )
    pytester.makepyfile(test_trials=TESTS)
    return pytester


def run(project: pytest.Pytester, shard: str, *args: str) -> pytest.RunResult:
    out = ("--report", f"out{shard.replace('/', '-')}")
    return project.runpytest_inprocess("-p", "no:cacheprovider", *out, "--shard", shard, *args)


def test_parts_together_are_the_whole_run(
    project: pytest.Pytester, capsys: pytest.CaptureFixture[str]
) -> None:
    run(project, "1/2")
    run(project, "2/2")
    files = [str(project.path / f"out{part}-2" / "records.jsonl") for part in (1, 2)]
    parts = [[record.case for record in read_records(Path(file))] for file in files]
    assert all(parts)
    assert sorted([*parts[0], *parts[1]]) == [f"case{number}" for number in range(9)]
    assert {record.planned for file in files for record in read_records(Path(file))} == {9}
    capsys.readouterr()
    assert gate.main(files) == 0
    assert capsys.readouterr().out.endswith("planned 9 = run 9 + refused 0 + waived 0\n")
    for lost in (0, 1):
        assert gate.main([files[lost]]) == 1
        there = len(parts[lost])
        assert f"planned 9 != run {there} + refused 0" in capsys.readouterr().out
    assert gate.main([*files, files[0]]) == 0
    assert capsys.readouterr().out.endswith("planned 9 = run 9 + refused 0 + waived 0\n")


def test_a_part_is_taken_of_what_was_chosen(project: pytest.Pytester) -> None:
    run(project, "1/2", "-k", "test_trial and (2 or 3 or 4 or 5)")
    records = list(read_records(project.path / "out1-2" / "records.jsonl"))
    assert {record.planned for record in records} <= {4}
    assert {record.case for record in records} <= {"case2", "case3", "case4", "case5"}


def test_a_wrong_part_is_one_line(project: pytest.Pytester) -> None:
    result = run(project, "3/2")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    [line] = [line for line in result.errlines if line]
    assert "--shard = '3/2' is not accepted" in line


def test_report_reads_several_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / name for name in ("one.jsonl", "two.jsonl")]
    for file, case in zip(files, ("one", "two"), strict=True):
        write_records(file, [trial(case, planned=2)])
    assert report.main([*map(str, files), "--out", str(tmp_path / "page.html")]) == 0
    assert "planned 2 = run 2" in capsys.readouterr().out
    assert "2 trials, 0 problems" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("verb", ["run", "gpu"])
@pytest.mark.parametrize("shard", [["--shard", "2/3"], ["--shard=2/3"]])
def test_a_part_is_reported_and_left_to_the_gate_of_all(
    monkeypatch: pytest.MonkeyPatch, verb: str, shard: list[str]
) -> None:
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(cli, "start", lambda *words: calls.append(words) or 0)
    assert cli.main([verb, *shard]) == 0
    assert [call[0] for call in calls] == ["pytest", "ci.report"]
    assert calls[0][-len(shard) :] == tuple(shard)
