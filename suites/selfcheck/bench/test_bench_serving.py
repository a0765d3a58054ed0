"""A pass may be a run of sglang's own load generator; what it writes is the pass, or a reason."""

import json
import sys

import pytest

from fixtures import bench
from harness.bench.arms import parse
from harness.bench.bench_serving import BenchServing, passed, workload
from harness.bench.jsonl import from_json, to_json
from harness.bench.measure import TrialMaker, TrialSlot
from harness.bench.metrics import metrics
from harness.errors import ContractError, UsageError
from harness.server.client.flush import Flushed

RESULT = {
    "duration": 0.5,
    "output_lens": [5, 4, 1],
    "ttfts": [0.02, 0.03, 0.07],
    # The first sends a token, then two at once, then two; the second a token, then three at once.
    "itls": [[0.004, 0.004, 0.006, 0.006], [0.005, 0.005, 0.005], []],
    "errors": ["", "", ""],
    "accept_length": 2.5,
    "request_rate": float("inf"),
}
SLOT = TrialSlot(session="candidate", block=0, place=0, arm="A")
# A stand-in for an interpreter: the arguments that are passed through say what it does.
PROGRAM = """#!{python}
import json, os, sys, time
module, words = sys.argv[2], sys.argv[3:]
told = dict(word.partition("=")[::2] for word in words)
with open({asked!r}, "a") as file:
    file.write(json.dumps([module, *words]) + "\\n")
if "--slow" in words:
    time.sleep(60)
if "--moved" in words and module == "sglang.bench_serving":
    sys.exit("python: No module named sglang.bench_serving")
if "--wrong" in words:
    print("usage: bench_serving.py")
    sys.exit("bench_serving.py: error: unrecognized arguments: --wrong")
if "--silent" not in words:
    with open(told["--output-file"], "a") as file:
        file.write(open({result!r}).read() + "\\n")
print("All done")
"""


@pytest.fixture
def program(tmp_path):
    """An interpreter's path, and what it was asked for; ``result`` beside it is what it writes."""
    files = {"python": sys.executable, "asked": f"{tmp_path}/asked", "result": f"{tmp_path}/result"}
    (tmp_path / "result").write_text(json.dumps(RESULT))
    path = tmp_path / "python"
    path.write_text(PROGRAM.format(**files))
    path.chmod(0o755)

    def asked():
        return [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]

    return str(path), asked


def failed(**changed):
    return passed(json.dumps(RESULT | changed))


def test_a_result_is_a_pass_by_hand():
    one = failed()
    assert (one.failures, one.seconds, one.accept_length) == ((), 0.5, 2.5)
    assert [sample.ttft_ms for sample in one.samples] == pytest.approx([20, 30, 70])
    assert [sample.latency_ms for sample in one.samples] == pytest.approx([40, 45, 70])
    assert one.samples[0].chunk_gaps_ms == pytest.approx((8.0, 12.0))
    assert one.samples[1].chunk_gaps_ms == pytest.approx((15.0,))
    # Four tokens in 20 ms, three in 15 ms, and one token alone has no TPOT; ten in half a second.
    assert metrics([one]) == pytest.approx(
        {
            "ttft": 30.0,
            "ttft_p99": 70.0,
            "tpot": 5.0,
            "tpot_p99": 5.0,
            "itl": 12.0,
            "output_throughput": 20.0,
            "accept_length": 2.5,
        }
    )


def test_accept_lengths_of_passes_are_pooled_and_one_that_is_unknown_leaves_none():
    # Ten tokens in four steps, and ten in five.
    pooled = metrics([failed(), failed(accept_length=2.0)])
    assert pooled["accept_length"] == pytest.approx(20 / 9)
    assert "accept_length" not in metrics([failed(), failed(accept_length=None)])


def test_where_all_tokens_come_at_once_there_is_no_tpot():
    assert not {"tpot", "tpot_p99", "itl"} & metrics([failed(itls=[[], [], []])]).keys()


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"errors": ["", "Bad Request: too long", ""]}, "request 1: Bad Request: too long"),
        ({"errors": ["Traceback\n  x\nOSError: gone\n", "", ""]}, "request 0: OSError: gone"),
        ({"output_lens": [5, 4, 0]}, "request 2: no text came"),
        ({"ttfts": [0.02, 0.0, 0.07]}, "request 1: no text came"),
    ],
)
def test_a_request_that_failed_is_a_failure_with_its_reason(changed, why):
    one = failed(**changed)
    assert one.failures == (why,)
    assert len(one.samples) == 2
    assert metrics([one]) == {}


@pytest.mark.parametrize(
    ("changed", "error", "why"),
    [
        ({"itls": [[]]}, ContractError, r"requests of bench_serving = \[1, 3\]"),
        ({"output_lens": [], "ttfts": [], "itls": [], "errors": []}, ContractError, r"= \[0\]"),
        ({"ttfts": None}, UsageError, "ttfts = 'None' is not accepted"),
    ],
)
def test_a_result_without_its_requests_is_refused(changed, error, why):
    with pytest.raises(error, match=why):
        failed(**changed)


def test_the_id_of_a_load_follows_from_its_words_alone():
    one = workload("--num-prompts  4 --dataset-path 'a b'")
    assert one == workload("--num-prompts 4 --dataset-path a\\ b")
    assert one.bench_serving == ("--num-prompts", "4", "--dataset-path", "a b")
    assert one.id != workload("--num-prompts 4 --dataset-path a b").id
    # sha256sum of "--num-prompts", a zero byte, "4".
    assert workload("--num-prompts 4").id == "bench-serving-5a556644"


