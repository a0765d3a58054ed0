"""Every arm is one word, every mistake is named, and a file alone says what a benchmark showed."""

import io
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from fixtures import bench
from fixtures.tables.margins import MARGINS
from fixtures.tables.workloads import DEFAULT, WORKLOADS
from harness.bench import __main__ as compare
from harness.bench import gpu, selfcheck
from harness.bench.arms import parse
from harness.bench.findings import findings
from harness.bench.lines import append
from harness.bench.live import Screen, percent
from harness.bench.plan import Setup
from harness.bench.record import ArmFacts, CasePlan, Role, Session, Trial, Workload
from harness.environment import environment
from harness.errors import ContractError, UsageError
from harness.evidence.blocks import Design, toss
from harness.evidence.conditions import Conditions
from harness.evidence.decision import Thresholds
from harness.evidence.ruling import Ruling

PAIRS = bench.PAIRS


def test_an_embedded_arm_is_a_command_of_serve():
    arm = parse("embedded:pair=mla,spec=v1,slowdown=0.05,num_steps=2")
    words = " ".join(arm.facts().command)
    assert "-m harness serve --pair mla" in words
    for flag in ("--spec v1", "--num-steps 2", "--slowdown 0.05"):
        assert flag in words
    assert "--port" not in words
    assert arm.slows_itself
    assert set(arm.facts().versions) == {"torch"}
    assert parse("embedded:pair=gqa").facts() == parse("embedded:pair=gqa").facts()


def test_the_planted_arm_is_the_same_one_slower():
    arm = parse("embedded:pair=gqa")
    slow = arm.planted(0.05)
    extra = [word for word in slow.facts().command if word not in arm.facts().command]
    assert extra == ["--slowdown", "0.05"]
    assert "--slowdown" not in arm.facts().command


def test_a_sglang_arm_has_a_pair_or_folders(monkeypatch):
    monkeypatch.setattr("harness.bench.arms._version", lambda python, package: f"{package} 9")
    arm = parse("sglang:backend=triton,pair=mla,args=--a 1 --b,python=/x/python,num_steps=2", PAIRS)
    command = arm.facts().command
    assert command[0] == "/x/python"
    assert command[-3:] == ("--a", "1", "--b")
    words = " ".join(command)
    assert f"--model-path {PAIRS['mla'] / 'target'}" in words
    assert f"--speculative-draft-model-path {PAIRS['mla'] / 'draft'}" in words
    assert "--speculative-num-steps 2" in words
    assert "port" not in words
    assert arm.facts().versions == {"sglang": "sglang 9"}
    assert not arm.slows_itself
    plain = parse(f"sglang:target={PAIRS['gqa'] / 'target'},draft=none")
    assert "--speculative-algorithm" not in plain.facts().command
    with pytest.raises(UsageError, match="target=FOLDER"):
        parse("sglang:backend=triton").facts()


def test_an_attached_arm_has_no_command():
    arm = parse("url:http://host:1/")
    assert (arm.url, arm.facts()) == ("http://host:1", ArmFacts(name="url:http://host:1/"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("vllm:x=1", "arm = 'vllm:x=1'"),
        ("url:host", "arm = 'url:host'"),
        ("embedded:pear=gqa", "option of embedded = 'pear=gqa'"),
        ("embedded:pair", "option of embedded = 'pair'"),
        ("embedded:pair=gqa,pair=mla", "option of embedded = 'pair=mla'"),
        ("embedded:slowdown=-1", "slowdown = '-1'"),
        ("sglang:slowdown=much", "slowdown = 'much'"),
        ("sglang:page_size=4", "option of sglang = 'page_size=4'"),
    ],
)
def test_a_word_that_is_no_arm_is_named(spec, message):
    with pytest.raises(UsageError, match=message):
        parse(spec)


def test_an_interpreter_without_the_package_is_named():
    with pytest.raises(ContractError, match="/nowhere/python does not know the version of sglang"):
        parse("sglang:pair=gqa,python=/nowhere/python", PAIRS).facts()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch_size": 0}, "workload"),
        ({"output_len": 1}, "2 output tokens"),
        ({"requests": 3}, "whole batches"),
    ],
)
def test_a_workload_that_cannot_be_run_is_refused(changed, message):
    row = {"id": "x", "batch_size": 2, "input_len": 4, "output_len": 4, "requests": 4} | changed
    arm = parse("url:http://a")
    asked = {"a": arm, "b": arm, "margins": (), "roles": tuple(Role), "seed": "", "design": "AB/BA"}
    with pytest.raises(UsageError, match=message):
        Setup(**asked, workloads=(Workload(**row),), blocks_at_most=1)
    with pytest.raises(UsageError, match="one or more of each"):
        Setup(**asked, workloads=(), blocks_at_most=1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--a", "embedded:"], "b = None"),
        (["--a", "embedded:", "--sessions", "A/B"], "session = 'A/B'"),
        (["--a", "embedded:", "--sessions", "A/A", "--workloads", "x"], "workload = 'x'"),
        (["--a", "what:"], "b = None"),
        (["--a", "what:", "--sessions", "A/A"], "arm = 'what:'"),
        (["--a", "embedded:", "--sessions", "A/A", "--calibration", "no"], "bench records = 'no'"),
    ],
)
def test_a_command_line_that_makes_no_sense_ends_with_2(words, message, capsys):
    assert bench.main(words) == 2
    assert message in capsys.readouterr().err


