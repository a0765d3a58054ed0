"""From the noise of a rehearsal follow passes and blocks, or a line that says that none suffice."""

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from fixtures.fakes.synthetic_bench import session
from fixtures.tables.margins import REAL_SIZE_ROWS
from harness.bench import session as bench_session
from harness.bench.arms import parse
from harness.bench.jsonl import read
from harness.bench.plan import Setup
from harness.bench.session import BenchRun
from harness.bench.session_records import CasePlan, Role, Session, Trial
from harness.bench.sizing import (
    PASSES,
    LaunchNoise,
    Rehearsal,
    RehearsedLaunch,
    launch_noise,
    run_size,
)
from harness.bench.stats.design import Design
from harness.bench.stats.estimates import centre
from harness.bench.stats.stopping import decide, paths
from harness.bench.stats.validity import Conditions
from harness.core.environment import environment
from harness.errors import UsageError
from suites.selfcheck.bench.test_bench_block_runner import LARGE, SMALL, FakeServer, Lab

MARGIN = REAL_SIZE_ROWS[0]
STEP_MS = {"small": 6.0, "large": 11.0}
START_S, WARM_UP_S, TRIAL_S = 10.0, 3.0, 2.0


def recorded(slot, workload, log, seconds=TRIAL_S):
    return Trial(
        session="rehearsal", block=slot[0], place=slot[1], arm="A", workload=workload,
        metrics={"step_time": STEP_MS[workload] * float(np.exp(log))}, samples=(),
        conditions=Conditions(), flush_tries=1, flush_seconds=0.0, invalid=(), started="",
        seconds=seconds,
    )  # fmt: skip


def rehearsal(noise, *, launches=40, trials=6, seed=3):
    """Launches of two arms that differ by 5 %, with the noise of each workload."""
    random = np.random.default_rng(seed)
    made = []
    for number in range(launches):
        rows = {}
        for name, (within, between) in noise.items():
            level = random.normal(0.0, between) + 0.05 * (number % 2)
            rows[name] = [
                recorded((number, place), name, level + random.normal(0.0, within),
                         TRIAL_S + WARM_UP_S * (place == 0))
                for place in range(trials)
            ]  # fmt: skip
        made.append(RehearsedLaunch(spec="AB"[number % 2], trials=rows))
    return Rehearsal(launches=made, launch_s=START_S)


def plan(*workloads, design=Design.THUE_MORSE_8, most=24):
    cases = tuple(
        CasePlan(
            workload=w.id, metric="step_time", bounds=MARGIN.bounds(STEP_MS[w.id], most),
            calibrated=0.01, unit="ms",
        )
        for w in workloads
    )  # fmt: skip
    return replace(session(Role.CANDIDATE), design=design, workloads=workloads, cases=cases)


def test_the_noise_within_and_between_launches_is_told_apart():
    measured = rehearsal({"small": (0.004, 0.002), "large": (0.003, 0.0)}, launches=200)
    small, large = measured.noise("small"), measured.noise("large")
    assert small.within == pytest.approx(0.004, rel=0.1)
    said = "launches whose levels differ by 0.2 % have that noise between launches"
    assert small.between == pytest.approx(0.002, rel=0.25), said
    assert large.within == pytest.approx(0.003, rel=0.1)
    # Six passes alone make launches differ by 0.003 / sqrt(6) = 0.0012, which is subtracted.
    assert large.between < 0.0006


def test_levels_are_those_of_arm_a():
    found = rehearsal({"small": (0.0, 0.0), "large": (0.0, 0.0)}).levels
    assert found == pytest.approx({(name, "step_time"): ms for name, ms in STEP_MS.items()})


def test_a_level_is_that_of_all_launches_of_arm_a():
    of_launches = {"A": (0.0, 0.2, 0.5), "B": (0.3, 0.3, 0.3)}
    launches = [
        RehearsedLaunch(spec=spec, trials={"small": [recorded((n, 0), "small", logs[n])] * 2})
        for n in range(3)
        for spec, logs in of_launches.items()
    ]
    [level] = Rehearsal(launches=launches, launch_s=START_S).levels.values()
    said = "the level of a metric is the median over every launch of arm A"
    assert level == pytest.approx(STEP_MS["small"] * np.exp(0.2)), said


