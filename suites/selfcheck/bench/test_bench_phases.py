"""Phases of a step are measured as differences, told beside its time, and gate nothing."""

import math
from dataclasses import replace

import pytest
from rich.console import Console

from ci.bench.bench_report import BenchReport
from ci.bench.page import page
from fixtures import bench
from fixtures.fakes.synthetic_bench import WORKLOADS, run_lines
from fixtures.tables.margins import PHASE_ROWS, REAL_SIZE_ROWS
from harness.bench import arms, plan
from harness.bench.analysis import dropped, findings, verdict, visible
from harness.bench.analysis_phases import largest, moved
from harness.bench.arms import parse
from harness.bench.block_runner import open_sessions
from harness.bench.console import conclude
from harness.bench.measure import TrialMaker, TrialSlot
from harness.bench.metrics import phase_metrics
from harness.bench.plan import sessions
from harness.bench.session_records import CasePlan, Role, Session
from harness.bench.stats.bench_verdict import BenchVerdict
from harness.bench.stats.design import Block
from harness.core.environment import environment
from harness.errors import UsageError
from harness.server.client.flush import Flushed
from suites.selfcheck.bench.test_bench_measure import LOOP, PROMPTS, Server
from suites.selfcheck.bench.test_bench_measure import Client as Streams

LEVELS = {"phase_draft": 800.0, "phase_draft_extend": 400.0, "phase_metadata": 9.0}
"""Microseconds."""
ROWS = {row.metric: row for row in PHASE_ROWS}
ONE = WORKLOADS[:1]


def with_phases(lines, moved):
    """Lines whose trials have phases, too; of (session, metric) arm B differs by so many µs."""
    roles = {}
    for line in lines:
        if isinstance(line, Session):
            roles[line.id] = line.role
            cases = tuple(part(metric) for metric in LEVELS) if has_parts(line.role) else ()
            yield replace(line, cases=(*line.cases, *cases))
        else:
            side = "AB".index(line.arm)
            found = {
                metric: level + side * moved.get((str(roles[line.session]), metric), 0.0)
                for metric, level in LEVELS.items()
            }
            # Noise that hides any effect in a phase of a few µs.
            found["phase_metadata"] *= 2.0 if (line.block + side) % 2 else 1.0
            yield replace(line, metrics=line.metrics | found)


def has_parts(role):
    return plan.has_metric(role, ROWS["phase_draft"])


def part(metric):
    bounds = ROWS[metric].bounds(LEVELS[metric], 16)
    return CasePlan(workload=ONE[0].id, metric=metric, bounds=bounds, calibrated=0.003, unit="us")


def judged(moved, **effects):
    times = {name: math.log(ratio) for name, ratio in effects.items()}
    lines = run_lines(times, workloads=ONE, noise=1e-6)
    run = verdict(findings(with_phases(lines, moved)))
    return run, {f.metric: f for f in run.findings if f.role is Role.CANDIDATE}


def test_a_trial_tells_what_its_passes_add_to_every_phase_by_verify_steps():
    before = {"draft": (900.0, 3), "verify": (5_000.0, 4), "prefill": (7.0, 1)}
    after = {
        "draft": (1_020.0, 9),
        "verify": (6_500.0, 10),
        "prefill": (7.0, 1),
        "metadata": (33.0, 12),
    }
    # Six verify steps; drafts and plans are counted otherwise.
    assert phase_metrics(before, after) == {
        "phase_draft": 20.0,
        "phase_verify": 250.0,
        "phase_metadata": 5.5,
    }
    assert phase_metrics(after, after) == {}
    assert phase_metrics({}, {}) == {}


@pytest.mark.parametrize("spec", ["sglang:phases=on", "sglang:"])
def test_phases_are_read_after_the_warm_up_and_after_the_passes(spec):
    log, told = [], iter([{"verify": (700.0, 7)}, {"verify": (1_000.0, 11)}])

    class Client(Streams):
        def phases(self):
            log.append(("phases",))
            return next(told)

    made = TrialMaker(
        prompts=lambda _: PROMPTS,
        connect=lambda _: Client(log),
        empty=lambda _: Flushed(tries=1, seconds=0.0),
        warm_ups=1,
        passes=2,
    )
    slot = TrialSlot(session="candidate", block=0, place=0, arm="A")
    trial = made.run(slot, parse(spec), Server(), LOOP)
    words = [entry[0] for entry in log]
    if spec == "sglang:":
        assert words == ["sent"] * 18
        assert not [name for name in trial.metrics if name.startswith("phase")]
    else:
        assert words == ["sent"] * 6 + ["phases"] + ["sent"] * 12 + ["phases"]
        assert trial.metrics["phase_verify"] == 75.0


