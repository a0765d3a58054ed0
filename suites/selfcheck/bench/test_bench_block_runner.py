"""Blocks have drawn orders, stop early, survive interruptions, and show an injected slowdown."""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.console import Console

from fixtures.fakes.synthetic_bench import run_lines
from fixtures.tables.margins import ROWS
from harness.bench import block_runner
from harness.bench.analysis import findings, verdict
from harness.bench.arms import parse
from harness.bench.block_runner import open_sessions
from harness.bench.jsonl import read
from harness.bench.plan import Setup, scales
from harness.bench.session import BenchRun
from harness.bench.session_records import Role, Session, Trial, Workload
from harness.bench.stats.bench_verdict import BenchVerdict
from harness.bench.stats.design import Design, draw_order
from harness.bench.stats.estimates import spread
from harness.bench.stats.validity import Conditions
from harness.core.environment import environment
from harness.errors import ContractError, ServerError, UsageError

SMALL = Workload(id="small", batch_size=1, input_len=8, output_len=8, requests=2)
LARGE = Workload(id="large", batch_size=2, input_len=64, output_len=8, requests=4)
URL = "url:http://127.0.0.1:9"


class FakeServer:
    def __init__(self, lab, log, arm):
        self.url, self.pid, self._lab, self.arm = f"http://{log.stem}", None, lab, arm
        self.patience_s = 300.0
        lab.events.append(("start", arm))
        lab.up.add(self)

    def wait_ready(self):
        if self._lab.dead:
            raise ServerError("the server is dead")
        return 0.0

    def stop(self):
        self._lab.up.discard(self)


class Lab:
    """Arms whose trials take what we say: a level a launch, noise of 1 %, drift, and no time."""

    def __init__(self, monkeypatch, *, slower=0.0, injected=0.05, metrics=("step_time", "tpot")):
        self.slower, self.injected, self.metrics = slower, injected, metrics
        self.events, self.up, self.most_up, self.dead = [], set(), 0, False
        self.trials, self.stop_after, self.load = 0, 10**9, 0.1
        self.load_of = {}
        monkeypatch.setattr(
            "harness.bench.arms.Arm.start", lambda arm, log: FakeServer(self, log, arm)
        )

    def measure(self, slot, arm, server, workload):
        assert server in self.up
        self.most_up = max(self.most_up, len(self.up))
        self.events.append(("measure", slot, workload.id))
        if slot.session != "rehearsal":
            self.trials += 1
        if self.trials > self.stop_after:
            raise KeyboardInterrupt
        noise = random.Random(f"{slot}{workload.id}").gauss(0.0, 0.01)
        extra = (self.injected if arm.slowdown else 0.0) + (
            self.slower if arm.url[-1] == "8" else 0
        )
        time = 10.0 * (1 + extra) * (1 + noise) * (1 + 0.002 * self.trials)
        values = {"output_throughput": 1e3 / time, "accept_length": 2.0, "itl": 1.0}
        wrong = ("dead",) if self.dead else ()
        return Trial(
            **vars(slot),
            workload=workload.id,
            metrics={} if wrong else values | dict.fromkeys(self.metrics, time),
            samples=(),
            conditions=Conditions(
                load=self.load_of.get(slot.block, self.load), failed=0, output_tokens=16
            ),
            flush_tries=1,
            flush_seconds=0.0,
            invalid=wrong,
            started="",
            seconds=0.0,
        )

    def run(self, out: Path, *, resume=False, **changed):
        asked = {
            "a": parse(URL),
            "b": parse("url:http://127.0.0.1:8"),
            "workloads": (SMALL,),
            "margins": ROWS,
            "roles": tuple(Role),
            "seed": "x",
            "design": Design.PAIRS,
        }
        how = {k: changed.pop(k) for k in ("seconds", "side_by_side") if k in changed}
        return BenchRun(
            setup=Setup(**asked | changed),
            out=out,
            measure=lambda passes: self.measure,
            environment=environment,
            console=Console(quiet=True),
            resume=resume,
            **how,
        ).run()