def test_a_metric_that_any_trial_lacks_has_no_level():
    both, one = recorded((0, 0), "small", 0.0), recorded((0, 1), "small", 0.1)
    both = replace(both, metrics=both.metrics | {"tpot": 2.0, "ttft": 40.0})
    one = replace(one, metrics=one.metrics | {"ttft": 50.0})
    launches = [
        RehearsedLaunch(spec="A", trials={"small": [both, both]}),
        RehearsedLaunch(spec="B", trials={"small": [both, one]}),
    ]
    found = Rehearsal(launches=launches, launch_s=START_S).levels
    said = "a metric that a trial of arm B lacks was not measured on both arms"
    assert {metric for _, metric in found} == {"step_time", "ttft"}, said


def test_a_spike_in_a_launch_and_a_launch_that_is_off_change_little():
    random = np.random.default_rng(1)
    logs = random.normal(0.0, 0.004, (40, 6)) + random.normal(0.0, 0.002, (40, 1))
    logs[::5, 2] += 0.5
    logs[7] += 0.3
    found = launch_noise([logs])
    said = "a spike of 50 % in some launches changes little of the noise within launches"
    assert found.within == pytest.approx(0.004, rel=0.35), said
    said = "launches whose levels differ by 0.2 % have that noise between launches"
    assert found.between == pytest.approx(0.002, rel=0.35), said


def test_one_launch_of_an_arm_or_one_trial_tell_no_noise():
    for shape in ((1, 6), (2, 1)):
        with pytest.raises(UsageError, match="two launches of an arm, two trials"):
            launch_noise([np.zeros(shape)])


@pytest.mark.parametrize(
    ("design", "passes", "variance"),
    [
        # Twice that of an arm's launches and, of the Hodges-Lehmann estimate, of its trials.
        (Design.THUE_MORSE_8, 1, 2 * (9.0 + 1.0472 * 16.0 / 4)),
        (Design.QUADS, 1, 2 * (9.0 / 2 + 1.0472 * 16.0 / 2)),
        # The median of three has 0.449 of the variance of one.
        (Design.THUE_MORSE, 3, 2 * (9.0 + 1.0472 * 0.449 * 16.0 / 16)),
    ],
)
def test_the_noise_of_a_block_by_hand(design, passes, variance):
    found = LaunchNoise(within=0.004, between=0.003).of_effect(design, passes)
    assert found == pytest.approx(1e-3 * variance**0.5, rel=0.01)


def sessions_that_find(noise, passes, blocks, case, thresholds, effect, many=600):
    """Share of sessions, simulated pass by pass, that are REGRESSED."""
    random = np.random.default_rng(8)
    levels = random.normal(0.0, noise[1], (many, blocks, 2, 1))
    each = random.normal(0.0, noise[0], (many, blocks, 2, 4, passes))
    trials = levels + np.median(each, axis=-1)
    effects = centre(trials[:, :, 1] - trials[:, :, 0]) + effect
    codes, _ = decide(paths(effects, case.bounds, case.calibrated), thresholds)
    return (codes == 3).mean()


