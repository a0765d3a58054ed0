"""A run passes the gate only if it is complete and every trial of it is green."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ci import gate, summary
from fixtures.fakes.sample_records import ENVIRONMENT, compared, trial
from harness.core.record import Record, Verdict, write_records

RED = (
    "wrong_shape",
    "wrong_dtype",
    "non_finite",
    "wrong_numbers",
    "wrong_tokens",
    "broken_invariant",
    "over_budget",
    "wrong_golden",
    "error",
)
GREEN = ("passed", "refused", "waived")


def test_every_verdict_is_judged() -> None:
    assert {*RED, *GREEN} == set(map(str, Verdict))


@pytest.mark.parametrize("verdict", RED)
def test_red_verdict_is_named_with_cause_and_command(verdict: str) -> None:
    record = trial("edge", Verdict(verdict), message="row 3 is off", reproduce="pytest -k edge")
    [problem] = gate.problems([record])
    assert problem == (
        f"{verdict}: edge trtllm_mha/reference decode eager cpu: row 3 is off\n    pytest -k edge"
    )


@pytest.mark.parametrize("verdict", GREEN)
def test_green_verdict_passes(verdict: str) -> None:
    assert gate.problems([trial("edge", Verdict(verdict), message="a reason")]) == []


def test_red_without_a_cause_says_so() -> None:
    [problem] = gate.problems([trial("edge", Verdict.ERROR)])
    assert problem.endswith("cpu: no cause given")


def test_no_records_are_red() -> None:
    assert gate.problems([]) == ["no records: nothing was tested"]


CONTRADICT = "records of one trial contradict each other"
OF_ANOTHER_TREE = replace(ENVIRONMENT, tree="abcdef" * 10)
PAIR = [trial("one", planned=2), trial("two", planned=2)]
INCOMPLETE: list[tuple[str, list[Record], str]] = [
    ("missing", PAIR[:1], "planned 2 != run 1 + refused 0 + waived 0"),
    (
        "missing-beside-others",
        [
            trial("ran", planned=4),
            trial("refused", Verdict.REFUSED, message="head_dim", planned=4),
            trial("waived", Verdict.WAIVED, message="#7", planned=4),
        ],
        "planned 4 != run 1 + refused 1 + waived 1",
    ),
    ("uncounted", [trial("one", planned=0)], "planned 0 != run 1 + refused 0 + waived 0"),
    ("two-runs", [PAIR[0], trial("three")], "records of more than one run: planned trials [1, 2]"),
    (
        "counted-once",
        [PAIR[0], PAIR[0]],
        "planned 2 != run 1 + refused 0 + waived 0",
    ),
    (
        "other-verdict",
        [trial("one"), trial("one", Verdict.REFUSED, message="head_dim")],
        f"{CONTRADICT}: one trtllm_mha/reference decode eager cpu: verdict passed, refused",
    ),
    (
        "other-verdict-before-two-retries",
        [trial("one", Verdict.REFUSED, message="head_dim"), trial("one"), trial("one")],
        f"{CONTRADICT}: one trtllm_mha/reference decode eager cpu: verdict passed, refused",
    ),
    (
        "two-tests-of-one-trial",
        [trial("one", test="a.py::test_a"), trial("one", test="a.py::test_b")],
        f"{CONTRADICT}: one trtllm_mha/reference decode eager cpu: test a.py::test_a, a.py::test_b",
    ),
    (
        "other-tree",
        [trial("one", planned=2), trial("two", planned=2, environment=OF_ANOTHER_TREE)],
        "records of more than one tree: unknown, abcdefabcdef",
    ),
    (
        "other-tree-of-one-trial",
        [trial("one", environment=OF_ANOTHER_TREE), trial("one")],
        f"{CONTRADICT}: one trtllm_mha/reference decode eager cpu: tree {'abcdef' * 10}, unknown",
    ),
    (
        "missing-on-one-kind",
        [trial("one", kind="cpu"), trial("one", kind="sm90", device="cuda:3", planned=2)],
        "planned 2 != run 1 + refused 0 + waived 0 on sm90",
    ),
    (
        "two-runs-on-one-kind",
        [
            trial("one", kind="cpu"),
            trial("one", kind="sm90", device="cuda:3"),
            trial("two", kind="sm90", device="cuda:0", planned=2),
        ],
        "records of more than one run on sm90: planned trials [1, 2]",
    ),
    (
        "lying",
        [trial("one", quantities=compared(0.75))],
        "passed, yet 1.5 × what was allowed: one trtllm_mha/reference decode eager cpu",
    ),
    (
        "not-a-number",
        [trial("one", quantities=compared(float("nan")))],
        "passed, yet inf × what was allowed: one trtllm_mha/reference decode eager cpu",
    ),
    (
        "refused-without-reason",
        [trial("one", Verdict.REFUSED)],
        "refused without a reason: one trtllm_mha/reference decode eager cpu",
    ),
    (
        "waived-without-reason",
        [trial("one", Verdict.WAIVED)],
        "waived without a reason: one trtllm_mha/reference decode eager cpu",
    ),
]


@pytest.mark.parametrize(
    ("records", "problem"), [pytest.param(*row[1:], id=row[0]) for row in INCOMPLETE]
)
def test_incomplete_or_contradictory_records_are_red(records: list[Record], problem: str) -> None:
    assert gate.problems(records) == [problem]


@pytest.mark.parametrize("field", ["case", "subject", "mode", "execution", "device"])
def test_trials_that_differ_in_one_name_are_two(field: str) -> None:
    other = {"case": "one", "planned": 2} | {field: "other"}
    assert gate.problems([PAIR[0], trial(**other)]) == []  # type: ignore[arg-type]


SM90 = {"kind": "sm90", "test": "a.py::test_a"}


@pytest.mark.parametrize("device", ["cuda:0", "cuda:5"])
def test_a_retry_on_any_gpu_of_the_kind_counts_once(device: str) -> None:
    records = [trial("one", device=at, **SM90) for at in ("cuda:0", device)]
    assert gate.problems(records) == []
    assert summary.census(summary.once(records)) == summary.Census(1, 1, 0, 0)


def test_kinds_are_one_verdict_each_complete_for_itself() -> None:
    refused = trial("two", Verdict.REFUSED, message="head_dim", planned=2, device="cuda:1", **SM90)
    records = [
        trial("one", planned=2, device="cuda:0", **SM90),
        refused,
        # What a run on a GPU counts on the CPU belongs to that GPU's plan, the CPU's own does not.
        trial("one", kind="cpu"),
    ]
    assert gate.problems(records) == []
    assert summary.censuses(records) == {
        "sm90": summary.Census(2, 1, 1, 0),
        "cpu": summary.Census(1, 1, 0, 0),
    }
    assert gate.problems(records, ["cpu", "sm90", "sm100"]) == ["no records of sm100"]


def test_a_gpu_runs_part_on_the_cpu_belongs_to_its_plan() -> None:
    records = [
        trial("one", planned=2, device="cuda:0", kind="sm90"),
        trial("one", planned=2, device="cpu", kind="sm90"),
    ]
    assert [record.place for record in records] == ["sm90", "cpu for sm90"]
    assert gate.problems(records) == []


def test_kinds_that_must_be_there_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "records.jsonl"
    write_records(path, [trial("one", kind="cpu")])
    assert gate.main([str(path), "--kinds", "cpu"]) == 0
    assert gate.main([str(path), "--kinds", "cpu,sm100"]) == 1
    assert "gate: no records of sm100\n" in capsys.readouterr().out
    assert gate.main([str(path), "--kinds", "cpu,"]) == 0, "behind a last comma is no kind"


def test_a_kind_that_refused_every_trial_is_there() -> None:
    refused = trial("one", Verdict.REFUSED, message="head_dim", device="cuda:0", kind="sm100")
    told = "records of sm100, which refused all of its plan, are records of sm100"
    assert gate.problems([refused], ["sm100"]) == [], told


def test_a_kind_is_asked_for_by_its_whole_name() -> None:
    told = "sm10 is asked for, and records of sm100 are none of it"
    found = gate.problems([trial("one", device="cuda:0", kind="sm100")], ["sm10"])
    assert found == ["no records of sm10"], f"{told}: {found}"


def test_error_at_the_allowance_passes() -> None:
    assert gate.problems([trial("one", quantities=compared(0.5))]) == []


COMMANDS = [
    ("green", PAIR, 0, "gate: green, 0 problems, planned 2 = run 2 + refused 0 + waived 0"),
    ("red", PAIR[:1], 1, "gate: red, 1 problems, planned 2 != run 1 + refused 0 + waived 0"),
    (
        "retried",
        [*PAIR, PAIR[0]],
        0,
        "gate: green, 0 problems, planned 2 = run 2 + refused 0 + waived 0",
    ),
    ("empty", [], 1, "gate: red, 1 problems, planned 0 = run 0 + refused 0 + waived 0"),
]


@pytest.mark.parametrize(
    ("records", "code", "last"), [pytest.param(*row[1:], id=row[0]) for row in COMMANDS]
)
def test_command_ends_with_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], records: list[Record], code: int, last: str
) -> None:
    path = tmp_path / "records.jsonl"
    write_records(path, records)
    assert gate.main([str(path)]) == code
    assert capsys.readouterr().out.splitlines()[-1] == last


def test_broken_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "records.jsonl"
    write_records(path, PAIR)
    path.write_text(path.read_text()[:-20])
    assert gate.main([str(path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"gate: {path}:2: not a record")


def test_wrong_usage_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        gate.main([])
    told = "python -m ci.gate: the following arguments are required: RECORDS\n"
    assert capsys.readouterr().err == told