@pytest.mark.parametrize(("asked", "most"), [(None, 16), (3, 3), (40, 40)])
def test_so_many_blocks_as_asked_for_or_else_as_the_margin_says(tmp_path, monkeypatch, asked, most):
    out = tmp_path / "bench.jsonl"
    Lab(monkeypatch).run(out, roles=(Role.SAME,), blocks_at_most=asked)
    (session,) = (line for line in read(out) if isinstance(line, Session))
    found = {case.bounds.n_max for case in session.cases}
    told = "n_max of a case is the number of blocks asked for, else that of its margin"
    assert found == {most}, f"{told}: {most}, not {found}"


def verdicts(found, role):
    return {f.metric: f.verdict for f in found if f.role is role}


def test_equal_arms_are_ok_and_the_injected_slowdown_is_found(tmp_path, monkeypatch):
    found = Lab(monkeypatch).run(tmp_path / "bench.jsonl")
    assert set(verdicts(found, Role.CANDIDATE).values()) == {BenchVerdict.OK}
    assert set(verdicts(found, Role.SAME)) == {
        "step_time", "tpot", "output_throughput", "accept_length"
    }  # fmt: skip
    assert verdicts(found, Role.INJECTED) == dict.fromkeys(
        ("step_time", "tpot"), BenchVerdict.REGRESSED
    )
    run = verdict(found)
    assert (run.verdict, run.reasons) == (BenchVerdict.OK, ())
    assert all(f.mde and 0.01 < f.mde < 0.06 for f in found if f.metric == "tpot")
    assert findings(read(tmp_path / "bench.jsonl")) == found
    # Four cases: 80 would do, none asks for less than 100; A/A pays for two directions and 1 %.
    asked = {f.role: f.session.thresholds.reject_null for f in found}
    assert asked == pytest.approx({Role.CANDIDATE: 100, Role.SAME: 800, Role.INJECTED: 100})
    equal = [f for f in found if f.role is Role.SAME]
    calibrated = {("small", f.metric): spread(f.effects) for f in equal}
    said = "noise is calibrated by equal arms (A/A) alone, not by the injected slowdown"
    assert scales(found) == calibrated, said


def test_a_slower_candidate_is_rejected_for_time_and_throughput_alone(tmp_path, monkeypatch):
    found = Lab(monkeypatch, slower=0.06).run(tmp_path / "bench.jsonl")
    run = verdict(found)
    assert run.verdict is BenchVerdict.REGRESSED
    assert verdicts(run.findings, Role.CANDIDATE) == {
        "step_time": BenchVerdict.REGRESSED,
        "tpot": BenchVerdict.REGRESSED,
        "output_throughput": BenchVerdict.REGRESSED,
        "accept_length": BenchVerdict.OK,
    }
    throughput = next(f for f in found if f.metric == "output_throughput")
    assert throughput.evidence.ratio == pytest.approx(1 / 1.06, abs=0.01)


@pytest.mark.parametrize(
    ("lab", "roles", "why"),
    [
        ({"injected": 0.0}, tuple(Role), "control injected slowdown: ok instead of regressed"),
        ({}, (Role.CANDIDATE, Role.INJECTED), "control A/A: missing"),
        ({}, (Role.CANDIDATE, Role.SAME), "control injected slowdown: missing"),
    ],
)
def test_a_run_without_working_controls_is_invalid(tmp_path, monkeypatch, lab, roles, why):
    run = verdict(Lab(monkeypatch, **lab).run(tmp_path / "bench.jsonl", roles=roles))
    assert run.verdict is BenchVerdict.INVALID
    assert any(why in reason for reason in run.reasons)
    candidates = [f for f in run.findings if f.role is Role.CANDIDATE]
    assert {f.verdict for f in candidates} == {BenchVerdict.INVALID}