@pytest.mark.parametrize("noise", [(0.012, 0.003), (0.009, 0.004)])
def test_the_blocks_that_are_chosen_find_the_effect_in_nine_sessions_of_ten(noise):
    asked = plan(SMALL, most=60)
    sized = run_size([asked], rehearsal({"small": noise}, launches=400))
    (case,) = sized.cases
    how = (case.case, asked.thresholds, case.case.bounds.delta1)
    found = sessions_that_find(noise, sized.passes, case.blocks, *how)
    assert 0.84 < found < 0.97
    assert sessions_that_find(noise, sized.passes, case.blocks * 2 // 3, *how) < found - 0.1


def test_the_least_time_is_chosen_and_told():
    quiet, loud = {"small": (0.001, 0.001)}, {"small": (0.012, 0.001)}
    assert run_size([plan(SMALL)], rehearsal(quiet)).passes == 1
    sized = run_size([plan(SMALL)] * 3, rehearsal(loud))
    assert sized.passes == 4
    assert run_size([plan(SMALL)], rehearsal(loud), (2,)).passes == 2
    # Of every block four servers, the reference's for all three sessions, each started and warmed
    # up once; of each session eight trials of four passes.
    (case,) = sized.cases
    block = 4 * (START_S + WARM_UP_S) + 3 * 8 * 4 * TRIAL_S
    assert sized.seconds == pytest.approx(case.blocks * block)
    line, total = sized.told
    assert line.startswith("small: within 1.")
    assert line.endswith(f"{case.blocks} blocks find 1.0 %")
    assert total == f"passes per trial 4: {sized.seconds / 60:.0f} min in 3 sessions"


def test_where_not_all_fits_passes_are_chosen_by_what_the_blocks_that_fit_find():
    """Only four passes find 1 % in the blocks that are allowed; of one pass more blocks fit."""
    slow = replace(rehearsal({"small": (0.008, 0.004)}, launches=400), launch_s=30.0)
    assert run_size([plan(SMALL)] * 3, slow).passes == 4
    block = 4 * (30.0 + WARM_UP_S) + 3 * 8 * TRIAL_S
    left_s = 12.5 * block
    sized = run_size([plan(SMALL)] * 3, slow, left_s=left_s)
    assert (sized.passes, sized.blocks) == (1, 12)
    found = {n: run_size([plan(SMALL)] * 3, slow, (n,), left_s).unseen["small"] for n in PASSES}
    assert 0.01 < found[1] < found[2] < found[4]
    told = sized.told[-1]
    assert told.startswith(f"passes per trial 1: cannot in the {left_s / 60:.0f} min that are left")
    assert f"12 blocks of each session fit and would find {found[1] * 100:.1f} % (small)" in told
    none = run_size([plan(SMALL)], slow, left_s=1.0).told[-1]
    assert "0 blocks of each session fit and would find nothing (small)" in none
    late = run_size([plan(SMALL)], slow, left_s=-90.0 * block)
    said = "a rehearsal that took more than all the time leaves none for a block"
    assert late.blocks == 0, said
    assert "0 blocks of each session fit and would find nothing (small)" in late.told[-1], said
    assert "cannot in the 0 min that are left" in late.told[-1], "no time is less than none"


def test_what_the_first_warm_up_compiles_is_no_later_warm_ups():
    seen = rehearsal({"small": (0.001, 0.001)}, launches=4)
    # The two servers of the first wave compile side by side.
    for launch in seen.launches[:2]:
        first = launch.trials["small"]
        first[0] = replace(first[0], seconds=first[0].seconds + 60.0)
    assert seen.seconds("small", Design.THUE_MORSE_8, 1, 3) == pytest.approx(
        4 * WARM_UP_S + 3 * 8 * TRIAL_S
    )


def test_launches_that_differ_too_much_are_told_to_hide_the_effect():
    # Passes do not help; a block's effect has 1.4 times the noise of a launch.
    noise = {"small": (0.002, 0.02), "large": (0.002, 0.001)}
    sized = run_size([plan(SMALL, LARGE)], rehearsal(noise))
    small, large = sized.told[:2]
    assert small.startswith("small: within 0.18 %, between 2.")
    assert "cannot: 24 blocks would find" in small
    assert small.endswith("1.0 % needs more than 100")
    assert "cannot" not in large
    assert [one.suffices for one in sized.cases] == [False, True]
    assert sized.passes == 1
    needs = replace(sized.cases[1], blocks=sized.cases[1].case.bounds.n_max)
    assert needs.suffices, "a plan that allows exactly as many blocks as it takes suffices"
    assert not replace(needs, blocks=needs.blocks + 1).suffices


def test_a_plan_without_step_times_cannot_be_sized():
    asked = plan(SMALL)
    other = replace(asked, cases=(replace(asked.cases[0], metric="ttft"),))
    with pytest.raises(UsageError, match="step_time among them"):
        run_size([other], rehearsal({"small": (0.01, 0.01)}))


class QuietLab(Lab):
    """Arms whose passes differ by 3 % and launches by 0.1 %; counts passes."""

    def trials_of(self, passes):
        def measure(slot, arm, server, workload):
            assert server in self.up
            self.most_up = max(self.most_up, len(self.up))
            self.events.append(("measure", slot, arm.spec, passes))
            random = np.random.default_rng(len(self.events))
            log = random.normal(0.0, 0.03 / passes**0.5)
            made = recorded((slot.block, slot.place), workload.id, log)
            return replace(made, **vars(slot))

        return measure

    def bench(self, out, *, resume=False, seconds=float("inf"), **changed):
        asked = {
            "a": parse("url:http://127.0.0.1:9"), "b": parse("url:http://127.0.0.1:8"),
            "workloads": (SMALL,), "margins": REAL_SIZE_ROWS, "roles": tuple(Role), "seed": "x",
            "design": Design.THUE_MORSE_8, "passes": None, "sized": True,
        }  # fmt: skip
        self.said = io.StringIO()
        return BenchRun(
            setup=Setup(**asked | changed), out=out, measure=self.trials_of,
            environment=environment, console=Console(file=self.said, width=200), resume=resume,
            side_by_side=2, seconds=seconds,
        ).run()  # fmt: skip


def test_the_plan_holds_the_passes_that_the_rehearsal_chose_and_a_resumed_run_keeps_them(
    tmp_path, monkeypatch
):
    out, lab = tmp_path / "bench.jsonl", QuietLab(monkeypatch)
    lab.bench(out, roles=(Role.CANDIDATE,))
    rehearsed = [event for event in lab.events if event[0] == "measure" and event[3] == 1]
    assert {(slot.block, slot.place) for _, slot, *_ in rehearsed} == {
        (launch, place) for launch in range(4) for place in range(6)
    }
    assert [event[1] for event in lab.events[:2]] == [
        parse("url:http://127.0.0.1:9"), parse("url:http://127.0.0.1:8")
    ]  # fmt: skip
    assert lab.most_up == 2
    assert "small: within" in lab.said.getvalue()
    lines = list(read(out))
    assert {line.passes for line in lines if isinstance(line, Session)} == {4}
    assert {event[3] for event in lab.events[-16:] if event[0] == "measure"} == {4}
    again = QuietLab(monkeypatch)
    again.bench(out, resume=True, roles=(Role.CANDIDATE,))
    assert again.events == []
    with pytest.raises(UsageError, match="passes of session candidate = 2 is not accepted"):
        again.bench(out, resume=True, roles=(Role.CANDIDATE,), passes=2)
    assert list(read(out)) == lines


def test_a_launch_takes_as_long_as_one_with_full_caches(tmp_path, monkeypatch):
    lab, now, seen = QuietLab(monkeypatch), [0.0], []

    def start(arm, log):
        # Of four servers the first two compile.
        now[0] += 30.0 if log.stem.startswith(("rehearsal-0", "rehearsal-1")) else 5.0
        return FakeServer(lab, log, arm)

    def sized(planned, rehearsal, *rest):
        seen.append(rehearsal.launch_s)
        return run_size(planned, rehearsal, *rest)

    monkeypatch.setattr("harness.bench.arms.Arm.start", start)
    monkeypatch.setattr(bench_session, "run_size", sized)
    monkeypatch.setattr(bench_session.time, "monotonic", lambda: now[0])
    lab.bench(tmp_path / "bench.jsonl", roles=(Role.CANDIDATE,), blocks_at_most=1)
    assert seen == [5.0]


def test_the_passes_are_chosen_for_the_time_that_is_left(tmp_path, monkeypatch):
    lab = QuietLab(monkeypatch)
    lab.bench(tmp_path / "bench.jsonl", roles=(Role.CANDIDATE,), seconds=60)
    assert "cannot in the 1 min that are left" in lab.said.getvalue()


def test_passes_that_are_asked_for_are_obeyed_and_equal_arms_are_launched_twice(
    tmp_path, monkeypatch
):
    out, lab = tmp_path / "bench.jsonl", QuietLab(monkeypatch)
    lab.bench(out, passes=2, roles=(Role.INJECTED, Role.SAME), blocks_at_most=1)
    assert {line.passes for line in read(out) if isinstance(line, Session)} == {2}
    kinds = [event[0] for event in lab.events]
    said = "the rehearsal's servers start in two waves: the first one's fill the kernel caches"
    assert kinds[:14] == (["start"] + ["measure"] * 6) * 2, said
    assert kinds[14] == "start"  # of the first block
    assert {event[1].spec for event in (lab.events[0], lab.events[7])} == {"url:http://127.0.0.1:9"}
    assert "passes per trial 2" in lab.said.getvalue()
