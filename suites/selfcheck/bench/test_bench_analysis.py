"""A file of records alone says what a benchmark showed, and what in it is no record."""

import gzip
import json
import math
from dataclasses import replace

import pytest
from rich.console import Console

from fixtures import bench
from fixtures.fakes import synthetic_bench
from fixtures.tables.margins import MARGINS
from fixtures.tables.workloads import WORKLOADS
from harness.bench import __main__ as compare
from harness.bench.analysis import SLOWED, dropped, findings, verdict, visible
from harness.bench.analysis_blocks import blocks_of
from harness.bench.jsonl import append, from_json, read, to_json
from harness.bench.plan import scales
from harness.bench.session_records import ArmFacts, CasePlan, Role, Session, Trial
from harness.bench.stats.bench_verdict import BenchVerdict
from harness.bench.stats.design import Design, draw_order
from harness.bench.stats.margin import Bounds
from harness.bench.stats.stopping import Thresholds
from harness.bench.stats.validity import Conditions
from harness.core.environment import environment
from harness.core.paths import ROOT
from harness.errors import UsageError

BOUNDS = MARGINS["tpot"].bounds(5.0, 16)
EXAMPLE = ROOT / "docs" / "example" / "gqa.jsonl.gz"


def records(
    path,
    *,
    ratio=1.05,
    blocks=16,
    mhz=(None, None),
    capped=0.0,
    counts=({}, {}),
    role=Role.SAME,
    lost=(),
    design=Design.PAIRS,
    bounds=BOUNDS,
    **plan,
):
    workload = WORKLOADS["smoke-bs2-in32-out32"]
    case = CasePlan(workload=workload.id, metric="tpot", bounds=bounds, calibrated=0.01, unit="ms")
    session = Session(
        id="s", role=role, a=ArmFacts(name="a"), b=ArmFacts(name="b"), seed="1",
        design=design, thresholds=Thresholds(), workloads=(workload,), warm_ups=2,
        passes=1, cases=(case,), started="", environment=environment(),
    )  # fmt: skip
    session = replace(session, **plan)
    append(path, session)
    trial = None
    for index in range(blocks):
        failed = ("NotReady: it ended with 137",) if index in lost else ()
        for place, arm in enumerate(draw_order("1", index, design)):
            side = "AB".index(arm)
            gone = failed if side else ()
            trial = Trial(
                session="s", block=index, place=place, arm=arm, workload=workload.id,
                metrics={} if gone else {"tpot": 5.0 * ratio**side}, samples=(),
                conditions=Conditions(mhz=mhz[side], capped=capped),
                flush_tries=1, flush_seconds=0.0, invalid=gone, started="",
                seconds=1.0, counts={} if gone else counts[side],
            )  # fmt: skip
            append(path, trial)
    return session, trial


def judged(path):
    (found,) = findings(read(path))
    return found


@pytest.mark.parametrize(
    ("unit", "verdict"),
    [("us", BenchVerdict.INVALID), ("ms", BenchVerdict.INVALID), ("tok", BenchVerdict.REGRESSED)],
)
def test_every_time_is_asked_in_cycles_and_nothing_else(tmp_path, unit, verdict):
    bounds = Bounds(delta0=0.001, delta1=0.006, n_max=16)
    case = CasePlan(
        workload="smoke-bs2-in32-out32", metric="tpot", bounds=bounds, calibrated=0.01, unit=unit
    )
    clocks = (1980.0, 1980.0 / 1.009)
    records(tmp_path / "bench.jsonl", ratio=1.008, mhz=clocks, cases=(case,))
    assert judged(tmp_path / "bench.jsonl").verdict is verdict


