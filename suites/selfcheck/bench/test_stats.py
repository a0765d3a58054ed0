"""E-values are those of bets computed one by one, and verdicts follow from them block by block."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import replace

import numpy as np
import pytest

from fixtures.tables.margins import MARGINS, PHASE_ROWS, ROWS
from harness.bench.load_generator import WorkloadRun
from harness.bench.metrics import metrics
from harness.bench.session_records import Sample
from harness.bench.stats import simulation
from harness.bench.stats.bench_verdict import BenchVerdict
from harness.bench.stats.design import Block, Design, draw_order
from harness.bench.stats.e_process import log_e, scales
from harness.bench.stats.estimates import detectable, hodges_lehmann, interval, spread
from harness.bench.stats.margin import Bounds
from harness.bench.stats.multiple_testing import (
    Control,
    apply_controls,
    apply_e_bh,
    control_thresholds,
    e_bh,
    family_thresholds,
)
from harness.bench.stats.sequential_test import SequentialPlan, judge
from harness.bench.stats.stopping import VERDICT_CODES, EvidencePaths, Thresholds, decide
from harness.errors import ContractError, UsageError

SLOTS = (0.011, -0.004, 0.2, 0.0, -0.03, 0.007, 0.015)
TPOT = MARGINS["tpot"]
PASS = WorkloadRun(
    samples=(
        Sample(
            ttft_ms=5.0,
            latency_ms=9.0,
            chunk_gaps_ms=(2.0, 2.0),
            completion_tokens=5,
            spec_verify_ct=2,
            cached_tokens=0,
        ),
    ),
    failures=(),
    seconds=0.01,
)


def wealth(effects: list[float], margin: float, calibrated: float) -> float:
    """The e-value again, one bet at a time and without logarithms."""
    parts = [0.25, 0.25, 0.25, 0.25]
    for n, effect in enumerate(effects):
        seen, scale = effects[:n], calibrated
        if n >= 3:
            middle = statistics.median(seen)
            mad = statistics.median([abs(d - middle) for d in seen])
            scale = max(1.4826 * mad, calibrated / 4)
        for i, rate in enumerate((0.5, 1.0, 2.0, 4.0)):
            gain = math.exp(rate * (effect - margin) / scale)
            parts[i] *= 1 + 0.85 * (gain - 1 / gain) / (gain + 1 / gain)
    return sum(parts)


def ours(effects: np.ndarray, margin: float, calibrated: float = 0.01) -> np.ndarray:
    return np.exp(log_e(effects - margin, scales(effects, calibrated)))


def session(effects, *, design=Design.PAIRS, metric=TPOT, n_max=16, invalid=(), mhz=False, **more):
    blocks = []
    for index, effect in enumerate(effects):
        order = draw_order("seed", index, design)
        values = tuple(5.0 * math.exp(effect) if arm == "B" else 5.0 for arm in order)
        clocks = tuple(1000 * math.exp(-effect) if arm == "B" else 1000.0 for arm in order)
        reasons = ("throttled",) if index in invalid else ()
        clocks = clocks if mhz else ()
        blocks.append(Block(index=index, order=order, values=values, mhz=clocks, invalid=reasons))
    bounds = metric.bounds(5.0, n_max)
    plan = SequentialPlan(margin=metric, bounds=bounds, seed="seed", design=design, **more)
    return blocks, plan


def evidence(effects, **more):
    return judge(*session(effects, **more))


def test_every_sequence_of_orders_agrees_with_brute_force_and_the_mean_is_one():
    theta = 0.006
    signs = np.array(list(itertools.product((-1.0, 1.0), repeat=len(SLOTS))))
    effects = theta + signs * np.array(SLOTS)
    final = ours(effects, theta)[:, -1]
    assert final == pytest.approx([wealth(list(row), theta, 0.01) for row in effects])
    assert ours(effects, theta).mean(axis=0) == pytest.approx([1.0] * len(SLOTS))
    assert (ours(effects, theta + 0.01).mean(axis=0) <= 1.0).all()
    assert ours(effects, theta - 0.01).mean(axis=0)[-1] > 1.0
    mirrored = ours(-(effects - theta), 0.0)[:, -1]
    assert np.sort(mirrored) == pytest.approx(np.sort(final))


def test_hand_worked_bets():
    # One block one scale above: tanh of 0.5, 1, 2, 4 from a table.
    tanh = (0.46211716, 0.76159416, 0.96402758, 0.99932930)
    one = ours(np.array([0.01, 0.01]), 0.0)
    assert one[0] == pytest.approx(sum(1 + 0.85 * t for t in tanh) / 4)
    assert one[1] == pytest.approx(sum((1 + 0.85 * t) ** 2 for t in tanh) / 4)
    assert ours(np.zeros(5), 0.0) == pytest.approx([1.0] * 5)
    assert ours(np.full(9, 1e6), 0.0) == pytest.approx([1.85**n for n in range(1, 10)])


def test_scale_comes_from_earlier_blocks_alone():
    found = scales(np.array([0.01, 0.03, 0.08, 9.0, 0.0]), 0.02)
    assert found == pytest.approx([0.02, 0.02, 0.02, 1.4826 * 0.02, 1.4826 * 0.035])
    assert scales(np.full(5, 0.1), 0.02)[3:] == pytest.approx([0.005, 0.005])
    with pytest.raises(UsageError, match="calibrated scale = 0"):
        scales(np.zeros(3), 0.0)
    with pytest.raises(UsageError, match=r"effects = \[nan\]"):
        scales(np.array([math.nan]))


@pytest.mark.parametrize(
    ("effect", "verdict", "blocks", "field"),
    [
        (0.5, BenchVerdict.REGRESSED, 8, "e_regressed"),
        (-0.5, BenchVerdict.IMPROVED, 8, "e_improved"),
        (0.0, BenchVerdict.OK, 5, "e_equivalence"),
    ],
)
def test_verdicts_stop_early_and_later_blocks_change_nothing(effect, verdict, blocks, field):
    found = evidence([effect] * blocks + [-effect] * 4)
    assert (found.verdict, found.over, found.blocks) == (verdict, True, blocks)
    assert not evidence([effect] * (blocks - 1)).over
    assert found.e_value == getattr(found, field) >= 20.0
    assert found.ratio == pytest.approx(math.exp(effect))
    assert found.low < found.ratio < found.high or found.low == 0


def test_throughput_turns_the_sign_and_not_the_ratio():
    found = evidence([0.5] * 8, metric=MARGINS["output_throughput"])
    assert found.verdict == BenchVerdict.IMPROVED, f"more throughput is improved: {found.verdict}"
    assert found.ratio == pytest.approx(math.exp(0.5)), f"its ratio is B / A, not {found.ratio}"


def test_no_decision_within_n_max_is_inconclusive():
    found = evidence([0.3, -0.3] * 3, n_max=6)
    assert (found.verdict, found.over, found.blocks) == (BenchVerdict.INCONCLUSIVE, True, 6)
    empty = evidence([])
    assert (empty.verdict, empty.over, empty.e_regressed) == (BenchVerdict.INCONCLUSIVE, False, 1.0)
    assert (empty.e_equivalence, empty.e_improved, empty.high) == (1.0, 1.0, math.inf)
    assert found.e_value == found.e_regressed


def test_a_third_of_the_blocks_may_be_invalid_and_no_more():
    assert evidence([0.5] * 12, invalid=(0, 3, 5, 9)).verdict is BenchVerdict.REGRESSED
    found = evidence([0.5] * 13, invalid=(0, 3, 5, 9, 10))
    assert (found.verdict, found.over, found.dropped) == (BenchVerdict.INVALID, True, 5)
    assert found.reasons[1:] == ("throttled",)
    hopeless = evidence([0.0] * 3, invalid=(0, 1, 2), n_max=4)
    assert (hopeless.verdict, hopeless.blocks) == (BenchVerdict.INVALID, 0)
    hoping = evidence([0.0] * 3, invalid=(0, 1), n_max=4)
    said = (
        "two lost blocks beside four valid ones are a third: the session goes on until it has them"
    )
    found = hoping.verdict, hoping.over
    assert found == (BenchVerdict.INCONCLUSIVE, False), f"{said}: {found}"


def test_a_slowdown_that_the_clock_explains_is_invalid():
    assert evidence([0.5] * 8, mhz=True).verdict is BenchVerdict.INVALID
    blocks, plan = session([0.5] * 8, mhz=True)
    bare, _ = session([0.5] * 8)
    assert judge([*bare[:2], *blocks[2:]], plan).verdict is BenchVerdict.INVALID
    five = judge([*bare[:3], *blocks[3:]], plan)  # too few to show that the clocks differ
    assert five.verdict is BenchVerdict.REGRESSED


def test_blocks_after_the_decision_change_nothing():
    (bare, plan), (clocked, _) = session([0.5] * 16), session([0.5] * 16, mhz=True)
    decided = judge(bare[:8], plan)
    assert decided.verdict is BenchVerdict.REGRESSED
    assert judge([*bare[:8], *clocked[8:]], plan) == decided, "they were measured ahead of it"
    lost, _ = session([0.5] * 16, invalid=range(8, 16))
    assert judge([*bare[:8], *lost[8:]], plan) == decided, "nor do those that were lost"


def test_a_session_has_the_drawn_orders():
    blocks, plan = session([0.5] * 8)
    with pytest.raises(ContractError, match="block index = 2"):
        judge([*blocks[:1], *blocks[2:]], plan)
    other = Block(index=0, order=blocks[0].order[::-1], values=(1.0, 1.0))
    with pytest.raises(ContractError, match="block 0 order"):
        judge([other], plan)
    reversed_ = sum(draw_order("s", i, Design.QUADS) == "BAAB" for i in range(1000))
    told = "orders are drawn by a fair coin: about half of 1000 blocks are BAAB"
    assert 430 < reversed_ < 570, f"{told}, not {reversed_}"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 0.0, None, True])
def test_measurements_that_are_none_are_refused(bad):
    with pytest.raises(UsageError, match=r"block 3 values\[1\] = .*accepted: a finite number"):
        Block(index=3, order="AB", values=(1.0, bad))
    assert Block(index=3, order="AB", values=(1.0, bad), invalid=("crashed",)).invalid


def test_missing_measurements_and_unknown_orders_are_refused():
    with pytest.raises(UsageError, match="one number for each trial of ABBA"):
        Block(index=0, order="ABBA", values=(1.0, 2.0))
    with pytest.raises(UsageError, match="order = 'AA'"):
        Block(index=0, order="AA", values=(1.0, 2.0))


def test_quads_forget_a_linear_drift():
    block = Block(index=0, order="ABBA", values=(1.0, math.e, math.e**2, math.e**3))
    assert block.effect == pytest.approx(0.0)
    assert block.arm("B") == pytest.approx(math.exp(1.5))


@pytest.mark.parametrize("order", Design.THUE_MORSE.orders)
def test_short_trials_forget_drifts_and_spikes(order):
    random = np.random.default_rng(3)
    slower, noise = math.log(1.01), random.normal(0.0, 0.001, len(order))
    logs = noise + [slower * (arm == "B") + 0.002 * place for place, arm in enumerate(order)]
    logs[[0, 9, 20]] += (1.0, 0.4, -0.3)
    swapped = order.translate(str.maketrans("AB", "BA"))
    seen, mirror = (
        Block(index=0, order=arms, values=tuple(np.exp(logs))).effect for arms in (order, swapped)
    )
    rule = "drift and three spikes of 32 trials move no effect of a block"
    assert seen == pytest.approx(slower, abs=0.001), f"{rule}: log(1.01), not {seen}"
    assert mirror == pytest.approx(-seen), f"swapped arms have the opposite effect: {mirror}"
    for name in ("effect", "effect_in_cycles"):
        clocks = (1500.0,) * len(order)
        clocked = Block(index=0, order=order, values=tuple(np.exp(logs)), mhz=clocks)
        found = getattr(clocked, name)
        assert found == pytest.approx(seen), f"equal clocks change no {name}: {seen}, not {found}"


@pytest.mark.parametrize(
    ("clocks", "verdict"),
    [
        # Of B beside A's 1980 MHz, in percent: a clock that differs, and one that jitters by more.
        ((-0.9, -0.8, -0.9, -0.9, -0.8, -0.9, -0.9, -0.8, -0.9), "invalid"),
        ((-3.5, +1.0, -3.0, +2.0, -4.0, -3.0, +1.5, -3.5, -3.0), "regressed"),
        ((+0.9, +0.8, +0.9, +0.9, +0.8, +0.9, +0.9, +0.8, +0.9), "regressed"),
    ],
)
def test_an_effect_is_withdrawn_for_clocks_that_differ_and_not_for_their_jitter(clocks, verdict):
    blocks, plan = session([0.008] * len(clocks), metric=TPOT)
    plan = replace(plan, bounds=Bounds(delta0=0.001, delta1=0.006, n_max=len(clocks)))
    clocked = [
        replace(
            block,
            mhz=tuple(1980.0 * (1 + percent / 100 * (arm == "B")) for arm in block.order),
        )
        for block, percent in zip(blocks, clocks, strict=True)
    ]
    found = judge(clocked, plan).verdict
    rule = "lower clocks of B withdraw an effect unless they jitter by more than it"
    assert found == verdict, f"{rule}: {clocks} % off A's are {verdict}, not {found}"


def test_families():
    assert [family_thresholds(k).reject_null for k in (1, 5, 20)] == pytest.approx(
        [100.0, 100.0, 400.0]
    )
    said = "a control asks for more evidence than a case: of five, two directions, one in 100"
    assert control_thresholds(5).reject_null == pytest.approx(1000.0), said
    # K = 4 at 5 %: 80 for one, 40 each for two, 26.7 for three.
    assert e_bh({"a": 41.0, "b": 40.0, "c": 26.0, "d": 0.0}) == {"a", "b"}
    assert e_bh({"a": 79.0, "b": 30.0, "c": 27.0, "d": 0.0}) == {"a", "b", "c"}
    assert e_bh({"a": 79.0, "b": 1.0, "c": 1.0, "d": 0.0}) == e_bh({}) == frozenset()
    with pytest.raises(UsageError, match="e-value of a = nan"):
        e_bh({"a": math.nan})


def test_e_bh_and_controls_decide_a_run():
    worse, same, better = (evidence([x] * 8) for x in (0.5, 0.0, -0.5))
    table = {"worse": worse, "same": same, "better": better}
    judged = apply_e_bh(table)
    assert [found.verdict for found in judged.values()] == ["regressed", "ok", "improved"]
    crowd = apply_e_bh({"worse": worse} | {f"same {i}": same for i in range(20)})
    assert crowd["worse"].verdict is BenchVerdict.INCONCLUSIVE
    lost = replace(worse, verdict=BenchVerdict.INVALID)
    many = apply_e_bh({"worse": worse} | {f"lost {i}": lost for i in range(20)})
    assert many["worse"].verdict is BenchVerdict.INCONCLUSIVE
    assert many["lost 0"] == lost
    many = apply_e_bh({"better": better} | {f"lost {i}": lost for i in range(20)})
    said = "an improvement, too, is asked for the evidence of as many cases as were measured"
    assert many["better"].verdict is BenchVerdict.INCONCLUSIVE, said
    assert apply_controls(table, {Control.AA: same, Control.INJECTED: worse}) == table
    invalid_run = apply_controls(table, {Control.AA: better})
    said = "where a control failed or is missing, no case of the run keeps a verdict"
    assert all(found.verdict.is_red for found in invalid_run.values()), said
    assert [reason.split(":")[1] for reason in invalid_run["same"].reasons] == [
        " improved instead of ok or inconclusive",
        " missing instead of regressed",
    ]
    assert apply_controls(invalid_run, {Control.AA: better}) == invalid_run
    broken = replace(lost, reasons=("count differs\nof block 3", "throttled"))
    [why] = apply_controls(table, {Control.AA: same, Control.INJECTED: broken})["same"].reasons
    assert why == "control injected slowdown: invalid instead of regressed (count differs)"


@pytest.mark.parametrize(
    ("regressed", "equivalent", "improved", "decided"),
    [
        (100.0, 1.0, 1.0, ("regressed", 2)),
        (99.0, 1.0, 1.0, ("inconclusive", 3)),
        (1.0, 1.0, 100.0, ("improved", 2)),
        (1.0, 1.0, 99.0, ("inconclusive", 3)),
        (1.0, 20.0, 1.0, ("ok", 2)),
        (1.0, 19.0, 1.0, ("inconclusive", 3)),
        (1.0, 20.0, 1.1, ("ok", 3)),
    ],
)
def test_a_threshold_that_is_just_reached_decides(regressed, equivalent, improved, decided):
    at = {
        name: np.log([[1.0, value, 1.0 if value != 1.1 else value]])
        for name, value in (
            ("regressed", regressed),
            ("accept_equivalence", equivalent),
            ("improved", improved),
        )
    }
    code, blocks = decide(
        EvidencePaths(**at), Thresholds(reject_null=100.0, accept_equivalence=20.0)
    )
    assert (VERDICT_CODES[code[0]], blocks[0]) == decided


def test_equivalence_that_was_once_shown_waits_for_the_improvement_to_fade_and_no_longer():
    at = {
        "regressed": np.zeros((1, 5)),
        "accept_equivalence": np.log([[1.0, 20.0, 1.0, 1.0, 1.0]]),
        "improved": np.log([[1.0, 1.1, 1.1, 1.0, 1.1]]),
    }
    code, blocks = decide(EvidencePaths(**at), Thresholds(accept_equivalence=20.0))
    found, said = (VERDICT_CODES[code[0]], blocks[0]), "shown after block 2, it is ok after block 4"
    assert found == ("ok", 4), f"{said}, where nothing speaks for an improvement: {found}"


@pytest.mark.parametrize(("effect", "most"), [(-0.006, 100.0), (-0.0052, math.e)])
def test_equivalence_of_the_last_block_waits_for_nothing(effect, most):
    effects = [effect] * 8  # a little faster than delta0, which is 0.5 %
    better = wealth([-effect for effect in effects], math.log(1.005), 0.01)
    equivalent = wealth([-effect for effect in effects], -math.log(1.03), 0.01)
    assert 1.0 < better < most <= 100.0 < equivalent
    waiting, ended = (evidence(effects, n_max=most) for most in (9, 8))
    assert (waiting.verdict, waiting.over) == (BenchVerdict.INCONCLUSIVE, False)
    assert (ended.verdict, ended.over) == (BenchVerdict.OK, True), "no further block may come"


def test_estimates():
    # Walsh averages of 0, 1, 5: 0, 0.5, 1, 2.5, 3, 5.
    assert hodges_lehmann([5.0, 0.0, 1.0]) == pytest.approx(1.75)
    assert interval([0.01] * 5) == (-math.inf, math.inf)
    low, high = interval([0.01] * 12)
    assert low < 0.01 < high
    assert high - 0.01 == pytest.approx(0.01 - low, abs=0.0011)
    assert wealth([0.01] * 12, low, 0.01) >= 40 > wealth([0.01] * 12, low + 0.0005, 0.01)
    assert spread([0.01, -0.02, 0.03]) == pytest.approx(1.4826 * 0.02)
    assert spread([0.0]) == pytest.approx(1e-4)
    with pytest.raises(UsageError, match="effects"):
        hodges_lehmann([])


def test_an_interval_is_as_narrow_as_its_case_is_calibrated():
    # From 20 scales on every bet gains its whole stake, and six of 1.85 make 40.
    found = evidence([0.05] * 6, calibrated=0.001)
    assert found.blocks == 6
    said = "the interval bets by the scale of its case's A/A effects, as its verdict does"
    assert math.exp(0.03) < found.low < math.exp(0.05) < found.high < math.exp(0.07), said


def test_what_an_interval_has_left_out_stays_out():
    random = np.random.default_rng(0)
    effects = [*random.normal(0.02, 0.004, 12), *random.normal(-0.01, 0.004, 12)]
    bounds = [interval(effects[:n]) for n in range(6, len(effects) + 1)]
    lows, highs = zip(*bounds, strict=True)
    assert lows[6] > 0  # of the first twelve
    assert list(lows) == sorted(lows)
    assert list(highs) == sorted(highs, reverse=True)


def test_detectable_effect_grows_with_the_noise():
    bounds = Bounds(delta0=0.005, delta1=0.03, n_max=16)
    quiet, loud = ([s * x for x in SLOTS] for s in (0.1, 1.0))
    assert 0.005 < detectable(quiet, bounds) < detectable(loud, bounds) < 0.2
    # 16 blocks show at most 1.85 ** 16 = 18 800.
    asked = [Thresholds(reject_null=least) for least in (20.0, 800.0, 20_000.0)]
    least, more, most = (detectable(loud, bounds, thresholds) for thresholds in asked)
    said = "what a run could have seen is asked at the thresholds of its session"
    assert least < more < most == math.inf, said
    assert detectable(quiet, Bounds(delta0=0.0, delta1=0.03, n_max=3)) == math.inf


def test_margins_table():
    assert len(MARGINS) == len(ROWS)
    assert set(MARGINS) <= set(metrics([PASS]))
    ttft = MARGINS["ttft"]
    assert ttft.bounds(1000.0, 16).delta0 == pytest.approx(math.log(1.02))
    widened = ttft.bounds(20.0, 16)
    assert widened.delta0 == pytest.approx(math.log(1.05))
    assert widened.delta1 - widened.delta0 == pytest.approx(math.log(1.06 / 1.02))
    assert MARGINS["accept_length"].cost(0.5) == pytest.approx(math.log(2))
    with pytest.raises(UsageError, match="level = 0"):
        ttft.bounds(0.0, 16)


@pytest.mark.parametrize(
    ("level", "judged"), [(1000.0, True), (25.0, True), (24.0, False), (9.0, False)]
)
def test_a_floor_that_hides_five_percent_leaves_a_metric_unjudged(level, judged):
    ttft = MARGINS["ttft"]
    assert ttft.is_judged(level) is judged
    assert (ttft.bounds(level, 16).delta0 < math.log(1.05)) or not judged
    assert MARGINS["step_time"].is_judged(level)
    assert all(row.is_judged(level) for row in PHASE_ROWS)


ONE_SIGMA = 0.8413


@pytest.mark.parametrize(
    ("noise", "quantile", "expected"),
    [
        (simulation.ordinary, 0.5, 0.0005),  # of spikes 4 % are above it, too
        (simulation.ordinary, 0.99, 0.1 * math.log(4)),
        (simulation.lognormal, 0.5, 0.03),
        (simulation.lognormal, ONE_SIGMA, 0.03 * math.e),
        (simulation.half_cauchy, 0.5, 0.01),
        (simulation.half_cauchy, 0.75, 0.01 * math.tan(math.pi * 3 / 8)),
        (simulation.bimodal, 1 / 3, 0.0),
        (simulation.bimodal, 5 / 6, 0.04),
        # Of the mean of 16 passes, autocorrelated by 0.7: 4.70 times the variance of independent.
        (simulation.shared_host, ONE_SIGMA, 0.1 * math.sqrt(4.698 / 16)),
    ],
)
def test_each_noise_has_the_size_that_it_says(noise, quantile, expected):
    drawn = noise(np.random.default_rng(7), (100_000, 2))
    assert drawn.shape == (100_000, 2)
    assert np.quantile(drawn, quantile) == pytest.approx(expected, rel=0.02, abs=2e-4)


@pytest.mark.parametrize("name", [n for n in simulation.SCENARIOS if "margin 0" in n])
def test_false_alarms_are_rare_whatever_the_noise(name):
    found = simulation.simulate(simulation.SCENARIOS[name], 3000).by_verdict
    assert found[BenchVerdict.REGRESSED] <= 0.01
    assert found[BenchVerdict.IMPROVED] <= 0.01


@pytest.mark.parametrize(
    ("named", "percent", "blocks"),
    [("margin 0", (0.0, 3.045), 40), ("delta0 0.5 %", (0.5, 3.0), 16),
     ("delta0 1 %", (1.0, 3.0), 16), ("shared host", (0.5, 3.0), 16)],
)  # fmt: skip
def test_a_simulated_margin_is_what_its_name_says(named, percent, blocks):
    found = [scene.bounds for name, scene in simulation.SCENARIOS.items() if named in name]
    shown = {tuple(round(math.expm1(x) * 100, 3) for x in (b.delta0, b.delta1)) for b in found}
    assert (shown, {b.n_max for b in found}) == ({percent}, {blocks})


def test_sessions_of_a_last_batch_that_is_not_full_count(monkeypatch):
    monkeypatch.setattr(simulation, "SESSIONS_AT_ONCE", 4)
    drawn, real = [], simulation.effects

    def effects(scene, sessions, random, **how):
        drawn.append(sessions)
        return real(scene, sessions, random, **how)

    monkeypatch.setattr(simulation, "effects", effects)
    found = simulation.simulate(simulation.SCENARIOS["3% slower, pairs, delta0 1 %"], 10)
    assert drawn == [4, 4, 2]
    assert sum(found.by_verdict.values()) == pytest.approx(1.0)


def test_without_randomised_orders_the_second_place_is_rejected():
    scenario = simulation.SCENARIOS["A/A, lognormal, margin 0"]
    assert (
        simulation.simulate(scenario, 500, randomised=False).by_verdict[BenchVerdict.REGRESSED]
        > 0.1
    )


def test_a_machine_without_noise_shows_the_slowdown_and_its_drift_alone():
    quiet = replace(
        simulation.SCENARIOS["3% slower, pairs, delta0 1 %"],
        noise=lambda random, shape: np.zeros(shape),
    )
    seen = simulation.effects(quiet, 5, np.random.default_rng(1))
    assert np.abs(seen - np.log(1.03)).max() == pytest.approx(simulation.DRIFT)


def test_three_percent_are_found_and_rarely_accepted_as_equivalent():
    found = simulation.simulate(simulation.SCENARIOS["3% slower, quads, delta0 0.5 %"], 4000)
    assert found.by_verdict[BenchVerdict.REGRESSED] >= 0.9 - 0.01
    assert found.by_verdict[BenchVerdict.OK] <= 0.05
    assert 8 <= found.blocks <= 16


def test_short_trials_that_alternate_see_through_a_shared_host():
    shares = {
        (slowdown, design): simulation.simulate(
            simulation.SCENARIOS[f"{slowdown} slower, shared host, {design}"], 1000
        ).by_verdict[BenchVerdict.REGRESSED]
        for slowdown in ("0%", "5%")
        for design in ("pairs", "quads", "thue_morse")
    }
    assert all(shares["0%", design] <= 0.01 for design in ("pairs", "quads", "thue_morse"))
    assert shares["5%", "pairs"] < shares["5%", "quads"] < 0.9 < shares["5%", "thue_morse"]


def test_the_simulation_prints_its_table(capsys):
    assert simulation.main(["--sessions", "20"]) == 0
    assert capsys.readouterr().out.count("\n") == 1 + len(simulation.SCENARIOS)