def test_every_workload_of_the_table_has_its_prompts():
    assert set(DEFAULT) <= set(WORKLOADS)
    made = bench.trials(bench.parser().parse_args(["--a", "embedded:"])).prompts
    for workload in WORKLOADS.values():
        asked = made(workload)
        assert len(asked) == workload.requests
        assert {len(prompt) for prompt in asked} == {workload.input_len}
        assert len({prompt[0] for prompt in asked}) == len(asked)


def _records(path, *, ratio=1.05, blocks=16, mhz=(None, None), counts=({}, {}), role=Role.SAME):
    workload = WORKLOADS["smoke-bs2-in32-out32"]
    bounds = MARGINS["tpot"].bounds(5.0, 16)
    case = CasePlan(workload=workload.id, metric="tpot", bounds=bounds, calibrated=0.01, unit="ms")
    session = Session(
        id="s", role=role, a=ArmFacts(name="a"), b=ArmFacts(name="b"), seed="1",
        design=Design.PAIRS, thresholds=Thresholds(), workloads=(workload,), cases=(case,),
        started="", environment=environment(),
    )  # fmt: skip
    append(path, session)
    for index in range(blocks):
        for place, arm in enumerate(toss("1", index, Design.PAIRS)):
            side = "AB".index(arm)
            trial = Trial(
                session="s", block=index, place=place, arm=arm, workload=workload.id,
                metrics={"tpot": 5.0 * ratio**side}, samples=(), conditions=Conditions(),
                mhz=mhz[side], flush_tries=1, flush_seconds=0.0, invalid=(), started="",
                seconds=1.0, counts=counts[side],
            )  # fmt: skip
            append(path, trial)
    return session, trial


def judged(path):
    (found,) = findings(compare.read(path))
    return found


def test_an_effect_that_is_gone_in_cycles_is_not_believed(tmp_path):
    _records(tmp_path / "same", mhz=(1980.0, 1980.0))
    assert judged(tmp_path / "same").ruling is Ruling.REGRESSED
    _records(tmp_path / "slow_clock", mhz=(1980.0, 1980.0 / 1.06))
    assert judged(tmp_path / "slow_clock").ruling is Ruling.INVALID
    _records(tmp_path / "half", mhz=(1980.0, None))
    assert "mhz: sampled in some trials only" in judged(tmp_path / "half").reasons


@pytest.mark.parametrize(
    ("role", "ruling"), [(Role.SAME, Ruling.INVALID), (Role.CANDIDATE, Ruling.OK)]
)
def test_equal_arms_that_launch_unequal_kernels_are_invalid(tmp_path, role, ruling):
    path = tmp_path / "bench.jsonl"
    _records(path, ratio=1.0, counts=({"kernels": 7}, {"kernels": 8}), role=role)
    assert judged(path).ruling is ruling
    assert judged(path).reasons[0] == "count kernels: A 7, B 8"


def test_records_that_do_not_belong_together_are_refused(tmp_path):
    session, trial = _records(tmp_path / "bench.jsonl", blocks=1)
    with pytest.raises(UsageError, match="trial of session"):
        findings([trial])
    with pytest.raises(UsageError, match="session = 's'"):
        findings([session, session])
    assert findings([session])[0].ruling is Ruling.INCONCLUSIVE


def test_compare_judges_a_file_again(tmp_path, capsys):
    _records(tmp_path / "bench.jsonl", blocks=8)
    assert compare.main([str(tmp_path / "bench.jsonl")]) == 1
    printed = capsys.readouterr().out
    assert "regressed" in printed
    assert "+5.0 %" in printed
    assert "verdict: invalid" in printed  # nobody asked about a candidate
    assert compare.main([str(tmp_path / "none")]) == 2


@pytest.mark.parametrize("terminal", [True, False])
def test_a_screen_shows_bars_and_a_table(tmp_path, terminal):
    session, trial = _records(tmp_path / "bench.jsonl", blocks=2)
    text = io.StringIO()
    with Screen([session], Console(file=text, force_terminal=terminal, width=160)) as screen:
        screen.trial(trial)
        screen.wave([judged(tmp_path / "bench.jsonl")])
    shown = text.getvalue()
    if terminal:
        assert "(inconclusive)" in shown
        assert "1/32" in shown
    else:
        assert shown == "2 blocks, 1 of 1 cases undecided\n"