def test_an_effect_that_is_gone_in_cycles_is_not_believed(tmp_path):
    narrow = Bounds(delta0=0.001, delta1=0.006, n_max=16)
    records(tmp_path / "same", ratio=1.008, mhz=(1980.0, 1980.0), bounds=narrow)
    assert judged(tmp_path / "same").verdict is BenchVerdict.REGRESSED
    records(tmp_path / "slow_clock", ratio=1.008, mhz=(1980.0, 1980.0 / 1.009), bounds=narrow)
    slow_clock = judged(tmp_path / "slow_clock")
    assert slow_clock.verdict is BenchVerdict.INVALID
    assert slow_clock.reasons[0] == "time and cycles disagree on the sign"
    records(tmp_path / "half", mhz=(1980.0, None))
    assert "mhz: asked of some trials only" in judged(tmp_path / "half").reasons


def test_a_block_without_clocks_among_clocked_ones_is_dropped(tmp_path):
    session, trial = records(tmp_path / "bench.jsonl", blocks=1)
    clocked = [
        replace(trial, place=place, arm=arm, conditions=Conditions(mhz=mhz))
        for place, arm, mhz in ((0, "A", 1980.0), (1, "B", 1975.0))
    ]
    bare = [replace(one, block=1, conditions=Conditions()) for one in clocked]
    first, second = blocks_of(session, [*clocked, *bare], session.cases[0])
    rule = "a block without clocks is dropped where others have them"
    assert second.invalid == ("mhz: sampled in some trials only",), f"{rule}: {second.invalid}"
    assert first.mhz == (1980.0, 1975.0), f"a block with clocks keeps them, not {first.mhz}"
    assert first.invalid == (), f"a block with clocks counts, not dropped for {first.invalid}"
    [alone] = blocks_of(session, bare, session.cases[0])
    assert alone.invalid == (), f"where no block has clocks, none is dropped for {alone.invalid}"


def test_under_a_power_cap_an_effect_that_is_gone_in_cycles_is_not_withdrawn(tmp_path):
    narrow = Bounds(delta0=0.001, delta1=0.006, n_max=16)
    records(
        tmp_path / "capped", ratio=1.008, mhz=(1980.0, 1980.0 / 1.009), capped=0.6, bounds=narrow
    )
    assert judged(tmp_path / "capped").verdict is BenchVerdict.REGRESSED


def test_a_candidate_that_is_not_believed_says_why(tmp_path, capsys):
    narrow = Bounds(delta0=0.001, delta1=0.006, n_max=16)
    path = tmp_path / "bench.jsonl"
    clocks = (1980.0, 1980.0 / 1.009)
    records(path, ratio=1.008, mhz=clocks, role=Role.CANDIDATE, bounds=narrow)
    compare.show(read(path), Console(width=100))
    told = "s/smoke-bs2-in32-out32/tpot: time and cycles disagree on the sign"
    assert told in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("role", "verdict"), [(Role.SAME, BenchVerdict.INVALID), (Role.CANDIDATE, BenchVerdict.OK)]
)
def test_equal_arms_that_launch_unequal_kernels_are_invalid(tmp_path, role, verdict):
    path = tmp_path / "bench.jsonl"
    records(path, ratio=1.0, counts=({"kernels": 7}, {"kernels": 8}), role=role)
    assert judged(path).verdict is verdict
    assert judged(path).reasons[0] == "count kernels: A 7, B 8"


@pytest.fixture(scope="module")
def found():
    """Findings of a run whose controls are as they should be."""
    return findings(synthetic_bench.run_lines(), detectable_too=False)


def test_a_workload_whose_slowdown_nobody_saw_is_not_vouched_for_by_another(found):
    assert not verdict(found).reasons
    unseen = Role.INJECTED, synthetic_bench.WORKLOADS[1].id
    blind = [
        f.with_evidence(replace(f.evidence, verdict=BenchVerdict.OK))
        if (f.role, f.workload.id) == unseen
        else f
        for f in found
    ]
    assert verdict(blind).reasons == ("control injected slowdown: ok instead of regressed",)


def test_a_slowdown_that_one_of_the_slowed_metrics_shows_is_seen(found):
    (first, *_) = [f for f in found if f.role is Role.INJECTED and f.metric in SLOWED]
    blind = first.with_evidence(replace(first.evidence, verdict=BenchVerdict.OK))
    others = [f for f in found if f is not first]
    other = replace(first, metric=next(name for name in SLOWED if name != first.metric))
    assert not verdict([blind, other, *others]).reasons
    assert not verdict([other, blind, *others]).reasons