def test_a_server_that_should_tell_phases_and_does_not_is_invalid():
    class Client(Streams):
        def phases(self):
            return {}

    made = TrialMaker(prompts=lambda _: PROMPTS, connect=lambda _: Client([]), warm_ups=1, passes=1)
    slot = TrialSlot(session="candidate", block=0, place=0, arm="A")
    trial = made.run(slot, parse("sglang:phases=on"), Server(), LOOP)
    assert trial.metrics == {}
    assert trial.invalid == (
        "ContractError: phases=on, but the server tells none: has it our plugin?",
    )


def test_phases_are_switched_on_by_an_option_alone(monkeypatch):
    monkeypatch.setenv("SPECGATE_PHASES", "1")
    switched = [parse(spec, bench.PAIRS)._launch().env for spec in ("sglang:phases=on", "sglang:")]
    assert [env["SPECGATE_PHASES"] for env in switched] == ["1", "0"]
    with pytest.raises(UsageError, match="'phases=off' is not accepted; accepted: phases=on"):
        parse("sglang:phases=off")
    with pytest.raises(UsageError, match="option of embedded"):
        parse("embedded:phases=on")


@pytest.mark.parametrize(("b", "count"), [("sglang:pair=gqa,phases=on", 6), ("sglang:pair=gqa", 0)])
def test_phases_are_judged_where_both_arms_tell_them(b, count):
    words = ["--a", "sglang:pair=gqa,phases=on", "--b", b]
    asked = bench.setup(bench.parser().parse_args(words))
    assert sum(margin.is_part for margin in asked.margins) == count


def test_a_part_makes_no_threshold_higher(monkeypatch):
    monkeypatch.setattr(arms, "_version", lambda python, package: "9")
    spec = "sglang:pair=gqa,phases=on"
    asked = bench.setup(bench.parser().parse_args(["--a", spec, "--b", spec]))
    asked = replace(asked, margins=(*REAL_SIZE_ROWS, *PHASE_ROWS))
    names = ["step_time", *LEVELS]
    levels = {(w.id, metric): 100.0 for w in asked.workloads for metric in names}
    made = sessions(asked, levels, environment())
    only = {key: value for key, value in levels.items() if key[1] == "step_time"}
    due = sessions(asked, only, environment())
    assert [s.thresholds for s in made] == [s.thresholds for s in due]
    assert {case.metric for case in made[0].cases} == set(names)


def test_the_verdict_names_the_phase():
    moved = {("candidate", "phase_draft"): -20.0, ("candidate", "phase_draft_extend"): 560.0}
    run, found = judged(moved, step_time=1.05)
    step = found["step_time"]
    assert (run.verdict, step.verdict) == (BenchVerdict.REGRESSED, BenchVerdict.REGRESSED)
    assert step.reasons[-1] == "draft extend +560.0 µs of +600.0 µs"
    assert step.evidence.reasons == step.reasons
    assert found["phase_draft_extend"].verdict is BenchVerdict.REGRESSED
    assert found["phase_draft"].reasons == ("-20.0 µs",)
    assert found["tpot"].reasons == ()


def test_an_improvement_is_named_by_what_became_faster():
    moved = {("candidate", "phase_draft"): -500.0, ("candidate", "phase_draft_extend"): 560.0}
    _, found = judged(moved, step_time=0.95)
    assert found["step_time"].reasons[-1] == "draft -500.0 µs of -600.0 µs"


@pytest.mark.parametrize("turn", [1, -1], ids=["first", "last"])
def test_the_phase_of_another_session_or_workload_is_not_named(turn):
    moved = {("candidate", "phase_draft_extend"): 560.0, ("A/A", "phase_draft"): 590.0}
    lines = run_lines({"step_time": math.log(1.05)}, workloads=ONE, noise=1e-6)
    found = findings(with_phases(lines, moved), detectable_too=False)
    of_same, of_candidate = (
        next(f for f in found if f.role is role and f.metric == "phase_draft")
        for role in (Role.SAME, Role.CANDIDATE)
    )
    elsewhere = replace(of_candidate, workload=WORKLOADS[1], blocks=of_same.blocks)
    run = verdict([elsewhere, *found][::turn])
    [step] = [f for f in run.findings if f.role is Role.CANDIDATE and f.metric == "step_time"]
    said = "a step is told the phase that moved in its own session and workload"
    assert step.reasons[-1] == "draft extend +560.0 µs of +600.0 µs", f"{said}: {step.reasons}"