@pytest.mark.parametrize(
    "word",
    ["--base-url=http://x", "--host", "--port", "--output-file", "--backend", "--warmup-requests",
     "--flush-cache", "--output-details", "--disable-stream", "--base", "--output-f=x"],
)  # fmt: skip
def test_an_argument_that_is_ours_is_named(word, capsys):
    words = ["--a=embedded:", "--sessions=A/A", f"--bench-serving=--num-prompts 3 {word} x"]
    assert bench.main(words) == 2
    said = capsys.readouterr().err
    assert f"bench-serving = {word!r} is not accepted; accepted: any option but --backend" in said


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--a=embedded:", "--bench-serving=--tag 'x"], 'bench-serving = "--tag \'x" is not acc'),
        (["--a=sglang:shape=llama-3.1-8b", "--bench-serving="], "arms without a shape"),
    ],
)
def test_a_load_that_cannot_be_sent_is_told(words, why, capsys):
    assert bench.main([*words, "--sessions=A/A"]) == 2
    assert why in capsys.readouterr().err


def test_a_dry_run_says_what_it_does_not_know(capsys):
    load = ["--bench-serving=--num-prompts 4", "--blocks-at-most=5", "--design=pairs"]
    words = ["--a=embedded:", "--sessions=A/A", "--dry-run", "--warm-ups=1", "--passes=2"]
    assert bench.main([*words, *load]) == 0
    said = capsys.readouterr().out
    assert "each on bench-serving-5a556644: pairs" in said
    # Twelve servers of 5 s, twelve trials of 0.2 s, and three starts of the program for each.
    assert "at most 12 launches and 12 trials, about 8 min" in said
    assert "the requests of sglang.bench_serving and dropped blocks come on top" in said


def test_one_interpreter_loads_both_arms():
    def asked(a, b):
        words = ["--bench-serving=", f"--a={a}", f"--b=embedded:{b}"]
        return bench.trials(bench.setup(bench.parser().parse_args(words))).bench_serving.python

    assert asked("url:http://h:1", "python=old/python") == "old/python"
    both = asked("embedded:python=new/python", "python=old/python")
    assert both == "new/python", f"where both arms name an interpreter, A's loads both: {both}"
    assert asked("url:http://h:1", "") == sys.executable


class Server:
    url, pid = "http://server:7", None

    def wait_ready(self):
        return 0.0


def trial(python, arguments, **changed):
    made = TrialMaker(
        prompts=lambda _: pytest.fail("nobody needs our prompts"),
        warm_ups=1,
        passes=2,
        connect=lambda _: pytest.fail("nobody needs our client"),
        empty=lambda _: Flushed(tries=1, seconds=0.0),
        bench_serving=BenchServing(python=python, **changed),
    )
    return made.run(SLOT, parse("embedded:"), Server(), workload(arguments))


def test_a_trial_is_warmed_up_and_every_pass_is_a_run(program):
    python, asked = program
    found = trial(python, "--num-prompts 3 --tag 'x y'")
    assert found.invalid == ()
    assert found.metrics["tpot"] == pytest.approx(5.0)
    assert (len(found.samples), found.flush_tries, found.counts) == (6, 2, {})
    conditions = found.conditions
    assert (conditions.failed, conditions.output_tokens) == (0, 20)
    assert (conditions.cached_tokens, conditions.flushed) == (None, None)
    assert from_json(to_json(found)) == found
    assert len(asked()) == 3
    for module, *words in asked():
        assert module == "sglang.bench_serving"
        assert words[:4] == ["--num-prompts", "3", "--tag", "x y"]
        assert {"--backend=sglang", "--base-url=http://server:7", "--output-details"} < {*words}
        assert "--warmup-requests=0" in words


def test_a_request_that_failed_makes_the_trial_invalid(program, tmp_path):
    (tmp_path / "result").write_text(json.dumps(RESULT | {"errors": ["", "", "503: gone"]}))
    found = trial(program[0], "")
    assert found.metrics == {}
    assert found.invalid == ("request 2: 503: gone",) * 2
    assert found.conditions.failed == 2


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        ("--wrong", 1, "bench_serving.py: error: unrecognized arguments: --wrong"),
        ("--silent", 0, "All done"),
    ],
)
def test_a_program_that_does_not_end_well_is_told_with_its_last_line(program, arguments, code, why):
    found = trial(program[0], arguments)
    told = f"ContractError: sglang.bench_serving of {program[0]} ended with {code}: {why}"
    assert (found.invalid, found.metrics) == ((told,), {})


def test_an_interpreter_that_is_not_there_is_told():
    [why] = trial("/no/such/python", "").invalid
    assert "of /no/such/python ended with 127: cannot start /no/such/python" in why


def test_a_run_without_an_end_is_ended(program):
    [why] = trial(program[0], "--slow", patience_s=0.5).invalid
    assert why == f"ContractError: {program[0]} did not end within 0.5 s"


def test_its_new_name_is_asked_where_the_old_one_is_gone(program):
    python, asked = program
    assert trial(python, "--moved").invalid == ()
    modules = [module for module, *_ in asked()]
    assert modules == ["sglang.bench_serving", "sglang.benchmark.serving"] * 3


def test_it_runs_in_the_folder_of_its_user(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    script = tmp_path / "where"
    script.write_text("#!/bin/sh\npwd\nexit 3\n")
    script.chmod(0o755)
    with pytest.raises(ContractError, match=f"ended with 3: {tmp_path}/here"):
        BenchServing(python=str(script))("http://server", workload(""))