def test_equal_arms_that_differ_in_any_metric_make_a_run_invalid(found):
    same = [f for f in found if f.role is Role.SAME and not f.is_part]
    assert len(same) > 1
    for alarmed in same:
        alarm = alarmed.with_evidence(replace(alarmed.evidence, verdict=BenchVerdict.REGRESSED))
        run = verdict([alarm if f is alarmed else f for f in found])
        told = ("control A/A: regressed instead of ok or inconclusive",)
        assert run.reasons == told, f"of equal arms {alarmed.id} alone is regressed"


def test_a_run_says_why_its_control_failed(tmp_path):
    path = tmp_path / "bench.jsonl"
    counts = ({"spec_verify_ct": 52}, {"spec_verify_ct": 53})
    records(path, counts=counts, role=Role.INJECTED)
    injected = findings(read(path))
    records(tmp_path / "same", ratio=1.0)
    same = findings(read(tmp_path / "same"))
    records(tmp_path / "candidate", ratio=1.0, role=Role.CANDIDATE)
    run = verdict([*injected, *same, *findings(read(tmp_path / "candidate"))])
    told = (
        "control injected slowdown: invalid instead of regressed (count spec_verify_ct: A 52, B 53)"
    )
    assert run.reasons == (told,)


@pytest.mark.parametrize("pair", [(0, 1), (2, 3)], ids=["first", "second"])
def test_every_trial_of_an_arm_is_counted(tmp_path, pair):
    path, other = tmp_path / "bench.jsonl", tmp_path / "other.jsonl"
    records(other, counts=({"spec_verify_ct": 52},) * 2, ratio=1.0, design=Design.QUADS)
    for line in read(other):
        is_of_pair = isinstance(line, Trial) and line.place in pair
        changed = is_of_pair and (line.block, line.arm) == (5, "B")
        append(path, replace(line, counts={"spec_verify_ct": 51}) if changed else line)
    found = judged(path).reasons
    assert found == ("count spec_verify_ct: A 52, B 51",), "each pair of trials is compared"


@pytest.mark.parametrize("lost", [3, 5], ids=["first of its block", "last of its block"])
def test_a_launch_that_failed_loses_its_block_alone(tmp_path, lost):
    path = tmp_path / "bench.jsonl"
    counts = {"spec_verify_ct": 52}
    records(path, counts=(counts, counts), role=Role.INJECTED, lost=(lost,))
    found = judged(path)
    assert found.verdict is BenchVerdict.REGRESSED
    assert len(found.effects) == 15
    assert found.reasons[0] == "NotReady: it ended with 137"
    assert not [why for why in found.reasons if why.startswith("count")]


def test_blocks_after_one_that_failed_are_counted(tmp_path):
    path = tmp_path / "bench.jsonl"
    records(path, ratio=1.0, counts=({"kernels": 7}, {"kernels": 8}), lost=(0,))
    told = "equal arms that launch unequal kernels after a block that failed are invalid"
    assert judged(path).verdict is BenchVerdict.INVALID, told
    assert judged(path).reasons[0] == "count kernels: A 7, B 8"


@pytest.mark.parametrize("calibrated", [0.002, 0.05])
def test_first_blocks_are_bet_on_with_the_noise_that_the_plan_was_calibrated_with(
    tmp_path, calibrated
):
    session, _ = records(tmp_path / "other.jsonl", blocks=0)
    case = replace(session.cases[0], calibrated=calibrated)
    records(tmp_path / "bench.jsonl", ratio=1.02, blocks=1, cases=(case,))
    excess = math.log(1.02) - math.log(1.005)  # delta0 of a TPOT is 0.5 %
    bets = [1 + 0.85 * math.tanh(rate * excess / calibrated) for rate in (0.5, 1, 2, 4)]
    found = judged(tmp_path / "bench.jsonl").evidence.e_regressed
    assert found == pytest.approx(sum(bets) / 4), "a bet is in units of the calibrated scale"


