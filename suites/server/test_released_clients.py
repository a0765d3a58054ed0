"""Released clients of sglang and OpenAI work against the embedded server."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Timer

import pytest
import requests

from ci import clients
from harness.bench.arms import parse
from harness.bench.bench_serving import BenchServing, workload
from harness.bench.measure import TrialMaker, TrialSlot
from harness.server.http import protocol
from harness.server.launch.process import ROOT
from suites.server.released_client import ENDED

pytestmark = pytest.mark.untraced
HERE = Path(__file__).parent
SGLANG, OPENAI = HERE / "released_client.py", HERE / "openai_client.py"
ABSENT = "no released clients in .tox/clients: python -m ci.clients installs them"
PROMPTS, INPUT, OUTPUT, WARMUP = 6, 24, 8, 1
SEND_ONE = "Human: Give me a fully functional FastAPI server. Show the python code.\n\nAssistant:"
"""The prompt that ``sglang.test.send_one`` has by itself."""
NEW = 24
GENERATED = "sglang:generation_tokens_total"
COUNTED = (GENERATED, "sglang:spec_verify_total")

Run = Callable[..., str]


@pytest.fixture(scope="session")
def interpreter() -> Path:
    """Of the clients' environment."""
    found = clients.python()
    if found is None:
        pytest.skip(ABSENT)
    return found