def test_a_rejected_a_a_session_makes_the_run_invalid(tmp_path, monkeypatch):
    found = Lab(monkeypatch).run(tmp_path / "bench.jsonl")
    rejected = [
        f.with_evidence(replace(f.evidence, verdict=BenchVerdict.IMPROVED))
        if f.role is Role.SAME and f.metric == "tpot"
        else f
        for f in found
    ]
    run = verdict(rejected)
    assert run.verdict is BenchVerdict.INVALID
    assert "control A/A: improved instead of ok or inconclusive" in run.reasons


@pytest.mark.parametrize("design", Design)
def test_blocks_have_the_drawn_orders_and_servers_run_side_by_side(tmp_path, monkeypatch, design):
    lab = Lab(monkeypatch)
    lab.run(
        tmp_path / "bench.jsonl",
        design=design,
        workloads=(SMALL, LARGE),
        blocks_at_most=3,
        side_by_side=2 * design.servers(3),
    )
    lines = list(read(tmp_path / "bench.jsonl"))
    # Two blocks of each of three sessions.
    said = "sessions share the server of arm A alone, where their design has one launch per arm"
    assert lab.most_up == 2 * design.servers(3), said
    assert not lab.up
    for session in (line for line in lines if isinstance(line, Session)):
        for workload in ("small", "large"):
            mine = [t for t in lines if isinstance(t, Trial) and t.session == session.id]
            letters = "".join(t.arm for t in mine if t.workload == workload)
            assert letters == "".join(draw_order(session.seed, i, design) for i in range(3))
    seeds = {line.seed for line in lines if isinstance(line, Session)}
    assert len(seeds) == 3


def test_sessions_share_the_launches_of_their_reference(tmp_path, monkeypatch):
    """A wave of three sessions is four servers: one of A, and each session's B."""
    lab = Lab(monkeypatch)
    lab.run(
        tmp_path / "bench.jsonl",
        design=Design.THUE_MORSE_8,
        workloads=(SMALL, LARGE),
        blocks_at_most=2,
        side_by_side=4,
    )
    said = "sessions share the server of arm A alone: B is never measured on A's server"
    assert lab.most_up == 4, said
    started = [event for event in lab.events if event[0] == "start"]
    assert len(started) == 2 + 2 * 4  # the rehearsal's, then two waves
    trials = [line for line in read(tmp_path / "bench.jsonl") if isinstance(line, Trial)]
    launches = {(t.session, t.block, t.arm): t.launch for t in trials}
    for block in range(2):
        of_a = {launches[role.value, block, "A"] for role in Role}
        of_b = [launches[role.value, block, "B"] for role in Role]
        assert of_a == {f"candidate-{block}-A"}
        assert of_b == [f"{role.name.lower()}-{block}-B" for role in Role]


def test_sessions_share_a_reference_whichever_blocks_they_are_at(tmp_path, monkeypatch):
    """The candidate's first block was measured alone, so that its next one is block 1."""
    out, lab = tmp_path / "bench.jsonl", Lab(monkeypatch)
    asked = {"design": Design.THUE_MORSE_8, "blocks_at_most": 2, "side_by_side": 4}
    lab.stop_after = 8
    with pytest.raises(KeyboardInterrupt):
        lab.run(out, **asked)
    lab.stop_after, before = 10**9, len(lab.events)
    lab.run(out, resume=True, **asked)
    started = [event for event in lab.events[before:] if event[0] == "start"]
    said = "three sessions take A and each one's B, then the two that are left A and theirs"
    assert len(started) == 4 + 3, f"{said}: 7 servers, not {len(started)}"


