"""Recorded launches, drawn again into sessions, say how often an effect is found, and no more."""

from argparse import ArgumentTypeError
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import numpy as np
import pytest

from fixtures import resolution
from fixtures.fakes.synthetic_bench import session
from fixtures.tables.margins import MARGINS, REAL_SIZE_ROWS
from harness.bench.jsonl import append
from harness.bench.recorded_launches import recorded_launches
from harness.bench.resolution import Asked, ShareFound, block_effects, draw_launches, shares_found
from harness.bench.session_records import ArmFacts, CasePlan, Role, Trial, Workload
from harness.bench.stats.design import Design, draw_order
from harness.bench.stats.validity import Conditions
from harness.errors import UsageError
from harness.server.launch.sglang_command import DRAWN_WEIGHTS

MARGIN = REAL_SIZE_ROWS[0]
WORKLOADS = tuple(
    Workload(id=name, batch_size=1, input_len=8, output_len=8, requests=1)
    for name in ("one", "two")
)
ARM = ArmFacts(name="arm", command=("sglang", *DRAWN_WEIGHTS))
TRIAL_S, START_S = 5.0, 20.0
BLOCK_S = START_S + 2 * 8 * TRIAL_S
MOST = float("inf")


def lines(
    *, between=0.0, within=0.0, blocks=12, level=6.0, seed=1, role=Role.SAME, wave=1, **changed
):
    """A session of equal arms; trials of a launch also drift by 0.5 % each.

    Servers start before every so many blocks, the ``wave``.
    """
    random = np.random.default_rng(seed)
    cases = tuple(
        CasePlan(
            workload=w.id, metric="step_time", bounds=MARGIN.bounds(level, MARGIN.n_max),
            calibrated=0.01, unit="ms",
        )
        for w in WORKLOADS
    )  # fmt: skip
    how = {"design": Design.THUE_MORSE_8, "a": ARM, "b": ARM, "passes": 2}
    plan = replace(session(role, workloads=WORKLOADS), **{"cases": cases} | how | changed)
    yield plan
    began = datetime(2026, 11, 20, tzinfo=UTC)
    for block in range(blocks):
        starts = block // wave * START_S
        clock = began + timedelta(seconds=block * (BLOCK_S - START_S) + starts)
        for workload in WORKLOADS:
            launches = dict(zip("AB", random.normal(0.0, between, 2), strict=True))
            seen = {"A": 0, "B": 0}
            for place, arm in enumerate(draw_order(plan.seed, block, plan.design)):
                log = launches[arm] + random.normal(0.0, within) + 0.005 * seen[arm]
                seen[arm] += 1
                yield Trial(
                    session=plan.id, block=block, place=place, arm=arm, workload=workload.id,
                    metrics={"step_time": level * float(np.exp(log))}, samples=(),
                    conditions=Conditions(), flush_tries=1, flush_seconds=0.0, invalid=(),
                    started=clock.isoformat(timespec="seconds"), seconds=TRIAL_S,
                )  # fmt: skip
                clock += timedelta(seconds=TRIAL_S)


def found(
    files, effects=(0.0, 0.01, -0.01), seconds=MOST, sessions=60, seed=0, design=None, replicates=1
):
    """Shares by workload and effect; replicates are drawn after them, for the intervals alone."""
    (recorded,) = recorded_launches(files)
    asked = Asked(
        effects=effects, design=design or recorded.plan.design, bounds=recorded.bounds(MARGIN),
        seconds=seconds, sessions=sessions, replicates=replicates, seed=seed,
    )  # fmt: skip
    return {(one.workload, one.effect): one for one in shares_found(recorded, asked)}