@pytest.fixture
def run(interpreter: Path, tmp_path: Path) -> Run:
    """What a script prints that ends well."""

    def call(script: Path, *words: object) -> str:
        done = subprocess.run(
            [interpreter, script, *map(str, words)],
            cwd=tmp_path,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    return call


@pytest.fixture(scope="module")
def run_again(interpreter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """As ``run``, of sglang's clients alone: one process, which takes seconds to import them."""
    folder = tmp_path_factory.mktemp("client")
    with (
        (folder / "errors.txt").open("w+") as errors,
        subprocess.Popen(
            [interpreter, SGLANG],
            cwd=folder,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as client,
    ):

        def call(*words: object) -> str:
            assert client.stdin
            assert client.stdout
            print(json.dumps([*map(str, words)]), file=client.stdin, flush=True)
            said = []
            late = Timer(120, client.kill)
            late.start()
            for line in client.stdout:
                if line == f"{ENDED}\n":
                    late.cancel()
                    return "".join(said)
                said.append(line)
            late.cancel()
            errors.seek(0)
            pytest.fail(f"{''.join(said)[-2000:]}{errors.read()[-2000:]}")

        yield call
        client.communicate(timeout=120)
        assert client.returncode == 0, (folder / "errors.txt").read_text()[-2000:]


def counters(server) -> dict[str, float]:
    text = requests.get(f"{server.url}/metrics", timeout=5).text
    return {name: float(value) for name, value in re.findall(r"^(sglang:\w+) (\S+)$", text, re.M)}


def generated(server, prompt: str, new: int, *, ignore_eos: bool) -> str:
    sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": ignore_eos}
    body = {"text": prompt, "sampling_params": sampling}
    return requests.post(f"{server.url}/generate", json=body, timeout=60).json()["text"]


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "sglang-oai-chat"])
def test_bench_serving_completes_what_it_asks(embedded_server, run_again, tmp_path, backend):
    before = counters(embedded_server)[GENERATED]
    told = tmp_path / "told.jsonl"
    options = {
        "backend": backend,
        "base-url": embedded_server.url,
        "dataset-name": "random-ids",
        "num-prompts": PROMPTS,
        "random-input-len": INPUT,
        "random-output-len": OUTPUT,
        "random-range-ratio": 1.0,
        "warmup-requests": WARMUP,
        "output-file": told,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    printed = run_again("sglang.bench_serving", *words, "--output-details", "--flush-cache")
    assert re.search(rf"Successful requests: +{PROMPTS}\b", printed)
    result = json.loads(told.read_text(encoding="utf-8"))
    assert result["completed"] == PROMPTS
    assert result["errors"] == [""] * PROMPTS
    assert result["output_lens"] == [OUTPUT] * PROMPTS
    assert all(result["generated_texts"])
    assert result["accept_length"] > 1
    assert counters(embedded_server)[GENERATED] - before == (PROMPTS + WARMUP) * OUTPUT


def test_a_trial_is_loaded_by_bench_serving(embedded_server, interpreter, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    python = tmp_path / "python"  # runs a module without the engine's requirements
    python.write_text(f'#!/bin/sh\nshift\nexec "{interpreter}" "{SGLANG}" "$@"\n')
    python.chmod(0o755)
    shape = f"--random-input-len {INPUT} --random-output-len {OUTPUT} --random-range-ratio 1.0"
    load = workload(
        f"--dataset-name random-ids --num-prompts {PROMPTS} {shape} --max-concurrency 2"
    )
    made = TrialMaker(
        prompts=lambda _: (), warm_ups=1, passes=1, bench_serving=BenchServing(python=str(python))
    )
    before = counters(embedded_server)
    slot = TrialSlot(session="candidate", block=0, place=0, arm="A")
    trial = made.run(slot, parse("embedded:"), embedded_server.running, load)
    assert trial.invalid == ()
    assert [sample.completion_tokens for sample in trial.samples] == [OUTPUT] * PROMPTS
    generated, steps = (counters(embedded_server)[name] - before[name] for name in COUNTED)
    assert generated == 2 * PROMPTS * OUTPUT
    for sample in trial.samples:
        assert 0 < sample.ttft_ms < sample.latency_ms < 1e3 * trial.seconds
        assert 2 <= len(sample.chunk_gaps_ms) < OUTPUT
    assert trial.metrics["tpot"] > 0
    # The warm-up has sent the same requests, which took the same steps.
    assert trial.metrics["accept_length"] == pytest.approx(2 * PROMPTS * OUTPUT / steps)


@pytest.mark.parametrize("stream", [False, True])
def test_send_one_prints_what_generate_answers(embedded_server, run, stream):
    words = ["--base-url", embedded_server.url, "--max-new-tokens", NEW]
    printed = run(SGLANG, "sglang.test.send_one", *words, *(["--stream"] if stream else []))
    assert generated(embedded_server, SEND_ONE, NEW, ignore_eos=False) in printed
    [row] = [line for line in printed.splitlines() if re.match(r"\| +\d", line)]
    _, tokens, accepted, _ = (float(cell) for cell in row.strip("|").split("|"))
    assert tokens == NEW
    assert accepted > 1


def test_the_openai_package_gets_what_generate_answers(embedded_server, run):
    prompt = "def first(items):\n    return"
    found = json.loads(run(OPENAI, embedded_server.url, prompt, NEW))
    text = generated(embedded_server, prompt, NEW, ignore_eos=True)
    assert found["texts"] == dict.fromkeys(found["texts"], text)
    assert found["completed"] == [NEW] * 4
    assert min(found["chunks"]) > 3
    refused = found["refused"]
    assert (refused["param"], refused["type"]) == ("temperature", "BadRequest")
    assert "temperature = 0.7 is not accepted; accepted: null, 0" in refused["message"]


INTERNAL = {
    "SamplingParams": {
        "ebnf_full_assistant",
        "is_normalized",
        "stop_regex_max_len",
        "stop_regex_strs",
        "stop_str_max_len",
        "stop_strs",
    }
}
"""What sglang itself fills in."""


@pytest.mark.parametrize(
    ("model", "path", "names"),
    [
        (protocol.GenerateRequest, "managers/io_struct.py", ("GenerateReqInput",)),
        (protocol.SamplingParams, "sampling/sampling_params.py", ("SamplingParams",)),
        (
            protocol.CompletionRequest,
            "entrypoints/openai/protocol.py",
            ("CompletionRequest", "PDRoutingFields"),
        ),
        (
            protocol.ChatCompletionRequest,
            "entrypoints/openai/protocol.py",
            ("ChatCompletionRequest", "PDRoutingFields"),
        ),
    ],
    ids=["generate", "sampling", "completion", "chat"],
)
def test_every_field_of_released_sglang_is_known(interpreter, model, path, names):
    [source] = interpreter.parents[1].glob(f"lib/python*/site-packages/sglang/srt/{path}")
    fields = set()
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name in names:
            declared = {one.target.id for one in node.body if isinstance(one, ast.AnnAssign)}
            fields |= {name for name in declared if not name.startswith("_")}
            fields -= INTERNAL.get(node.name, set())
    assert len(fields) > 20
    assert fields <= set(model.model_json_schema()["properties"])


def test_an_environment_counts_once_it_is_whole(monkeypatch, tmp_path):
    codes = [1, 0]
    asked = []

    def install(command, **_):
        asked.append(command)
        return subprocess.CompletedProcess(command, codes.pop(0))

    monkeypatch.setattr(clients, "CLIENTS_FOLDER", tmp_path)
    monkeypatch.setattr(clients, "STAMP", tmp_path / "stamp")
    monkeypatch.setattr(clients.venv, "create", lambda folder, **_: folder.mkdir(exist_ok=True))
    monkeypatch.setattr(clients.subprocess, "run", install)
    assert (clients.main([]), clients.python()) == (1, None)
    assert (clients.main([]), clients.python()) == (0, tmp_path / "bin" / "python")
    assert (clients.main([]), len(asked)) == (0, 2)
    assert "--no-deps" in asked[0]
    monkeypatch.setattr(clients, "_wanted", lambda: "other pins")
    assert clients.python() is None


def test_pins_agree_with_the_lanes():
    def pins(name: str) -> dict[str, str]:
        lines = (ROOT / "ci" / name).read_text(encoding="utf-8").splitlines()
        return dict(line.lower().split("==") for line in lines if "==" in line)

    lanes = pins("constraints.txt") | pins("constraints-cpu.txt")
    theirs = pins("clients.txt")
    shared = lanes.keys() & theirs.keys()
    assert {"numpy", "requests", "tokenizers"} <= shared
    assert {name: theirs[name] for name in shared} == {name: lanes[name] for name in shared}
