"""A run passes the gate only if it is complete and every trial of it is green."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci import gate
from fixtures.fakes.sample_records import compared, trial
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
        "duplicate",
        [PAIR[0], PAIR[0]],
        "2 records of one trial: one trtllm_mha/reference decode eager cpu",
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
def test_trials_that_differ_in_one_name_are_no_duplicates(field: str) -> None:
    other = {"case": "one", "planned": 2} | {field: "other"}
    assert gate.problems([PAIR[0], trial(**other)]) == []  # type: ignore[arg-type]


def test_error_at_the_allowance_passes() -> None:
    assert gate.problems([trial("one", quantities=compared(0.5))]) == []


COMMANDS = [
    ("green", PAIR, 0, "gate: green, 0 problems, planned 2 = run 2 + refused 0 + waived 0"),
    ("red", PAIR[:1], 1, "gate: red, 1 problems, planned 2 != run 1 + refused 0 + waived 0"),
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
    assert gate.main([]) == 2
    assert capsys.readouterr().err == "usage: python -m ci.gate RECORDS...\n"