def test_without_noise_every_effect_is_found_and_equal_arms_are_never_blamed():
    shares = found([("host", list(lines()))], replicates=40)
    for workload in ("one", "two"):
        for effect, share in ((0.0, 0.0), (0.01, 1.0), (-0.01, 1.0)):
            one = shares[workload, effect]
            seen = (one.share, one.low, one.high)
            rule = f"without noise {share:.0%} of sessions of an effect of {effect:+.0%} find one"
            assert seen == (share, share, share), f"{rule}, not {seen}"
            # Both workloads are decided by the same block; a start comes before each.
            told = f"{one.blocks} blocks take {BLOCK_S} s each, both workloads and a start"
            assert one.minutes == pytest.approx(one.blocks * BLOCK_S / 60), f"{told}: {one.minutes}"


def test_a_design_of_more_launches_takes_more_starts():
    shares = found([("host", list(lines()))], design=Design.QUADS)
    one = shares["one", 0.01]
    assert one.share == 1.0
    # Four launches in place of two, and a trial of each for both workloads.
    assert one.minutes == pytest.approx(one.blocks * (2 * START_S + 2 * 4 * TRIAL_S) / 60)


def test_launches_that_differ_by_several_percent_hide_one():
    shares = found([("host", list(lines(between=0.04)))])
    assert shares["one", 0.01].share < 0.1
    assert shares["one", 0.01].blocks > 20


def test_noise_of_a_known_size_is_seen_as_often_as_it_should_be():
    # Blocks differ by 0.4 % * sqrt(2) = 0.57 %, and 1 % is 0.8 % above delta0: 1.4 of that.
    shares = found([("host", list(lines(between=0.004, blocks=40)))], sessions=300, replicates=40)
    one = shares["one", 0.01]
    assert one.share > 0.9
    assert one.low < one.share <= one.high
    assert 8 < one.blocks < 16
    assert shares["one", 0.0].share <= 0.02


def mixed(one, two):
    """A session with the workload "one" of a session, and "two" of another."""
    return [
        of_two if isinstance(of_two, Trial) and of_two.workload == "two" else of_one
        for of_one, of_two in zip(one, two, strict=True)
    ]


def test_the_noise_of_one_workload_is_no_scale_of_another():
    loud = list(lines(between=0.01))
    beside_a_calm_one = mixed(lines(between=0.001), loud)
    one, due = (
        found([("host", files)], effects=(0.01,))["two", 0.01]
        for files in (beside_a_calm_one, loud)
    )
    said = "what is found of a workload is the same beside a calm one and beside one as noisy"
    assert (one.share, one.blocks) == (due.share, due.blocks), said


def test_a_start_comes_before_every_block_in_which_any_workload_is_measured():
    shares = found([("host", mixed(lines(between=0.01), lines()))], effects=(0.01,))
    one, two = shares["one", 0.01], shares["two", 0.01]
    assert one.blocks > two.blocks + 5, "the calm workload is decided first"
    due = one.blocks * START_S + (one.blocks + two.blocks) * 8 * TRIAL_S
    said = "a session starts servers until its last workload is decided, be it the first one"
    # Five starts take 1.7 minutes; by luck a session or two decide the loud one first.
    assert one.minutes == pytest.approx(due / 60, abs=0.1), said


def test_a_session_that_has_no_time_left_finds_nothing():
    files = [("host", list(lines()))]
    needed = found(files)["one", 0.01].blocks
    assert found(files, seconds=needed * BLOCK_S)["one", 0.01].share == 1.0
    short = found(files, seconds=needed * BLOCK_S - 1.0)["one", 0.01]
    assert (short.share, short.blocks) == (0.0, needed - 1)
    assert short.minutes == pytest.approx((needed - 1) * BLOCK_S / 60)
    none = found(files, seconds=BLOCK_S - 1.0)["one", 0.01]
    assert (none.share, none.blocks, none.minutes) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("design", [Design.THUE_MORSE_8, Design.QUADS, Design.PAIRS])
def test_a_launch_keeps_its_trials_in_their_order(design):
    # Differences of powers of 2 are unique; the drift of a launch cancels only in order.
    levels = 2.0 ** np.arange(8)
    logs = levels[:, None] + 0.3 * np.arange(4) ** 2
    drawn = draw_launches(np.random.default_rng(0), np.arange(8), (5, 6), design)
    effects = block_effects(logs, drawn, design)
    first, second = (levels[drawn[:, :, side]] for side in (0, 1))
    assert effects == pytest.approx((second - first).mean(axis=-1))