def test_percent():
    assert percent(1.031) == "+3.1 %"
    assert percent(float("inf")) == percent(0.0) == "…"


def test_a_selfcheck_counts_what_was_left_alone_and_what_was_found(tmp_path):
    _records(tmp_path / "bench.jsonl", blocks=8, role=Role.PLANTED)
    planted = judged(tmp_path / "bench.jsonl")
    _records(tmp_path / "same.jsonl", ratio=1.0)
    same = judged(tmp_path / "same.jsonl")
    good = selfcheck.outcome([same, planted], 61.0)
    assert (good.left_alone, good.found, good.blocks) == (True, True, 8)
    missed = selfcheck.outcome([planted], 1.0)
    assert not missed.left_alone
    swapped = selfcheck.Outcome(same=good.planted, planted=good.same, blocks=1, seconds=1.0)
    assert (swapped.left_alone, swapped.found) == (False, False)
    text = io.StringIO()
    Console(file=text, width=160).print(selfcheck.table([good, swapped]))
    assert "1 of 2 left alone" in text.getvalue()
    assert "1 of 2 found" in text.getvalue()


@pytest.mark.parametrize(("ratio", "code"), [(1.0, 1), (1.05, 0)])
def test_a_selfcheck_runs_the_command_a_user_types(tmp_path, monkeypatch, capsys, ratio, code):
    commands = []

    def bench_run(command, **_):
        commands.append(command)
        out = Path(command[command.index("--out") + 1])
        same, planted = tmp_path / "same", tmp_path / "planted"
        for path, slower, role, name in (
            (same, 1.0, Role.SAME, "x"),
            (planted, ratio, Role.PLANTED, "y"),
        ):
            _records(path, ratio=slower, role=role)
            out.write_text(
                (out.read_text() if out.exists() else "")
                + path.read_text().replace('"s"', f'"{name}"')
            )
            path.unlink()

    @contextmanager
    def launched(spec, log):
        yield SimpleNamespace(url=spec.url)

    monkeypatch.setattr(selfcheck.subprocess, "run", bench_run)
    monkeypatch.setattr(selfcheck, "launch", launched)
    assert selfcheck.main(["--runs", "2", "--out", str(tmp_path / "out")]) == code
    assert [command[1:4] for command in commands] == [["-m", "harness", "bench"]] * 2
    assert all(command[5].startswith("url:http://127.0.0.1:") for command in commands)
    seeds = [command[command.index("--seed") + 1] for command in commands]
    assert seeds == ["selfcheck-0", "selfcheck-1"]
    assert "2 of 2 left alone" in capsys.readouterr().out


def test_lines_that_are_no_records_are_named(tmp_path):
    path = tmp_path / "bench.jsonl"
    _, trial = _records(path, blocks=1)
    whole = path.read_text()
    for line in ("{}", '{"format":1,"kind":"x"}', '{"format":1,"kind":"trial"}', "[]", "nothing"):
        path.write_text(f"{whole}{line}\n")
        with pytest.raises(UsageError, match=r"bench\.jsonl:4: "):
            list(compare.read(path))
    path.write_text(whole + '{"format":1')
    assert list(compare.read(path))[-1] == trial


def test_nvml_is_read(monkeypatch):
    real = gpu.pynvml
    reasons = real.nvmlClocksEventReasonHwPowerBrakeSlowdown | real.nvmlClocksEventReasonSwPowerCap

    def refuse(*_):
        raise real.NVMLError(real.NVML_ERROR_NOT_SUPPORTED)

    answers = {
        "nvmlInit": None, "nvmlDeviceGetHandleByIndex": "handle",
        "nvmlSystemGetDriverVersion": "580.1", "nvmlDeviceGetVbiosVersion": "96",
        "nvmlDeviceGetEccMode": [1, 1], "nvmlDeviceGetCurrPcieLinkWidth": 8,
        "nvmlDeviceGetMaxPcieLinkWidth": 16, "nvmlDeviceGetCurrentClocksEventReasons": reasons,
        "nvmlDeviceGetClockInfo": 1980, "nvmlDeviceGetTemperature": 41,
        "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=5)],
    }  # fmt: skip
    for name, value in answers.items():
        monkeypatch.setattr(real, name, lambda *_, value=value: value)
    monkeypatch.setattr(real, "nvmlDeviceGetMigMode", refuse)
    device = gpu.first()
    assert device.machine == "driver 580.1, VBIOS 96, MIG Not Supported, ECC [1, 1]"
    assert device.pcie_full is False
    assert device.read() == gpu.Reading(
        mhz=1980.0,
        celsius=41.0,
        throttled=("power brake",),
        capped=True,
        processes=frozenset({5}),
    )
