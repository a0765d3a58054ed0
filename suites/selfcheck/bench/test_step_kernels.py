"""Kernels of a step are counted as the trace of a server tells, once every request decodes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from rich.console import Console

from fixtures import campaign, step_kernels
from fixtures.fakes.stub_server import Asked, Reply, StubServer
from fixtures.step_kernels import UNDER_WAY, Spent
from fixtures.tables.workloads import WORKLOADS
from harness.errors import ServerError
from harness.server.client.sglang import Client

TRACE = {
    "traceEvents": [
        {"ph": "X", "cat": "kernel", "name": "void a::gemm<1>(int)", "dur": 30.0},
        {"ph": "X", "cat": "kernel", "name": "void a::gemm<1>(int)", "dur": 10.0},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoD", "dur": 4.0},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "dur": 500.0},
        {"ph": "M", "name": "process_name"},
    ]
}
EIGHT = WORKLOADS["bs8-in1024-out97"]
EVENT = {
    "output_ids": [7],
    "meta_info": {
        "prompt_tokens": 1,
        "completion_tokens": 1,
        "cached_tokens": 0,
        "finish_reason": {"type": "length"},
    },
}


def test_a_step_is_a_share_of_the_trace():
    assert step_kernels.spent(TRACE, 4) == {
        "void a::gemm<1>(int)": Spent(0.5, 10.0),
        "Memcpy DtoD": Spent(0.25, 1.0),
    }


@pytest.mark.parametrize("requests", [1, 8])
def test_a_profile_begins_when_the_last_request_decodes(requests, monkeypatch):
    monkeypatch.setattr(step_kernels, "LAST_S", 0.1)
    workload = next(w for w in WORKLOADS.values() if w.batch_size == requests)
    begun: list[int] = []
    prompts: list[tuple[int, ...]] = []

    def pieces():
        for number in range(UNDER_WAY + 4):
            begun.append(number)
            yield f"data: {json.dumps(EVENT)}\n\n"
        yield "data: [DONE]\n\n"

    def answer(asked: Asked) -> Reply:
        if asked.path == "/start_profile":
            assert len(prompts) == requests
            assert begun[-1] >= UNDER_WAY
            assert (asked.body["num_steps"], asked.body["activities"]) == (5, ["GPU"])
            text = json.dumps(TRACE).encode()
            path = Path(asked.body["output_dir"], "1-TP-0.trace.json.gz")
            path.write_bytes(gzip.compress(text)[:-9])  # not written to its end
            path.write_bytes(gzip.compress(text))
            return Reply(body="Start profiling.")
        prompts.append(tuple(asked.body["input_ids"]))
        if asked.body.get("stream"):
            assert len(prompts) == requests  # it was asked last
            return Reply(pieces=pieces())
        return Reply(body=EVENT)

    with StubServer(answer) as server:
        found = step_kernels.profiled(Client(server.url), workload, 5)
        assert [asked.path for asked in server.asked].count("/start_profile") == 1
    assert [len(prompt) for prompt in prompts] == [workload.input_len] * requests
    assert len({prompt[0] for prompt in prompts}) == requests
    assert found["void a::gemm<1>(int)"] == Spent(0.4, 8.0)


@pytest.mark.parametrize("path", ["/generate", "/start_profile"])
def test_a_server_that_refuses_says_why(path):
    def answer(asked: Asked) -> Reply:
        if asked.path == path:
            return Reply(500, "out of luck")
        if asked.body.get("stream"):
            return Reply(pieces=[f"data: {json.dumps(EVENT)}\n\n"] * 9)
        return Reply(body=EVENT)

    with StubServer(answer) as server, pytest.raises(ServerError, match="out of luck"):
        step_kernels.profiled(Client(server.url), EIGHT, 5)


def test_a_batch_of_which_a_request_is_refused_is_not_counted(monkeypatch):
    monkeypatch.setattr(step_kernels, "LAST_S", 0.0)

    def answer(asked: Asked) -> Reply:
        if asked.path == "/start_profile":
            path = Path(asked.body["output_dir"], "1-TP-0.trace.json.gz")
            path.write_bytes(gzip.compress(json.dumps(TRACE).encode()))
            return Reply(body="Start profiling.")
        if asked.body.get("stream"):
            event = f"data: {json.dumps(EVENT)}\n\n"
            return Reply(pieces=[event] * 9 + ["data: [DONE]\n\n"])
        return Reply(503, "7 of 8 wait for ever")

    told = "kernels of a smaller batch than was asked for are no kernels of the workload"
    with StubServer(answer) as server, pytest.raises(ServerError, match="7 of 8 wait"):
        pytest.fail(f"{told}: {step_kernels.profiled(Client(server.url), EIGHT, 5)}")


def test_a_server_that_writes_no_trace_is_told(monkeypatch):
    monkeypatch.setattr(step_kernels, "WRITTEN_S", 0.1)
    reply = Reply(pieces=[f"data: {json.dumps(EVENT)}\n\n"] * 9 + ["data: [DONE]\n\n"])
    with (
        StubServer(lambda _: reply) as server,
        pytest.raises(ServerError, match="no trace of its profiler, not within"),
    ):
        step_kernels.profiled(Client(server.url), WORKLOADS["bs1-in128-out193"], 5)


def test_a_trace_half_written_is_waited_for(tmp_path):
    text = json.dumps(TRACE).encode()
    path = tmp_path / "1-TP-0.trace.json.gz"
    assert step_kernels._written(tmp_path) is None
    for part in (gzip.compress(text)[:-12], gzip.compress(text[:-5])):
        path.write_bytes(part)
        assert step_kernels._written(tmp_path) is None
    path.write_bytes(gzip.compress(text))
    assert step_kernels._written(tmp_path) == TRACE


def test_what_differs_most_comes_first_and_all_of_it_last():
    a = {"void x::gemm(int)": Spent(32, 900.0), "copy": Spent(32, 64.0)}
    b = {"void x::gemm(int)": Spent(32, 903.0), "fill": Spent(1, 2.0)}
    console = Console(width=160, record=True)
    console.print(step_kernels.table("row, workload", a, b))
    lines = [line.split() for line in console.export_text().splitlines()]
    rows = [line for line in lines if line and line[0] in ("gemm(int)", "copy", "fill", "all")]
    assert [row[0] for row in rows] == ["copy", "gemm(int)", "fill", "all"]
    assert rows[0][1:] == ["32.0", "64.0", "0.0", "0.0", "-64.0"]
    assert rows[-1][1:] == ["64.0", "964.0", "33.0", "905.0", "-59.0"]


def test_a_campaign_prints_them_and_leaves_them(tmp_path, capsys, monkeypatch):
    asked = []

    def compare(row, gib, logs):
        asked.append((row.id, logs))
        yield "bs1", ({"k": Spent(2, 5.0)}, {"k": Spent(1, 3.0)})
        assert json.loads((out / "mla-fa3.kernels.json").read_text()).keys() == {"bs1"}
        yield "bs8", ({"k": Spent(4, 9.0)}, {"k": Spent(1, 3.0)})

    monkeypatch.setattr(step_kernels, "compare", compare)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    out = tmp_path / "out"
    assert campaign.main(["mla-fa3", "--kernels", "--out", str(out)]) == 0
    assert asked == [("mla-fa3", out)]
    left = json.loads((out / "mla-fa3.kernels.json").read_text())
    of_b = {"k": {"launches": 1, "us": 3.0}}
    assert left == {
        "bs1": [{"k": {"launches": 2, "us": 5.0}}, of_b],
        "bs8": [{"k": {"launches": 4, "us": 9.0}}, of_b],
    }
    printed = capsys.readouterr().out
    assert "-2.0" in printed
    assert "-6.0" in printed


def test_a_campaign_without_a_gpu_has_none(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(campaign.nvml, "count", lambda: 0)
    assert campaign.main(["mla-fa3", "--kernels", "--out", str(tmp_path / "none")]) == 2
    assert "GPUs of this machine = 0" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