def test_launches_come_once_until_all_have_come_and_no_arm_meets_itself():
    random = np.random.default_rng(2)
    drawn = draw_launches(random, np.arange(9), (50, 6), Design.THUE_MORSE_8)
    for one in drawn:
        assert len(np.unique(one[:4])) == 8  # four blocks of two; the ninth waits
        assert len(np.unique(one[4:])) == 4
    assert set(np.unique(drawn[:, 0, 0])) == set(range(9)) == set(np.unique(drawn[:, 0, 1]))
    twice = draw_launches(random, np.array([0, 0, 0, 1, 1, 2, 3, 3]), (50, 20), Design.THUE_MORSE_8)
    assert twice.shape == (50, 20, 2, 1)
    assert (twice[:, :, 0] != twice[:, :, 1]).all()
    quads = draw_launches(random, np.repeat(np.arange(12), 2), (50, 20), Design.QUADS)
    met = quads[:, :, 0, :, None] == quads[:, :, 1, None, :]
    assert not met.any(), "of two launches of an arm neither is one of the other arm's"


def test_two_hosts_are_two_clusters_whose_launches_never_meet():
    # Their levels differ by half; a block of both would show it.
    calm, fast = list(lines()), list(lines(level=3.0))
    apart = found([("calm", calm), ("fast", fast)])
    assert apart["one", 0.0].share == 0.0
    assert apart["one", 0.01].share == 1.0
    loud = list(lines(between=0.05, seed=5))
    hosts = found([("calm", calm), ("loud", loud)], replicates=40)["one", 0.01]
    assert 0.45 < hosts.share < 0.6
    # Of two hosts one is drawn twice in half of all replicates.
    assert (hosts.low, hosts.high) == (pytest.approx(0.05, abs=0.1), 1.0)
    one_host = found([("host", calm), ("host", loud)], replicates=40)["one", 0.01]
    assert one_host.high - one_host.low < hosts.high - hosts.low
    (recorded,) = recorded_launches([("calm", calm), ("loud", loud)])
    assert (len(recorded.hosts), recorded.launches(0)) == (2, 48)


def test_slowed_launches_and_other_arms_do_not_count():
    injected = list(lines(role=Role.INJECTED))
    (recorded,) = recorded_launches([("host", injected)])
    assert recorded.launches(0) == 12
    other = list(lines(role=Role.CANDIDATE, b=ArmFacts(name="other")))
    (recorded,) = recorded_launches([("host", other)], "other")
    assert (recorded.arm, recorded.launches(1)) == ("other", 12)
    assert {recorded.hosts["host"].start_s} == {START_S}
    newer = replace(ARM, versions={"sglang": "0.5.23"})
    (recorded,) = recorded_launches([("host", list(lines(role=Role.CANDIDATE, b=newer)))])
    said = "of two arms of one name those of another version are no launches of the first"
    assert recorded.launches(0) == 12, said


def test_blocks_that_were_started_together_share_the_time_of_a_start():
    (recorded,) = recorded_launches([("host", list(lines(wave=3)))])
    assert recorded.hosts["host"].start_s == pytest.approx(START_S / 3)


def test_a_start_of_a_host_takes_the_median_of_its_files():
    files = [("host", list(lines(wave=wave, seed=wave))) for wave in (1, 3, 2)]
    (recorded,) = recorded_launches(files)
    said = "of three files a start takes 20, 20 / 3 and 20 / 2 s a block"
    assert recorded.hosts["host"].start_s == pytest.approx(10.0), said