@pytest.mark.parametrize(("blocks", "is_enough"), [(2, False), (3, True)])
def test_three_blocks_of_equal_arms_tell_their_noise(tmp_path, blocks, is_enough):
    records(tmp_path / "bench.jsonl", ratio=1.0, blocks=blocks)
    found = judged(tmp_path / "bench.jsonl")
    assert (found.mde is not None) is is_enough, "three A/A blocks tell what a run could have seen"
    assert bool(scales([found])) is is_enough, "three A/A blocks calibrate a later run"


def test_of_a_metric_the_workload_is_told_that_sees_it_worst(tmp_path):
    records(tmp_path / "bench.jsonl", blocks=1, role=Role.CANDIDATE)
    one = judged(tmp_path / "bench.jsonl")
    case = replace(one.case, bounds=Bounds(delta0=0.001, delta1=math.log(1.03), n_max=16))
    found = [
        replace(one, case=case, workload=replace(one.workload, id=name), mde=math.log(seen))
        for name, seen in (("low", 1.02), ("high", 1.05), ("middle", 1.03))
    ]
    assert visible(found) == "seen of what must be: tpot 5.0 % of 3.0 % (high)"


def test_the_noise_of_a_workload_blinds_no_other():
    calm, noisy = (workload.id for workload in synthetic_bench.WORKLOADS)
    lines = []
    for line in synthetic_bench.run_lines():
        if isinstance(line, Session):
            cases = tuple(case for case in line.cases if case.metric == "tpot")
            line = replace(line, cases=cases)
        elif (line.session, line.workload, line.arm) == (Role.SAME, noisy, "B"):
            times = 1.2 if line.block % 2 else 1 / 1.2
            line = replace(line, metrics={"tpot": line.metrics["tpot"] * times})
        lines.append(line)
    found = verdict(findings(lines)).findings
    judged = {f.workload.id: f for f in found if f.role is Role.CANDIDATE}
    hidden = {name: f.mde > f.case.bounds.delta1 for name, f in judged.items()}
    said = "a workload's candidate is judged by the noise of its own A/A case"
    assert hidden == {calm: False, noisy: True}, f"{said}: hidden by noise are {hidden}"
    verdicts = {name: f.verdict for name, f in judged.items()}
    due = {calm: BenchVerdict.OK, noisy: BenchVerdict.BLIND}
    assert verdicts == due, f"{said}: {verdicts}"


def test_records_that_do_not_belong_together_are_refused(tmp_path):
    session, trial = records(tmp_path / "bench.jsonl", blocks=1)
    with pytest.raises(UsageError, match="trial of session"):
        findings([trial])
    with pytest.raises(UsageError, match="session = 's'"):
        findings([session, session])
    assert findings([session])[0].verdict is BenchVerdict.INCONCLUSIVE


def test_compare_judges_a_file_again(tmp_path, capsys):
    records(tmp_path / "bench.jsonl", blocks=8)
    assert compare.main([str(tmp_path / "bench.jsonl")]) == 1
    printed = capsys.readouterr().out
    assert "regressed" in printed
    assert "+5.0 %" in printed
    assert "verdict: invalid\n  no candidate was measured\n" in printed
    assert compare.main([str(tmp_path / "none")]) == 2


BUSY = "load: 0.02 to 0.79, accepted: others under half the cores"


def test_compare_says_why_blocks_were_dropped(tmp_path, capsys):
    path, quiet = tmp_path / "bench.jsonl", tmp_path / "quiet.jsonl"
    records(quiet, blocks=8, lost=(0, 6))
    for line in read(quiet):
        busy = isinstance(line, Trial) and line.block in (3, 4)
        load = Conditions(load=0.79 if line.place else 0.02) if busy else None
        quieter = load or (Conditions(load=0.02) if isinstance(line, Trial) else None)
        append(path, replace(line, conditions=quieter) if quieter else line)
    gone = "2 × NotReady: it ended with 137"
    assert dropped([judged(path)]) == [
        f"s smoke-bs2-in32-out32: 4 of 8 blocks dropped: {gone}; 2 × {BUSY}"
    ]
    compare.main([str(path)])
    assert f"2 × {BUSY}" in " ".join(capsys.readouterr().out.split())


