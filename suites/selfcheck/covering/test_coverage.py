"""Coverage counts what records say ran, and looks up whether one combination did, and when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fixtures.coverage import main
from fixtures.covering.arrays import load
from fixtures.covering.counted import count, trials_of
from fixtures.covering.feasible import Feasibility
from fixtures.covering.rows import case_of, values_of_trial
from fixtures.fakes.sample_records import trial
from fixtures.pytest_plugin.nested_runs import run_forked
from fixtures.tables import CASES
from fixtures.tables.axes import AXES, CPU, RULES, Rule
from harness.core.case import Execution
from harness.core.paths import ROOT
from harness.core.record import Record, Verdict, write_records

pytest_plugins = ["pytester"]
ROW = "mha-target_verify-with-page_128-width_16-batch_8-length_256-layout_shuffled"
EDGE = "mha-target_verify-width_8"
"""A named edge: pages of 32, three requests, 121 tokens at most."""
XQA = {"subject": "trtllm_mha/xqa", "mode": "target_verify", "execution": "graph"}
VALUES = {"page": 128, "width": 16, "batch": 8, "length": 256, "layout": "shuffled"}
CASE_OF = {
    EDGE: CASES[EDGE],
    ROW: case_of({"family": "mha", "mode": "target_verify", **VALUES}),
}


def ran(name: str, **changes: Any) -> Record:
    """The record of a trial of a case."""
    facts = XQA | changes
    kernel = facts["subject"].partition("/")[2]
    axes = values_of_trial(CASE_OF[name], kernel, Execution(facts["execution"]))
    return trial(name, **facts, axes=axes)


RECORDS = (
    ran(ROW, recorded="2026-11-22T07:30:00+00:00"),
    ran(ROW, verdict=Verdict.WRONG_NUMBERS, recorded="2026-11-23T07:30:00+00:00"),
    ran(EDGE, recorded="2026-11-21T07:30:00+00:00"),
    ran(EDGE, subject="trtllm_mha/trtllm_gen", verdict=Verdict.REFUSED),
    ran(EDGE, subject="trtllm_mha/flash_mla", verdict=Verdict.WAIVED),
    ran(EDGE, subject="trtllm_mha-context_kernel/xqa"),
    ran(EDGE, device="cuda:0"),
    trial("gqa/prompt0", **XQA),
)


@pytest.fixture
def path(tmp_path: Path) -> str:
    write_records(tmp_path / "records.jsonl", RECORDS)
    return str(tmp_path / "records.jsonl")


def test_a_combination_that_ran_is_shown_with_its_trials(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([path, "page=128", "width=16"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told == [
        "page=128 width=16: run by 2 trials",
        f"  2026-11-23T07:30:00+00:00 wrong_numbers {ROW} trtllm_mha/xqa graph",
        f"  2026-11-22T07:30:00+00:00 passed {ROW} trtllm_mha/xqa graph",
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["width=8", "batch=2", "length=64"], "width=8 batch=2 length=64: run by 1 trials"),
        (["kernel=trtllm_gen"], "kernel=trtllm_gen: not run; feasible"),
        (["page=16"], "page=16: not run; feasible"),
        (["mode=extend", "execution=graph"], "not run; not feasible: extend has no graph"),
        (["--machine", "sm90", "page=128"], "page=128: not run; feasible"),
        (["--machine", "sm90", "width=8"], "width=8: run by 1 trials"),
    ],
    ids=lambda words: "-".join(words) if isinstance(words, list) else "",
)
def test_a_look_up_counts_what_ran_there_on_our_backends(
    path: str, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main([path, *words])
    line, *trials = capsys.readouterr().out.splitlines()
    for verdict in (Verdict.WAIVED, Verdict.REFUSED):
        unverified = [shown for shown in trials if f" {verdict} " in shown]
        assert not unverified, f"coverage counts no {verdict} trial as run: it verified nothing"
    assert line.endswith(told)
    assert code == ("not run" in told)


@pytest.mark.parametrize(("machine", "ran_there"), [("sm90", EDGE), ("sm100", ROW), ("cpu", "")])
def test_a_gpu_of_another_kind_ran_nothing_for_this_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], machine: str, ran_there: str
) -> None:
    path = tmp_path / "records.jsonl"
    of_each = [ran(EDGE, device="cuda:0", kind="sm90"), ran(ROW, device="cuda:1", kind="sm100")]
    write_records(path, of_each)
    for name, width in ((EDGE, 8), (ROW, 16)):
        code = main([str(path), "--machine", machine, f"width={width}"])
        told = f"{name} ran on its own kind alone, which is asked for {machine}"
        assert code == int(name != ran_there), f"{told}: {capsys.readouterr().out}"


@pytest.mark.parametrize(("machine", "ran_there"), [("cpu", True), ("sm90", False)])
def test_what_a_gpu_s_plan_runs_on_the_cpu_counts_for_the_cpu(
    tmp_path: Path, machine: str, ran_there: bool
) -> None:
    path = tmp_path / "records.jsonl"
    write_records(path, [ran(EDGE, device="cpu", kind="sm90")])
    code = main([str(path), "--machine", machine, "width=8"])
    said = "a trial of sm90's plan that ran on the CPU is one of the CPU and of no GPU"
    assert code == int(not ran_there), f"{said}, and not otherwise of {machine}"


def test_pairs_are_counted_as_run_missed_or_not_feasible(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # Two rows of 18 values share all but page, width, batch, length and padding: 153 + 153 pairs,
    # less the 78 of the other thirteen.
    values = [row for _, row in trials_of(RECORDS, CPU)]
    shared = values[0].items() & values[-1].items()
    assert len(values) == 3
    assert len(shared) == 13
    counted = count(Feasibility(CPU), values, 2)
    assert counted.run == 153 + 153 - 78
    assert main([path]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == f"pairs: {counted.run} of {counted.feasible} feasible ones ran"
    assert told[11] == f"  … and {len(counted.missed) - 10} more"


def test_rows_of_the_array_cover_all_pairs_and_less_one_of_them_do_not() -> None:
    kept = load(CPU, 2)
    records = [_record(row) for row in kept]
    rows = [values for _, values in trials_of(records, CPU)]
    assert count(Feasibility(CPU), rows, 2).missed == ()
    left_out = count(Feasibility(CPU), rows[1:], 2).missed
    assert left_out
    assert all((axis, kept[0][axis]) in kept[0].items() for pair in left_out for axis, _ in pair)


def test_a_row_that_a_newer_rule_forbids_makes_nothing_feasible() -> None:
    said = "the array is older than this rule"
    rule = Rule(("page", "width"), lambda page, width: (page, width) != (128, 16), said)
    older = [row for row in load(CPU, 2) if (row["page"], row["width"]) == (128, 16)]
    assert older, "an array of all pairs has this one"
    found = count(Feasibility(CPU, rules=(*RULES, rule)), older, 2)
    assert found.infeasible[said] == 1, (
        "a pair that is forbidden now counts neither as run nor missed"
    )


def _record(row: dict[str, str | int]) -> Record:
    case = case_of(row)
    subject = f"trtllm_{case.family}/{row['kernel']}"
    facts = {"family": str(case.family), "mode": str(case.mode), "axes": row}
    return trial(case.id, subject=subject, execution=str(row["execution"]), **facts)


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["pge=128"], f"axis = 'pge' is not accepted; accepted: {', '.join(AXES)}"),
        (["page=17"], "page = '17' is not accepted; accepted: 64, 16, 32, 128"),
        (["nowhere.jsonl"], "records = 'nowhere.jsonl' is not accepted"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert cause in told


def test_a_run_leaves_records_that_can_be_looked_up(
    pytester: pytest.Pytester, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(ROOT / "suites/differential/test_cases.py"), "-q", "-n0", "-p", "no:cacheprovider"]
    words += ["-k", "mha-decode-bs2_ragged-trtllm_mha/xqa-graph", "--report", str(pytester.path)]
    assert run_forked(pytester, "-c", str(ROOT / "pyproject.toml"), *words).ret == 0
    records = str(pytester.path / "records.jsonl")
    row = CASES["mha-decode-bs2_ragged"]
    wanted = f"page={row.page_size} batch={row.bs} kernel=xqa execution=graph".split()
    assert main([records, *wanted]) == 0
    assert main([records, *wanted[:-1], "execution=eager"]) == 1