def test_sessions_that_follow_each_other_have_blocks_and_starts_of_their_own():
    def later(role, blocks):
        for line in lines(blocks=12, role=role):
            if isinstance(line, Trial):
                started = datetime.fromisoformat(line.started) + timedelta(seconds=blocks * BLOCK_S)
                yield replace(line, session=role.value, started=started.isoformat())
            else:
                yield replace(line, id=role.value)

    records = [*later(Role.CANDIDATE, 0), *later(Role.SAME, 12)]
    (recorded,) = recorded_launches([("host", records)])
    said = "block n of one session and block n of another are two, with a start before each"
    assert recorded.hosts["host"].start_s == pytest.approx(START_S), said


def invalid(trial):
    return replace(trial, metrics={}, invalid=("lost",)) if isinstance(trial, Trial) else trial


def timeless(trial):
    return replace(trial, started="") if isinstance(trial, Trial) else trial


def test_a_launch_that_sessions_share_counts_once():
    def shared(role, letter):
        for line in lines(blocks=9, role=role):
            if isinstance(line, Trial):
                name = f"{line.block}-{'reference' if line.arm == 'A' else letter}"
                yield replace(line, session=role.value, launch=name)
            else:
                yield replace(line, id=role.value)

    records = [*shared(Role.CANDIDATE, "candidate"), *shared(Role.SAME, "same")]
    (recorded,) = recorded_launches([("host", records)])
    assert recorded.launches(0) == recorded.launches(1) == 9 * 3
    (recorded,) = recorded_launches([("host", records), ("host", [*shared(Role.SAME, "same")])])
    said = "launches of two runs have the same names and are others"
    assert recorded.launches(0) == 9 * 3 + 9 * 2, said


def test_as_many_launches_as_are_asked_for_suffice():
    (recorded,) = recorded_launches([("h", [*lines(blocks=4)])])
    assert recorded.launches(0) == 8


def test_bounds_are_those_of_what_all_hosts_measured():
    floored = replace(MARGIN, floor=0.6)  # ms, a tenth of 6 and a fifteenth of 9
    few, many = [*lines(level=6.0, blocks=4)], [*lines(level=9.0, blocks=12)]
    (recorded,) = recorded_launches([("few", few), ("many", many)])
    (bounds, _) = recorded.bounds(floored)
    said = "the level is the median of every host's launches, which drift by 2 % at most"
    assert bounds.delta0 == pytest.approx(np.log1p(0.6 / 9.0), rel=0.02), said


def test_drawn_sessions_have_the_thresholds_of_a_live_candidate():
    steps = next(lines(blocks=0)).cases
    wholes = [replace(case, metric=name) for case in steps for name in ("tpot", "ttft")]
    parts = [replace(case, metric=f"phase_{n}") for case in steps for n in range(4)]
    candidate = lines(role=Role.CANDIDATE, cases=(*steps, *wholes, *parts))
    injected = [lines(role=Role.INJECTED), lines(role=Role.INJECTED)]
    files = [("h", [*one]) for one in (injected[0], candidate, injected[1])]
    (recorded,) = recorded_launches(files)
    said = "sessions are drawn with the cases of the recorded candidate, not of an injected session"
    assert recorded.plan.role is Role.CANDIDATE, said
    # Three metrics of two workloads share 5 %.
    said = "phases are told beside a step and count in no family, as in a measured session"
    assert recorded.thresholds.reject_null == pytest.approx(6 / 0.05), said


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ([lines(blocks=3)], "launches of one in h = 6 is not accepted; accepted: 8 or more of arm"),
        ([map(invalid, lines())], "launches of one in h = 0 is not accepted"),
        ([lines(), lines(passes=1)], "passes of session A/A = 1 is not accepted; accepted: 2, as"),
        ([lines(), lines(design=Design.THUE_MORSE)], "design of session A/A"),
        ([[]], "records of h = 'no session' is not accepted"),
        ([lines(cases=())], "measured metrics = "),
        ([map(timeless, lines())], "started = '' is not accepted; accepted: a time, ISO 8601"),
    ],
)
def test_what_is_too_little_or_does_not_belong_together_is_refused(files, why):
    with pytest.raises(UsageError) as refused:
        recorded_launches([("h", list(one)) for one in files])
    assert why in str(refused.value)