def test_alike_reasons_are_told_once_with_their_largest_numbers(tmp_path):
    path = tmp_path / "bench.jsonl"
    records(path, blocks=3)
    odd = [
        replace(block, invalid=(f"load: {0.6 + block.index / 10:g}, accepted: less\nlog\n",))
        for block in judged(path).blocks
    ]
    evidence = replace(judged(path).evidence, dropped=3)
    found = replace(judged(path), blocks=tuple(odd), evidence=evidence)
    assert dropped([found]) == [
        "s smoke-bs2-in32-out32: 3 of 3 blocks dropped: 3 × load: 0.8, accepted: less"
    ]


@pytest.mark.parametrize(
    ("numbers", "largest"),
    [
        (("9", "2", "10", "3"), "10"),
        (("0.1 to 0.55", "0.02 to 0.79", "0.3 to 0.51", "0.5"), "0.02 to 0.79"),
    ],
)
def test_the_largest_number_is_no_matter_of_its_digits_or_its_place(tmp_path, numbers, largest):
    records(tmp_path / "bench.jsonl", blocks=4)
    found = judged(tmp_path / "bench.jsonl")
    blocks = [
        replace(block, invalid=(f"seen: {number}, accepted: less",))
        for block, number in zip(found.blocks, numbers, strict=True)
    ]
    found = replace(found, blocks=tuple(blocks), evidence=replace(found.evidence, dropped=4))
    [told] = dropped([found])
    assert f" × seen: {largest}, accepted: less" in told, "the worst of alike reasons is told"


def test_a_change_without_a_block_is_none(tmp_path, capsys):
    records(tmp_path / "bench.jsonl", blocks=2, lost=(0, 1))
    assert compare.main([str(tmp_path / "bench.jsonl")]) == 1
    printed = capsys.readouterr().out
    assert "0/16" in printed
    assert "+0.0 %" not in printed


