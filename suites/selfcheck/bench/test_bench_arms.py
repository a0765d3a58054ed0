"""Every arm is one word, and every mistake in one is named."""

from itertools import pairwise
from pathlib import Path

import pytest

from fixtures import bench
from fixtures.fakes import synthetic_bench
from fixtures.tables.margins import ROWS as MARGIN_ROWS
from fixtures.tables.workloads import DEFAULT, REAL_SIZE_ROWS, ROWS, WORKLOADS
from harness.bench.arms import parse
from harness.bench.jsonl import append
from harness.bench.plan import Setup
from harness.bench.prompts import prompts
from harness.bench.session_records import ArmFacts, Role, Workload
from harness.bench.stats.design import Design
from harness.errors import ContractError, UsageError

PAIRS = bench.PAIRS
TWICE = f"{DEFAULT[0]},{DEFAULT[0]}"


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


def test_the_slowed_arm_is_the_same_one_slower():
    arm = parse("embedded:pair=gqa")
    slow = arm.slowed(0.05)
    extra = [word for word in slow.facts().command if word not in arm.facts().command]
    assert extra == ["--slowdown", "0.05"]
    assert "--slowdown" not in arm.facts().command


def test_a_slowdown_is_a_fact_of_its_arm_and_one_on_top_multiplies(monkeypatch):
    monkeypatch.setattr("harness.bench.arms._version", lambda python, package: "9")
    arm = parse("sglang:pair=gqa,name=old,slowdown=0.25", PAIRS)
    assert arm.facts().slowdown == 0.25
    twice = arm.slowed(0.2)
    assert twice.facts().slowdown == pytest.approx(1.25 * 1.2 - 1)
    assert twice.spec.endswith(" +20%")
    plain = parse("url:http://a").slowed(0.015)
    assert (plain.facts().slowdown, plain.spec) == (0.015, "url:http://a +1.5%")


@pytest.mark.parametrize(
    ("spec", "delays"),
    [
        ("sglang:shape=wide,slowdown=0.01", "1"),
        ("sglang:target=/a/model,slowdown=0.01", "1"),
        ("sglang:shape=wide", "0"),
        # Its step is the host's work, in which a wait of the GPU would vanish.
        ("sglang:pair=gqa,slowdown=0.01", "0"),
        ("embedded:slowdown=0.01", None),
    ],
)
def test_a_server_whose_step_is_the_gpus_is_slowed_there(spec, delays, tmp_path):
    arm = parse(spec, PAIRS, {"wide": tmp_path})
    assert arm._launch().env.get("SPECGATE_GPU_DELAY") == delays


def test_the_slowed_copy_of_a_shape_waits_on_the_gpu_and_has_an_equal_command(
    monkeypatch, tmp_path
):
    monkeypatch.setattr("harness.bench.arms._version", lambda python, package: "9")
    arm = parse("sglang:shape=wide", PAIRS, {"wide": tmp_path})
    slow = arm.slowed(0.01)
    assert slow._launch().env["SPECGATE_GPU_DELAY"] == "1"
    assert slow.facts().command == arm.facts().command


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


def test_a_folder_whose_name_ends_like_a_port_is_a_fact_of_its_arm(monkeypatch):
    monkeypatch.setattr("harness.bench.arms._version", lambda python, package: "9")
    arm = parse("sglang:target=/models/export,draft=none,backend=fa3")
    words = " ".join(arm.facts().command)
    said = "a plan records what is served and how, whatever its folder is called, without ports"
    assert "--model-path /models/export --attention-backend fa3" in words, said
    assert "--port" not in words, said


def test_a_shape_is_served_with_drawn_weights_and_a_fixed_accept_length(monkeypatch, tmp_path):
    monkeypatch.setattr("harness.bench.arms._version", lambda python, package: "9")
    folders = {"wide": tmp_path / "wide"}
    spec = "sglang:shape=wide,backend=specgate_mha,max_running_requests=8,args=--page-size 32"
    arm = parse(spec, PAIRS, folders)
    words = " ".join(arm.facts().command)
    assert (arm.pair, arm.shape) == (None, "wide"), f"shape=wide is no pair: {arm.pair}"
    said = "a shape is served from its own folder with drawn weights"
    assert f"--model-path {tmp_path}/wide/target" in words, f"{said}: {words}"
    assert f"--speculative-draft-model-path {tmp_path}/wide/draft" in words, f"{said}: {words}"
    for flag in ("--load-format dummy", "--skip-tokenizer-init", "--max-running-requests 8"):
        assert flag in words, f"a shape is served with {flag}: {words}"
    assert words.endswith("--page-size 32"), f"args of a spec come last: {words}"
    simulated = {name: value for name, value in arm._launch().env.items() if "SIMULATE_ACC" in name}
    said = "drawn drafts of a shape are accepted at a fixed length, 3, by SGLANG_SIMULATE_ACC_LEN"
    assert simulated == {
        "SGLANG_SIMULATE_ACC_LEN": "3",
        "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
    }, f"{said} and _METHOD, not {simulated}"
    others = [name for name in parse("sglang:", PAIRS)._launch().env if "SIMULATE" in name]
    assert not others, f"drafts of a pair are judged, and no accept length is simulated: {others}"
    with pytest.raises(UsageError, match="accept_length = 5 is not accepted; accepted: at most 4"):
        parse("sglang:shape=wide,accept_length=5", PAIRS, folders).facts()


