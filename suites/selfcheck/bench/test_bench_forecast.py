"""A dry run says how many servers are launched at most, and for how long."""

from dataclasses import replace

import pytest

from fixtures.tables.margins import MARGINS, ROWS
from fixtures.tables.workloads import WORKLOADS
from harness.bench import bench_serving
from harness.bench.arms import parse
from harness.bench.forecast import (
    LAUNCH_S,
    PROGRAM_S,
    TOKEN_S,
    TRIAL_S,
    Forecast,
    duration,
    forecast,
)
from harness.bench.jsonl import read
from harness.bench.plan import Setup
from harness.bench.session_records import Role, Workload
from harness.bench.stats.design import Design
from suites.selfcheck.bench.test_bench_analysis import records

SETUP = Setup(
    a=parse("embedded:"),
    b=parse("embedded:slowdown=0.05"),
    workloads=(Workload(id="w", batch_size=2, input_len=8, output_len=10, requests=6),),
    margins=ROWS,
    roles=(Role.CANDIDATE,),
    seed="",
    design=Design.QUADS,
    warm_ups=2,
    passes=3,
    blocks_at_most=5,
)


def test_launches_and_trials_by_hand():
    cost = forecast(SETUP)
    # A block of ABBA launches four servers and makes a trial on each; the rehearsal one an arm.
    assert (cost.launches, cost.trials) == (5 * 4 + 2, 5 * 4 + 2)
    # Six requests, two at a time, of ten tokens; two warm-ups and three passes on every server.
    tokens = 22 * (2 + 3) * 3 * 10
    expected = 22 * LAUNCH_S + 22 * TRIAL_S + tokens * TOKEN_S["embedded"]
    assert cost.seconds == pytest.approx(expected)


def test_many_trials_share_a_launch_and_an_attached_server_has_none():
    cost = forecast(replace(SETUP, design=Design.THUE_MORSE, a=parse("url:http://h:1")))
    assert (cost.launches, cost.trials) == (5 + 1, 5 * 32 + 2)


def test_sessions_share_the_launches_of_their_reference():
    cost = forecast(replace(SETUP, design=Design.THUE_MORSE_8, roles=tuple(Role)))
    # Of each of five blocks one of A and three of B; the rehearsal one an arm.
    assert (cost.launches, cost.trials) == (5 * 4 + 2, 3 * 5 * 8 + 2)


def test_a_launch_that_a_longer_session_began_is_no_other_for_one_after_a_shorter():
    rows = (replace(MARGINS["tpot"], n_max=5), replace(MARGINS["ttft"], n_max=9))
    roles = (Role.CANDIDATE, Role.INJECTED, Role.SAME)
    unlike = replace(SETUP, margins=rows, roles=roles, blocks_at_most=None)
    cost = forecast(replace(unlike, design=Design.THUE_MORSE_8))
    # B is launched for 9, 5 and 9 blocks, A for the nine that all sessions share.
    said = "launches of the reference are as many as those of the longest session"
    assert cost.launches == 9 + (9 + 5 + 9) + 2, f"{said}: {cost.launches}"


def test_a_program_without_arguments_is_one_whose_requests_nobody_counts():
    cost = forecast(replace(SETUP, workloads=(bench_serving.workload(""),)))
    # Two warm-ups and three passes on each of 22 servers, each a start of the program.
    expected = 22 * (LAUNCH_S + TRIAL_S) + 22 * (2 + 3) * PROGRAM_S
    assert cost.seconds == pytest.approx(expected)


def test_without_a_limit_a_session_takes_what_its_margins_allow():
    cost = forecast(replace(SETUP, blocks_at_most=None, roles=(Role.SAME, Role.INJECTED)))
    most = MARGINS["tpot"].n_max
    assert most == MARGINS["step_time"].n_max == MARGINS["ttft"].n_max
    assert cost.launches == 2 * most * 4 + 2  # a metric that no trial measures allows 40


def test_of_a_resumed_run_what_is_left_counts(tmp_path):
    path = tmp_path / "bench.jsonl"
    plan, _ = records(path, blocks=2, role=Role.CANDIDATE, design=Design.QUADS)
    setup = replace(SETUP, workloads=plan.workloads, blocks_at_most=16)
    # Of sixteen blocks fourteen are left; the plan is there, so that nothing is rehearsed.
    assert forecast(setup, [*read(path)]).launches == 14 * 4
    assert forecast(setup, [*read(path)]).trials == 14 * 4
    (w,) = plan.workloads
    passes = 14 * 4 * (SETUP.warm_ups + plan.passes)
    tokens = passes * w.requests // w.batch_size * w.output_len
    expected = 14 * 4 * (LAUNCH_S + TRIAL_S) + tokens * TOKEN_S["embedded"]
    said = "of a run that is resumed the passes of its plan count, which the rehearsal chose"
    unsaid = replace(setup, passes=None)
    assert forecast(unsaid, [*read(path)]).seconds == pytest.approx(expected), said
    decided = tmp_path / "decided.jsonl"
    records(decided, blocks=16, role=Role.CANDIDATE, design=Design.QUADS)
    assert forecast(setup, [*read(decided)]) == Forecast(launches=0, trials=0, seconds=0.0)


def test_a_workload_without_an_open_case_costs_a_resumed_run_nothing(tmp_path):
    path = tmp_path / "bench.jsonl"
    rows = WORKLOADS["smoke-bs2-in32-out32"], *SETUP.workloads
    # Its one case is of the first workload.
    plan, _ = records(path, blocks=2, role=Role.CANDIDATE, design=Design.QUADS, workloads=rows)
    setup = replace(SETUP, workloads=plan.workloads, blocks_at_most=16)
    said = "fourteen blocks of four trials of the open workload are left, and none of the other"
    assert forecast(setup, [*read(path)]).trials == 14 * 4, said


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.2, "1 s"), (60.0, "1 min"), (61.0, "2 min"), (7260.0, "2 h 1 min")]
)
def test_a_duration_is_told_in_its_own_unit(seconds, said):
    assert duration(seconds) == said