def test_a_longer_design_than_was_recorded_and_an_unknown_arm_are_refused(tmp_path, capsys):
    path = tmp_path / "bench.jsonl"
    for line in lines():
        append(path, line)
    assert resolution.main([str(path), "--design", "thue_morse"]) == 2
    assert "accepted: one of at most 4 trials a launch" in capsys.readouterr().err
    assert resolution.main([str(path), "--arm", "b"]) == 2
    assert "arm = 'b' is not accepted; accepted: arm" in capsys.readouterr().err


def test_a_workload_is_told_with_its_own_launches():
    cases = [SimpleNamespace(workload=workload.id) for workload in WORKLOADS]
    recorded = SimpleNamespace(cases=cases, launches=(48, 46).__getitem__)
    numbers = {"effect": 0.0, "share": 0.0, "low": 0.0, "high": 0.1, "blocks": 9.0, "minutes": 7.0}
    found = [ShareFound(workload=name, **numbers) for name in ("two", "one")]
    workloads, launches, *_ = (list(c.cells) for c in resolution.table(recorded, found).columns)
    told = "one has 48 launches and two, of which some were dropped, 46"
    assert (workloads, launches) == (["two", "one"], ["46", "48"]), told


@pytest.mark.parametrize("text", ["-1", "0,-1.0", "1", "0.01,1.0"])
def test_an_arm_is_made_neither_twice_as_slow_nor_to_take_no_time(text):
    with pytest.raises(ArgumentTypeError, match="accepted: numbers between -1 and 1"):
        pytest.fail(
            f"--effects {text} stands at a bound and is refused: {resolution.effects(text)}"
        )


def test_an_arm_that_is_made_faster_is_not_told_as_equal():
    recorded = SimpleNamespace(cases=[SimpleNamespace(workload="one")], launches=lambda _: 48)
    numbers = {"share": 0.0, "low": 0.0, "high": 0.1, "blocks": 9.0, "minutes": 7.0}
    found = [ShareFound(workload="one", effect=e, **numbers) for e in (0.01, 0.0, -0.01)]
    _, _, effects, *_ = (list(column.cells) for column in resolution.table(recorded, found).columns)
    assert effects == ["+1.0 %", "equal", "-1.0 %"], "only arms without an effect are equal"


@pytest.mark.parametrize(
    ("words", "margin"),
    [
        (DRAWN_WEIGHTS, MARGIN),
        (("--load-format", "safetensors"), MARGINS["step_time"]),
        (("--skip-tokenizer-init",), MARGINS["step_time"]),
        ((), MARGINS["step_time"]),
    ],
)
def test_launches_have_the_margin_of_their_arm(words, margin):
    recorded = SimpleNamespace(a=ArmFacts(name="arm", command=("sglang", *words)))
    said = f"an arm has the margin of a shape if all of {DRAWN_WEIGHTS} are its flags: {words}"
    assert resolution.margin_of(recorded) == margin, said


def test_the_command_tells_what_it_stands_on_and_repeats_itself(tmp_path, capsys):
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for seed, path in enumerate(paths):
        for line in lines(between=0.003, seed=seed):
            append(path, line)
    words = [f"first={paths[0]}", str(paths[1]), "--sessions", "40", "--replicates", "20"]
    words += ["--effects", "0,0.01"]
    said = []
    for seed in ("1", "1", "2"):
        assert resolution.main([*words, "--seed", seed]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2]
    head, *rows = said[0].splitlines()
    assert "cpu, 2 hosts: 40 sessions drawn of arm, thue_morse_8, passes per trial 2" in head
    assert "at most 32 blocks and 25 min. Intervals are by host and launch" in head
    assert "found different in 2 %" in head
    assert [row.split()[:3] for row in rows[1:]] == [
        ["one", "48", "equal"], ["one", "48", "+1.0"], ["two", "48", "equal"], ["two", "48", "+1.0"]
    ]  # fmt: skip