def test_nothing_is_truncated_at_80_columns(capsys):
    assert compare.main([str(EXAMPLE)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    [row] = [line for line in lines if line.startswith("output_throughput improved")]
    assert " ".join(row.split()) == (
        "output_throughput improved +33.9 % +31.4 to +35.8 % 137 +5.2 % 8/16"
    )
    assert "…" not in "".join(lines)


def test_the_night_of_the_example_is_judged_as_it_was():
    run = verdict(findings(read(EXAMPLE)))
    said = {(f.role, f.metric): f.verdict for f in run.findings}
    assert said[Role.CANDIDATE, "step_time"] is BenchVerdict.IMPROVED
    rule = "a case whose noise would have hidden a TTFT that is 20 % worse is blind, not ok"
    assert said[Role.CANDIDATE, "ttft"] is BenchVerdict.BLIND, rule
    assert run.verdict is BenchVerdict.BLIND, "a night with a blind case is blind"
    assert said[Role.INJECTED, "step_time"] is BenchVerdict.REGRESSED
    assert said[Role.SAME, "step_time"] is BenchVerdict.INCONCLUSIVE
    assert said[Role.CANDIDATE, "accept_length"] is said[Role.SAME, "ttft"] is BenchVerdict.OK


def test_packed_records_are_read_and_not_added_to(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "raise_priority", lambda: None)  # would outlive the test
    packed = tmp_path / "bench.jsonl.gz"
    packed.write_bytes(EXAMPLE.read_bytes()[:-100])
    assert compare.main([str(packed)]) == 2
    assert "bench.jsonl.gz' is not accepted; accepted: a whole .gz file" in capsys.readouterr().err
    assert bench.main(["--a=embedded:", "--sessions=A/A", f"--out={packed}", "--resume"]) == 2
    assert "accepted: a file that is not packed" in capsys.readouterr().err


def test_a_flipped_byte_of_packed_records_is_told_in_one_line(tmp_path):
    packed = tmp_path / "bench.jsonl.gz"
    data = bytearray(gzip.compress(b"{}\n"))
    data[10] |= 0b110  # Of the first block behind the header: a type that there is not.
    packed.write_bytes(data)
    with pytest.raises(UsageError, match=r"accepted: a whole \.gz file of JSON lines"):
        list(read(packed))


def test_a_busy_machine_is_told_before_anything_starts(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "raise_priority", lambda: None)  # would outlive the test
    monkeypatch.setattr(bench, "busy", lambda: (BUSY,))

    def begins(_):
        raise UsageError("here it begins")

    monkeypatch.setattr(bench, "trials", begins)
    out = tmp_path / "bench.jsonl"
    assert bench.main(["--a=embedded:", "--sessions=A/A", f"--out={out}"]) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert said == f"warning: {BUSY}: such blocks are dropped"


def test_lines_that_are_no_records_are_named(tmp_path):
    path = tmp_path / "bench.jsonl"
    _, trial = records(path, blocks=1)
    whole = path.read_text()
    last = json.loads(to_json(trial))
    for line, field in (
        ("{}", "kind = "),
        ('{"format":3,"kind":"x"}', "kind = "),
        ("[]", "line = "),
        ("nothing", "line = 'nothing' is not accepted; accepted: Invalid JSON"),
        (json.dumps(last | {"format": 2, "block": "x"}), "trial.format = '2' is not accepted"),
        (json.dumps(last | {"block": "x"}), "trial.block = 'x' is not accepted"),
        (json.dumps(last | {"mhz": 1.0}), "trial.mhz = '1.0' is not accepted"),
        (json.dumps(last | {"conditions": {"load": "1"}}), "trial.conditions.load = '1' is not"),
    ):
        path.write_text(f"{whole}{line}\n")
        with pytest.raises(UsageError) as raised:
            list(read(path))
        assert f"bench.jsonl:4: {field}" in str(raised.value)
        assert "\n" not in str(raised.value)
    path.write_text(whole + '{"format":3')
    assert list(read(path))[-1] == trial


def test_a_reason_with_a_separator_of_lines_stays_one_line(tmp_path):
    _, trial = records(tmp_path / "bench.jsonl", blocks=1)
    odd = replace(trial, invalid=("503: \u2028 \x85 \x0b",))
    append(tmp_path / "bench.jsonl", odd)
    assert list(read(tmp_path / "bench.jsonl"))[2:] == [trial, odd]


def test_infinities_come_back_as_they_were(tmp_path):
    session, trial = records(tmp_path / "bench.jsonl", blocks=1)
    odd = replace(trial, metrics={"tpot": math.inf, "ttft": -math.inf}, seconds=math.inf)
    assert from_json(to_json(odd)) == odd
    assert from_json(to_json(session)) == session


def test_a_block_that_was_cut_off_counts_as_it_was_measured_again(tmp_path):
    records(tmp_path / "bench.jsonl")
    lines = list(read(tmp_path / "bench.jsonl"))
    place = next(i for i, one in enumerate(lines) if isinstance(one, Trial) and one.block == 2)
    cut_off = replace(lines[place], metrics={"tpot": 99.0})
    again = [*lines[:place], cut_off, *lines[place:]]
    assert [f.evidence for f in findings(again)] == [f.evidence for f in findings(lines)]


def test_blocks_are_in_their_order_whichever_was_measured_first(tmp_path):
    session, _ = records(tmp_path / "bench.jsonl", blocks=3)
    trials = [line for line in read(tmp_path / "bench.jsonl") if isinstance(line, Trial)]
    later = sorted(trials, key=lambda trial: (trial.block == 0, -trial.place))
    (case,) = session.cases
    said = "block 0 is the first although it was measured, backwards, after the others"
    assert blocks_of(session, later, case) == blocks_of(session, trials, case), said
