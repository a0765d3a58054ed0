"""Runs of one benchmark on several hosts are put side by side; the worst of them is the result."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.tables.workloads import WORKLOADS
from harness.bench import __main__ as compare
from harness.bench.replication import agree, host_run, side_by_side
from harness.bench.session_records import ArmFacts, Role
from harness.bench.stats.design import Design
from harness.core.environment import environment
from suites.selfcheck.bench.test_bench_analysis import judged, records

OTHER = replace(environment(), device="another GPU")


def hosts(tmp_path, first, second):
    """Records of a session on two hosts."""
    paths = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for path, given in zip(paths, (first, {"environment": OTHER} | second), strict=True):
        records(path, **{"role": Role.CANDIDATE, "blocks": 2} | given)
    return [str(path) for path in paths]


def controlled(tmp_path, *ratios):
    """Records of candidates on hosts whose controls are as they should be."""
    paths = [tmp_path / f"{number}.jsonl" for number, _ in enumerate(ratios)]
    for path, ratio in zip(paths, ratios, strict=True):
        text, part = "", tmp_path / "part"
        for role, slower in ((Role.CANDIDATE, ratio), (Role.SAME, 1.0), (Role.INJECTED, 1.05)):
            records(part, ratio=slower, role=role, started=path.name)
            text += part.read_text().replace('"s"', f'"{role}"')
            part.unlink()
        path.write_text(text)
    return [str(path) for path in paths]


@pytest.mark.parametrize(
    ("ratios", "code"),
    [((1.0, 1.0), 0), ((1.05, 1.0), 1), ((1.0, 1.05), 1), ((0.95, 1.0), 0), ((1.0, 1.0, 1.05), 1)],
)
def test_the_worst_host_is_the_result(tmp_path, capsys, ratios, code):
    ended = compare.main(controlled(tmp_path, *ratios))
    rule = "compare ends with 1 if any host, first or last, regressed, else with 0"
    assert ended == code, f"{rule}: hosts at {ratios} of A with {code}, not {ended}"
    verdicts = [line for line in capsys.readouterr().out.splitlines() if line[:8] == "verdict:"]
    said = {1.0: "ok", 1.05: "regressed", 0.95: "improved"}
    due = [f"verdict: {said[ratio]}" for ratio in ratios]
    assert verdicts == due, f"each host has its own verdict, {due}, not {verdicts}"


def test_effects_and_intervals_stand_side_by_side(tmp_path, capsys):
    same = {"blocks": 16}
    paths = hosts(tmp_path, {"ratio": 0.735} | same, {"ratio": 0.691} | same)
    compare.main(paths)
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    place = said.index("hosts, smoke-bs2-in32-out32")
    assert said[place + 1] == "metric 1: B / A 95 % 2: B / A 95 % agree"
    row = r"tpot -26.5 % -26\.\d to -26\.\d % -30.9 % -3[01]\.\d to -30\.\d % no"
    assert re.fullmatch(row, said[place + 2])
    assert said[place + 3 :] == ["hosts disagree: smoke-bs2-in32-out32 tpot"]


def test_intervals_that_overlap_agree_and_those_without_a_bound_say_nothing(tmp_path):
    records(tmp_path / "bench.jsonl", role=Role.CANDIDATE)
    evidence = judged(tmp_path / "bench.jsonl").evidence

    def bounded(*bounds):
        return agree([replace(evidence, low=low, high=high) for low, high in bounds])

    rule = "hosts agree whose intervals have a ratio in common, if only a bound"
    assert bounded((0.70, 0.74), (0.73, 0.80)) is True, rule
    assert bounded((0.70, 0.74), (0.74, 0.80)) is True, rule
    apart = "hosts whose intervals have no ratio in common disagree"
    assert bounded((0.70, 0.74), (0.75, 0.80)) is False, apart
    assert bounded((0.75, 0.80), (0.70, 0.74)) is False, apart
    # The first and the last have nothing in common.
    assert bounded((0.70, 0.74), (0.73, 0.80), (0.76, 0.90)) is False, apart
    boundless = "an interval without any bound neither agrees nor disagrees"
    assert bounded((0.70, 0.74), (0.0, float("inf"))) is None, boundless
    assert bounded((0.70, 0.74), (0.72, float("inf"))) is True, rule


ROW = WORKLOADS["smoke-bs2-in32-out32"]


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"a": ArmFacts(name="old")}, "arm A of session s = ('old', {}, 0.0)"),
        ({"b": ArmFacts(name="b", versions={"sglang": "0.5.14"})}, "arm B of session s = ('b', {'"),
        ({"b": ArmFacts(name="b", slowdown=0.02)}, "arm B of session s = ('b', {}, 0.02)"),
        ({"design": Design.QUADS}, "design of session s = 'quads'"),
        ({"workloads": (replace(ROW, output_len=33),)}, "workloads of session s = ("),
    ],
)
def test_runs_that_asked_something_else_are_refused(tmp_path, capsys, changed, what):
    paths = hosts(tmp_path, {}, changed)
    assert compare.main(paths) == 2
    said, told = capsys.readouterr()
    assert said == ""
    assert told.startswith(f"specgate compare: {paths[1]}: {what}")
    assert f", as in {paths[0]}" in told


def test_other_sessions_are_refused(tmp_path, capsys):
    paths = hosts(tmp_path, {}, {"id": "t", "blocks": 0})
    assert compare.main(paths) == 2
    told = capsys.readouterr().err
    assert "sessions = ['t'] is not accepted; accepted: ['s'], as in" in told


def test_a_run_is_no_repetition_of_itself(tmp_path, capsys):
    paths = hosts(tmp_path, {}, {})
    assert compare.main([*paths, paths[1]]) == 2
    told = capsys.readouterr().err
    assert f"records = {paths[1]!r} is not accepted; accepted: those of another run" in told


def test_what_only_one_host_judged_is_not_put_side_by_side(tmp_path):
    one, two = map(host_run, map(Path, controlled(tmp_path, 1.0, 1.05)))
    rows = [table.row_count for table in side_by_side([one, two]).renderables]
    assert rows == [1]
    less = replace(two, run=replace(two.run, findings=()))
    assert not side_by_side([one, less]).renderables


def test_three_hosts_stand_side_by_side_and_each_must_have_judged(tmp_path):
    runs = [*map(host_run, map(Path, controlled(tmp_path, 1.0, 1.05, 1.02)))]
    table, *_ = side_by_side(runs).renderables
    numbers = [f"{number}: B / A" for number in (1, 2, 3)]
    shown = {column.header: [*column.cells] for column in table.columns}
    effects = [shown[number] for number in numbers]
    said = "each host's effect stands in its own column: +0.0 %, +5.0 %, +2.0 %"
    assert effects == [["+0.0 %"], ["+5.0 %"], ["+2.0 %"]], f"{said}, not {effects}"
    runs[1] = replace(runs[1], run=replace(runs[1].run, findings=()))
    said = "a metric that a host in the middle did not judge is left out of the comparison"
    try:
        tables = side_by_side(runs).renderables
    except KeyError as error:
        pytest.fail(f"{said}, not looked up: {error}")
    assert not tables, said


def test_interpreters_folders_seeds_and_passes_may_differ(tmp_path):
    first = {"a": ArmFacts(name="a", command=("/here/python",))}
    second = {"a": ArmFacts(name="a", command=("/there/python",)), "seed": "7", "blocks": 0}
    second["passes"] = 2
    assert compare.main(hosts(tmp_path, first, second)) != 2