@pytest.mark.parametrize(
    ("words", "injected"),
    [
        (["--a", "sglang:shape=llama-3.1-8b"], 0.01),
        (["--a", "sglang:shape=llama-3.1-8b", "--injected", "0.02"], 0.02),
        (["--a", "sglang:pair=gqa"], 0.05),
        (["--a", "embedded:", "--injected", "0.1"], 0.1),
    ],
)
def test_a_shape_is_slowed_by_its_margin_unless_said(words, injected):
    asked = bench.setup(bench.parser().parse_args([*words, "--sessions", "injected"]))
    said = "the injected slowdown is the margin that cases are judged by, unless it is given"
    assert asked.slowdown == injected, said
    assert asked.arms(Role.INJECTED)["B"].slowdown == injected


def test_with_a_slowed_reference_the_candidate_is_the_faster_arm(capsys):
    arm = "sglang:shape=llama-3.1-8b"
    words = ["--a", f"{arm},slowdown=0.01", "--b", arm]
    asked = bench.setup(bench.parser().parse_args(words))
    said = "the injected control of a shape is as small as the margin of its cases"
    assert asked.slowdown == asked.margins[0].delta1, said
    slowdowns = {
        role: [side.slowdown for side in asked.arms(role).values()] for role in asked.roles
    }
    injected = slowdowns.pop(Role.INJECTED)
    said = "arm B of the injected control has the injected slowdown on top of arm A's own"
    assert injected == [0.01, pytest.approx(1.01 * 1.01 - 1)], f"{said}, 1.01 * 1.01: {injected}"
    said = "arm A is slowed by its own slowdown, and arm B in A/A alone"
    due = {Role.CANDIDATE: [0.01, 0.0], Role.SAME: [0.01, 0.01]}
    assert slowdowns == due, f"{said}, not {slowdowns}"


def test_arms_of_two_shapes_are_refused(capsys):
    words = ["--a", "sglang:shape=llama-3.1-8b", "--b", "sglang:pair=gqa"]
    assert bench.main(words) == 2
    assert "shape of b = None is not accepted; accepted: llama-3.1-8b" in capsys.readouterr().err


def test_a_shape_is_asked_workloads_of_real_size(capsys):
    words = ["--a", "sglang:shape=deepseek-v2-lite", "--sessions", "A/A", "--dry-run"]
    assert bench.main(words) == 0
    said = capsys.readouterr().out
    assert (
        "each on bs1-in128-out193, bs8-in1024-out97: thue_morse_8, 1 to 4 passes per trial" in said
    )
    asked = bench.setup(bench.parser().parse_args(words))
    assert [margin.metric for margin in asked.margins] == ["step_time"]
    assert asked.margins[0].delta1 == 0.01
    given = bench.setup(bench.parser().parse_args([*words, "--design", "pairs", "--passes", "4"]))
    assert (asked.sized, asked.passes) == (True, None)
    assert (given.design, given.sized, given.passes) == (Design.PAIRS, True, 4)
    toy = bench.setup(bench.parser().parse_args(["--a", "embedded:", "--sessions", "A/A"]))
    assert (toy.design, toy.passes, toy.margins) == (Design.QUADS, 3, MARGIN_ROWS)
    assert not toy.sized


@pytest.mark.parametrize(("given", "captured"), [("", "8"), (",max_running_requests=4", "4")])
def test_a_shape_captures_no_larger_batch_than_it_is_asked(given, captured):
    spec = f"sglang:shape=deepseek-v2-lite{given}"
    words = ["--a", spec, "--b", f"{spec},backend=specgate_mla"]
    asked = bench.setup(bench.parser().parse_args(words))
    for arm in (asked.a, asked.b):
        command = arm._launch().argv
        for flag in ("--max-running-requests", "--cuda-graph-max-bs-decode"):
            assert command[command.index(flag) + 1] == captured
        # A server is started in the repository, wherever the benchmark is.
        assert Path(command[command.index("--model-path") + 1]).is_absolute()