def test_a_run_that_is_killed_as_its_plan_is_written_goes_on(tmp_path, monkeypatch):
    out, lab = tmp_path / "bench.jsonl", Lab(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr("harness.bench.jsonl.os.fsync", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            lab.run(out, blocks_at_most=1)
    begun = [line.role for line in read(out)]
    assert begun in ([], [*Role]), f"a plan is in the file whole or not at all: {begun}"
    assert lab.run(out, resume=True, blocks_at_most=1)


def test_a_workload_of_all_blocks_is_measured_before_the_next(tmp_path, monkeypatch):
    """A trial that follows a heavier workload's begins under its power cap, and its block falls."""
    lab = Lab(monkeypatch)
    lab.run(
        tmp_path / "bench.jsonl",
        design=Design.THUE_MORSE_8,
        workloads=(SMALL, LARGE),
        blocks_at_most=2,
        side_by_side=4,
    )
    trials = [line for line in read(tmp_path / "bench.jsonl") if isinstance(line, Trial)]
    measured = [(t.block, t.workload, t.session) for t in trials]
    obtained = list(dict.fromkeys(measured))
    expected = [
        (block, workload, role.value)
        for block in range(2)
        for workload in ("small", "large")
        for role in Role
    ]
    rule = "every session's small workload of a block is measured before any's large one"
    assert obtained == expected, f"{rule}: {expected[:4]}, not {obtained[:4]}"


def test_trials_that_share_no_launch_share_no_reference(tmp_path, monkeypatch):
    lab = Lab(monkeypatch)
    lab.run(tmp_path / "bench.jsonl", design=Design.QUADS, blocks_at_most=1, side_by_side=12)
    trials = [line for line in read(tmp_path / "bench.jsonl") if isinstance(line, Trial)]
    assert len({t.launch for t in trials}) == len(trials) == 12


def test_few_servers_at_a_time_measure_the_same_blocks(tmp_path, monkeypatch):
    lab = Lab(monkeypatch)
    few = lab.run(tmp_path / "few.jsonl", side_by_side=2)
    assert lab.most_up == 2
    assert [f.evidence.blocks for f in few] == [
        f.evidence.blocks for f in Lab(monkeypatch).run(tmp_path / "many.jsonl")
    ]


@pytest.mark.parametrize("name", ["warm_ups", "passes"])
def test_a_run_is_not_resumed_with_another_number_of(name, tmp_path, monkeypatch):
    out, lab = tmp_path / "bench.jsonl", Lab(monkeypatch)
    lab.stop_after = 1
    with pytest.raises(KeyboardInterrupt):
        lab.run(out)
    lab.stop_after = 10**9
    with pytest.raises(UsageError, match=f"{name} of session candidate = 9 is not accepted"):
        lab.run(out, resume=True, **{name: 9})


def test_an_interrupted_run_goes_on_at_the_block_it_was_in(tmp_path, monkeypatch):
    out, lab = tmp_path / "bench.jsonl", Lab(monkeypatch)
    lab.stop_after = 9
    with pytest.raises(KeyboardInterrupt):
        lab.run(out, workloads=(SMALL, LARGE))
    assert not lab.up
    with out.open("a") as file:
        file.write('{"format":3,"kind":"tri')
    lab.stop_after, before = 10**9, len(lab.events)
    with pytest.raises(UsageError, match="--resume"):
        lab.run(out, workloads=(SMALL, LARGE))
    for other, match in (
        ({"seed": "y"}, "seed of session candidate"),
        ({"slowdown": 0.03}, "b of session injected"),  # the last of them alone differs
        ({"roles": (Role.SAME,)}, "sessions = "),
        ({"blocks_at_most": 40}, "blocks_at_most = 40 is not accepted; accepted: 16, as"),
    ):
        told, given = f"a run is not resumed with another plan, {other}", {"resume": True} | other
        with pytest.raises(UsageError, match=match):
            pytest.fail(f"{told}: {len(lab.run(out, workloads=(SMALL, LARGE), **given))} cases")
    found = lab.run(out, workloads=(SMALL, LARGE), resume=True)
    run = verdict(found).verdict
    assert run is BenchVerdict.OK, f"a resumed run of equal arms is ok, not {run}"
    resumed = [event[1] for event in lab.events[before:] if event[0] == "measure"]
    rehearsed = [slot for slot in resumed if slot.session == "rehearsal"]
    assert not rehearsed, f"a resumed run rehearses nothing again: {rehearsed}"
    blocks = {slot.block for slot in resumed if slot.session == "candidate"}
    assert blocks >= {1}, f"a resumed run measures block 1, too, not {blocks} alone"
    workloads = {f.workload.id for f in found}
    assert workloads == {"small", "large"}, f"a resumed run judges all workloads, not {workloads}"
    measured = [t for t in read(out) if isinstance(t, Trial) and t.session != "rehearsal"]
    times = Counter((t.session, t.block, t.place, t.workload) for t in measured)
    # Of the nine trials before, one was of a block that the interruption cut off.
    twice, rule = [key for key, n in times.items() if n > 1], "no finished trial is measured again"
    assert twice == [("A/A", 1, 0, "small")], f"{rule}, but of the block cut off: {twice}"


def test_the_bars_of_a_resumed_run_count_what_was_measured_before(tmp_path, monkeypatch):
    out, lab = tmp_path / "bench.jsonl", Lab(monkeypatch)
    lab.stop_after = 8
    with pytest.raises(KeyboardInterrupt):
        lab.run(out, blocks_at_most=2)
    shown = []
    view = "harness.bench.session.ConsoleView.trial_done"
    monkeypatch.setattr(view, lambda _, trial: shown.append((trial.session, trial.block)))
    lab.stop_after = 10**9
    lab.run(out, blocks_at_most=2, resume=True)
    measured = [(line.session, line.block) for line in read(out) if isinstance(line, Trial)]
    assert shown == measured, (
        "a bar moves for each trial of the file, those before it was resumed too"
    )


def test_bad_conditions_make_it_invalid_and_never_a_failure(tmp_path, monkeypatch):
    lab = Lab(monkeypatch, slower=0.2)
    lab.load = 0.7
    found = lab.run(
        tmp_path / "bench.jsonl", roles=(Role.CANDIDATE,), blocks_at_most=4, side_by_side=2
    )
    assert {f.verdict for f in found} == {BenchVerdict.INVALID}
    assert any("load: 0.7, accepted" in reason for reason in found[0].reasons)
    assert found[0].evidence.dropped == 3  # more than half of the four that may be valid


def test_a_dropped_block_is_replaced(tmp_path, monkeypatch):
    lab = Lab(monkeypatch)
    lab.load_of = {0: 0.7, 2: 0.7}
    [found, *_] = lab.run(tmp_path / "bench.jsonl", roles=(Role.CANDIDATE,), blocks_at_most=5)
    assert (found.evidence.blocks, found.evidence.dropped, len(found.blocks)) == (5, 2, 7)


def test_as_many_blocks_are_left_as_the_case_with_the_fewest_needs():
    lines = list(run_lines(blocks=2))
    found = findings(lines, detectable_too=False)
    behind = {(Role.SAME, "ttft"): 0, (Role.CANDIDATE, "step_time"): 1}
    found = [
        f.with_evidence(replace(f.evidence, blocks=behind.get((f.role, f.metric), 2)))
        for f in found
    ]
    still_open = open_sessions([line for line in lines if isinstance(line, Session)], found)
    left = {one.session.role.value: one.left for one in still_open}
    rule = "blocks left of a session are 16 less the valid ones of its case that has fewest"
    assert left == {"A/A": 16, "candidate": 15, "injected": 14}, f"{rule}, 0, 1 and 2, not {left}"


def test_a_candidate_that_is_slower_in_one_metric_goes_on_for_its_undecided_ones():
    lines = list(run_lines(blocks=2))
    regressed = {"verdict": BenchVerdict.REGRESSED, "over": True, "blocks": 1}
    found = [
        f.with_evidence(replace(f.evidence, **regressed)) if f.metric == "tpot" else f
        for f in findings(lines, detectable_too=False)
    ]
    plans = [line for line in lines if isinstance(line, Session)]
    still_open = {one.session.role: one for one in open_sessions(plans, found)}
    assert list(still_open) == [Role.SAME, Role.CANDIDATE], "the injected slowdown was seen"
    of_candidate = still_open[Role.CANDIDATE]
    said = "where TPOT is decided, a workload is measured on for its other metrics"
    assert list(of_candidate.workloads) == list(plans[1].workloads), said
    said = "blocks left are those of undecided cases, 16 less 2, and not of TPOT's, 16 less 1"
    assert of_candidate.left == 14, f"{said}: {of_candidate.left}"


def test_no_wave_begins_that_would_end_too_late(tmp_path, monkeypatch):
    now = iter(range(0, 10_000, 10))
    monkeypatch.setattr(block_runner.time, "monotonic", lambda: float(next(now)))
    # The clock is looked at three times until the rehearsal is over, so that 45 s are left.
    lab = Lab(monkeypatch)
    found = lab.run(tmp_path / "bench.jsonl", seconds=75.0, side_by_side=6)
    said = "both arms are rehearsed together where the rehearsal measures no noise"
    assert [event[0] for event in lab.events[:2]] == ["start", "start"], said
    assert {f.evidence.blocks for f in found} == {2}
    assert {f.verdict for f in found} == {BenchVerdict.INCONCLUSIVE}


def test_a_round_may_take_as_long_as_the_longest_before(tmp_path, monkeypatch):
    lab, now = Lab(monkeypatch), [0.0]
    monkeypatch.setattr(block_runner.time, "monotonic", lambda: now[0])
    measure = lab.measure

    def timed(slot, *which):
        now[0] += 0.0 if slot.session == "rehearsal" else 20.0 if slot.block == 0 else 5.0
        return measure(slot, *which)

    lab.measure = timed
    # Three sessions of two arms: a first round of 120 s, then one of 30, and no room for 120 more.
    found = lab.run(tmp_path / "bench.jsonl", seconds=260.0, side_by_side=6)
    said = "no round begins unless there is time for the longest, though the last was short"
    assert {f.evidence.blocks for f in found} == {2}, said


def test_a_metric_that_one_arm_lacks_gets_no_verdict(tmp_path, monkeypatch):
    found = Lab(monkeypatch, metrics=("tpot",)).run(tmp_path / "bench.jsonl", blocks_at_most=1)
    assert {f.metric for f in found if f.role is Role.INJECTED} == {"tpot"}
    assert "step_time" not in {f.metric for f in found}


def test_an_arm_that_fails_its_rehearsal_ends_it(tmp_path, monkeypatch):
    lab = Lab(monkeypatch)
    lab.dead = True
    with pytest.raises(ContractError, match="rehearsal of arm A, small: dead"):
        lab.run(tmp_path / "bench.jsonl")
    assert not lab.up


def test_the_time_of_a_start_is_that_of_servers_whose_kernels_an_earlier_wave_compiled(
    tmp_path, monkeypatch
):
    lab = Lab(monkeypatch)
    lab.dead = True
    with pytest.raises(ContractError, match="rehearsal of arm A"):
        lab.run(tmp_path / "bench.jsonl", sized=True, side_by_side=8)
    started = [event for event in lab.events if event[0] == "start"]
    said = "two of the four rehearsed servers start first, so that two start with full caches"
    assert len(started) == 2, said


def test_two_runs_do_not_write_to_one_file(tmp_path, monkeypatch):
    out = tmp_path / "bench.jsonl"
    other, lab = Lab(monkeypatch), Lab(monkeypatch)
    said = []

    def measure(*trial):
        if not said:
            with pytest.raises(UsageError) as refused:
                other.run(out, resume=True)
            said.append(str(refused.value))
        return Lab.measure(lab, *trial)

    lab.measure = measure
    found = lab.run(out)
    assert said == [
        f"out = {str(out)!r} is not accepted; accepted: a file that no other run writes to"
    ]
    assert findings(read(out)) == found
    assert lab.run(out, resume=True) == found