def test_a_step_that_did_not_move_has_no_phase_to_name_and_parts_gate_nothing():
    moved = {("candidate", "phase_draft_extend"): 560.0, ("A/A", "phase_draft"): 300.0}
    run, found = judged(moved)
    assert found["phase_draft_extend"].verdict is BenchVerdict.REGRESSED
    aa = next(f for f in run.findings if f.role is Role.SAME and f.metric == "phase_draft")
    assert aa.verdict is BenchVerdict.REGRESSED
    assert found["step_time"].reasons == ()
    assert (run.verdict, run.reasons) == (BenchVerdict.OK, ())


def test_a_phase_that_noise_hides_makes_no_run_blind():
    run, found = judged({})
    noisy = found["phase_metadata"]
    assert noisy.mde > noisy.case.bounds.delta1
    assert noisy.verdict is not BenchVerdict.BLIND
    assert run.verdict is BenchVerdict.OK
    assert "phase" not in visible(run.findings)


def test_a_phase_that_some_trials_lack_drops_no_block_of_its_workload():
    lines = []
    for line in with_phases(run_lines(workloads=ONE, noise=1e-6), {}):
        if not isinstance(line, Session) and line.arm == "B" and line.block in (1, 3):
            told = {k: v for k, v in line.metrics.items() if k != "phase_draft"}
            line = replace(line, metrics=told)
        lines.append(line)
    found = findings(lines, detectable_too=False)
    assert max(f.evidence.dropped for f in found if f.metric == "phase_draft") == 2
    assert dropped(found) == [], (
        "blocks are told as dropped where a metric with a verdict lost them"
    )


def test_no_session_goes_on_for_a_phase():
    lines = list(with_phases(run_lines(workloads=ONE, noise=1e-6), {}))
    found = findings(lines)
    plans = [line for line in lines if isinstance(line, Session)]
    noisy = [f for f in found if f.metric == "phase_metadata"]
    assert not any(f.evidence.over for f in noisy)
    assert open_sessions(plans, found) == []


def test_a_block_that_was_dropped_moves_no_phase():
    def block(index, arm_a, arm_b, *why):
        return Block(index=index, order="BA", values=(arm_b, arm_a), invalid=why)

    throttled = block(1, 800.0, 1400.0, "throttled: thermal")
    seen = [block(0, 800.0, 810.0), throttled, block(2, 500.0, 512.0)]
    # Walsh averages of 10 and 12: 10, 11, 12.
    assert moved(seen, "us") == pytest.approx(11.0), "a dropped block counts nowhere"
    assert moved([throttled], "us") == 0.0


def test_a_block_with_a_spike_moves_a_phase_little():
    pairs = [(800.0, 810.0), (500.0, 512.0), (700.0, 714.0), (600.0, 700.0)]
    blocks = [Block(index=index, order="AB", values=values) for index, values in enumerate(pairs)]
    # Walsh averages of 10, 12, 14 and 100: 10, 11, 12, 12, 13, 14, 55, 56, 57, 100.
    said = "a phase moved by the median of the means of all pairs of blocks"
    assert moved(blocks, "us") == pytest.approx(13.5), said
    assert moved(blocks, "ms") == pytest.approx(13_500.0), said


def test_no_phase_is_named_where_none_moved_with_the_step():
    assert largest(14.1, {"phase_draft": -3.0}) == ""
    assert largest(14.1, {}) == ""
    named = largest(14.1, {"phase_draft_extend": 13.0, "phase_verify": -40.0, "phase_draft": 2.0})
    assert named == "draft extend +13.0 µs of +14.1 µs"


def test_a_run_says_where_its_time_went(capsys):
    moved = {("candidate", "phase_draft_extend"): 560.0}
    run, _ = judged(moved, step_time=1.05)
    Console(width=100).print(conclude(run.findings, run.reasons, run.verdict))
    lines = capsys.readouterr().out.splitlines()
    place = "candidate/bs1-in64-out32"
    assert f"{place}/step_time: draft extend +560.0 µs of +600.0 µs" in lines
    assert f"{place}/phase_draft_extend: +560.0 µs" in lines
    assert f"{place}/phase_draft: +0.0 µs" in lines
    assert not [line for line in lines if line.startswith("A/A/")]


def test_a_report_shows_parts_and_no_file_of_a_gate_does():
    lines = run_lines({"step_time": math.log(1.05)}, workloads=ONE, noise=1e-6)
    report = BenchReport.of(with_phases(lines, {("candidate", "phase_draft"): 590.0}))
    assert not [row for row in report.cases if row.metric in LEVELS]
    assert report.counts["regressed"] == 1
    shown = page(report, {})
    assert "bs1-in64-out32/<wbr>phase_draft" in shown
    assert "draft +590.0 µs of +600.0 µs" in shown