@pytest.mark.parametrize(
    ("spec", "gpus"),
    [
        ("sglang:shape=kimi-k2-4-layers", "4"),
        ("sglang:shape=kimi-k2-4-layers,tp_size=8", "8"),
        ("sglang:pair=gqa,tp_size=2", "2"),
        ("sglang:shape=llama-3.1-8b", None),
    ],
)
def test_a_server_is_shared_by_the_gpus_of_its_shape_unless_said(spec, gpus):
    asked = bench.setup(bench.parser().parse_args(["--a", spec, "--sessions", "A/A"]))
    command = asked.a._launch().argv
    told = dict(pairwise(command))
    assert told.get("--tp-size") == gpus


def test_an_interpreter_below_home_says_which_release_it_runs(tmp_path, monkeypatch):
    python = tmp_path / "python-0.5.13"
    python.write_text("#!/bin/sh\necho 0.5.13\n")
    python.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    arm = parse("sglang:pair=gqa,python=~/python-0.5.13", bench.PAIRS)
    command = arm._launch().argv
    assert command[0] == str(python)
    assert "--cuda-graph-max-bs" in command
    assert arm.facts().versions == {"sglang": "0.5.13"}


def test_ranks_that_share_a_gpu_are_nodes_of_one_script():
    command = parse("sglang:pair=mla,tp_size=2,one_gpu=on", bench.PAIRS)._launch().argv
    assert (Path(command[1]).name, command[2]) == ("one_gpu.py", "2")
    assert "--tp-size" not in command


@pytest.mark.parametrize("row", REAL_SIZE_ROWS, ids=lambda row: row.id)
def test_every_prompt_of_a_shape_begins_with_a_token_of_its_own(row):
    made = prompts(row, bench.drawn_text())
    assert {len(prompt) for prompt in made} == {row.input_len}
    assert len({prompt[0] for prompt in made}) == row.requests
    assert all(token in bench.DRAWN_IDS for prompt in made for token in prompt[:64])


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
        ("sglang:num_steps=x", "option of sglang = 'num_steps=x' is not accepted; accepted: 1 or"),
        ("embedded:num_pages=0", "option of embedded = 'num_pages=0'"),
        ("embedded:pair=gpa", "pair of embedded = 'gpa' is not accepted; accepted: gqa, mla"),
        ("sglang:pair=gpa", "pair of sglang = 'gpa'"),
        ("sglang:shape=llama", "shape of sglang = 'llama'"),
        ("sglang:pair=gqa,target=/x", "model of sglang = 'pair, target' is not .*: one of them"),
        ("embedded:shape=x", "option of embedded = 'shape=x'"),
        ("sglang:one_gpu=on", "option of sglang = 'one_gpu=on' is not .*: with tp_size=2 or more"),
        ("sglang:tp_size=2,one_gpu=1", "'one_gpu=1' is not accepted; accepted: one_gpu=on, or"),
    ],
)
def test_a_word_that_is_no_arm_is_named(spec, message):
    with pytest.raises(UsageError, match=message):
        parse(spec, PAIRS)


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
    with pytest.raises(UsageError, match=r"workloads = '' is not .* one or more, each once"):
        Setup(**asked, workloads=(), blocks_at_most=1)
    with pytest.raises(UsageError, match="blocks_at_most = 0 is not accepted; accepted: 1 or more"):
        Setup(**asked, workloads=tuple(WORKLOADS.values()), blocks_at_most=0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--a", "embedded:"], "b = None"),
        (["--a", "embedded:", "--sessions", "A/B"], "session = 'A/B'"),
        (["--a", "embedded:", "--sessions", "A/A", "--workloads", "x"], "workload = 'x'"),
        (["--a", "what:"], "b = None"),
        (["--a", "what:", "--sessions", "A/A"], "arm = 'what:'"),
        (["--a", "embedded:", "--sessions", "A/A", "--calibration", "no"], "bench records = 'no'"),
        (["--a", "embedded:", "--sessions", "A/A,A/A"], "sessions = 'A/A,A/A'"),
        (["--a", "embedded:", "--sessions", "A/A", "--workloads", TWICE], f"workloads = '{TWICE}'"),
        (["--a", "embedded:", "--sessions", "A/A", "--injected", "10.5"], "injected = 10.5"),
    ],
)
def test_a_command_line_that_makes_no_sense_ends_with_2(words, message, capsys):
    assert bench.main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "values", "accepted"),
    [
        (word, ["0", "-1", "1.5", "x", ""], "1 or more")
        for word in ("--blocks-at-most", "--side-by-side", "--warm-ups", "--passes")
    ]
    + [(word, ["0", "-3", "nan", "x"], "a number above 0") for word in ("--seconds", "--injected")],
)
def test_a_number_that_makes_no_sense_is_named(word, values, accepted, capsys):
    for value in values:
        with pytest.raises(SystemExit, match="2"):
            bench.main(["--a", "embedded:", f"{word}={value}"])
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.endswith(f"argument {word}: {value!r} is not accepted; accepted: {accepted}")


def test_as_many_servers_at_a_time_as_are_asked_for(tmp_path, monkeypatch):
    asked = []

    class Run:
        def __init__(self, *, side_by_side, **_):
            asked.append(side_by_side)

        def run(self):
            raise UsageError("nothing is measured here")

    monkeypatch.setattr(bench, "BenchRun", Run)
    monkeypatch.setattr(bench, "raise_priority", lambda: None)  # would outlive the test
    words = ["--a=embedded:", "--sessions=A/A", f"--out={tmp_path / 'bench.jsonl'}"]
    for more in ((), ("--side-by-side=1",), ("--side-by-side=99",)):
        assert bench.main([*words, *more]) == 2
    told = "--side-by-side is how many servers run at a time, few or many, of a pair usually 12"
    assert asked == [12, 1, 99], f"{told}: {asked}"


def test_a_run_goes_on_where_every_session_is_as_begun(tmp_path, monkeypatch):
    compared = []
    monkeypatch.setattr(bench.plan, "check_resumed", lambda plans, _: compared.extend(plans))
    out = tmp_path / "bench.jsonl"
    for line in synthetic_bench.run_lines({}):
        append(out, line)
    words = ["--a=embedded:", "--b=embedded:", f"--out={out}", "--resume"]
    options = bench.parser().parse_args(words)
    bench.begun(options, bench.setup(options))
    told = "a plan is compared in every session of the file, not in one"
    assert {session.role for session in compared} == {*Role}, told


def test_a_margin_stays_as_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(bench.plan, "check_resumed", lambda *_: None)
    out = tmp_path / "bench.jsonl"
    for line in synthetic_bench.run_lines({}):
        append(out, line)

    def begun(*more):
        words = ["--a=embedded:", "--b=embedded:", f"--out={out}", "--resume", *more]
        options = bench.parser().parse_args(words)
        return bench.begun(options, bench.setup(options))

    assert begun() == begun("--margin=0.03")
    told = "--margin = 0.02 is not accepted; accepted: 0.03, as begun"
    with pytest.raises(UsageError, match=told):
        begun("--margin=0.02")


def test_a_dry_run_shows_sessions_and_leaves_nothing(tmp_path, capsys):
    sides = ["--a", "embedded:name=old", "--b", "sglang:backend=fa3", "--blocks-at-most", "5"]
    asked = [*sides, "--workloads", "bs1-in128-out64,smoke-bs2-in32-out32", "--injected", "0.1"]
    assert bench.main([*asked, "--out", str(tmp_path / "bench.jsonl"), "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "candidate: A = embedded:name=old, B = sglang:backend=fa3",
        "A/A: A = embedded:name=old, B = embedded:name=old",
        "injected: A = embedded:name=old, B = embedded:name=old +10%",
        "each on bs1-in128-out64, smoke-bs2-in32-out32: quads, "
        "3 passes per trial after 2 warm-ups, at most 5 blocks per case",
        "at most 62 launches and 124 trials, about 10 min "
        "at 5 s per launch and 10 or 2 ms per token",
        "cases that are decided early take less, dropped blocks come on top",
    ]
    assert not [*tmp_path.iterdir()]


def test_every_workload_of_the_table_has_its_prompts():
    assert set(DEFAULT) <= set(WORKLOADS)
    options = bench.parser().parse_args(["--a", "embedded:", "--sessions", "A/A"])
    made = bench.trials(bench.setup(options)).prompts
    for workload in ROWS:
        asked = made(workload)
        assert len(asked) == workload.requests
        assert {len(prompt) for prompt in asked} == {workload.input_len}
        assert len({prompt[0] for prompt in asked}) == len(asked)
