"""CUDA graphs are recorded aside, own their memory, hold every step, and refuse host syncs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from fixtures.drivers.replays import Replays
from harness.core.case import Mode
from harness.differential.forward import tensors
from harness.errors import CaptureViolation, ContractError
from harness.graphs.cuda import CudaGraph

SLEEP = 20_000_000
"""Cycles; some ten milliseconds."""


def doubling(cuda: torch.device) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
    x = torch.arange(1024, device=cuda, dtype=torch.float32)
    return x, lambda: x * 2 + 1


def captured(graph: CudaGraph, run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """As a runner does it: kernels are loaded before the capture."""
    graph.warm_up(run)
    return graph.capture(run)


def read(x: torch.Tensor) -> object:
    return x.sum().item()


def copy_to_host(x: torch.Tensor) -> object:
    return x.cpu()


def select_by_mask(x: torch.Tensor) -> object:
    return x[x > 3]


def wait(x: torch.Tensor) -> object:
    torch.cuda.synchronize(x.device)
    return x


@pytest.mark.parametrize("act", [read, copy_to_host, select_by_mask, wait])
def test_what_waits_for_the_device_is_refused_and_the_stream_goes_on(
    act: Callable[[torch.Tensor], object], cuda: torch.device
) -> None:
    x, run = doubling(cuda)
    act(run())
    graph = CudaGraph(cuda)
    with pytest.raises(CaptureViolation) as refused:
        graph.capture(lambda: act(x * 2))
    assert "\n" not in str(refused.value)
    if act is not wait:
        assert f"{__file__}:{act.__code__.co_firstlineno + 1}" in str(refused.value)
    with pytest.raises(ContractError, match="after its capture"):
        graph.replay()
    assert run()[3].item() == 7
    again = CudaGraph(cuda)
    out = captured(again, run)
    x.fill_(5)
    again.replay()
    assert out.unique().tolist() == [11]


def test_a_graph_is_captured_once(cuda: torch.device) -> None:
    _, run = doubling(cuda)
    graph = CudaGraph(cuda)
    captured(graph, run)
    with pytest.raises(ContractError, match="captured once"):
        graph.capture(run)


def test_capture_and_warm_up_wait_for_the_work_before_them(cuda: torch.device) -> None:
    x, run = doubling(cuda)
    torch.cuda._sleep(SLEEP)
    x.fill_(3)
    graph, seen = CudaGraph(cuda), []
    graph.warm_up(lambda: seen.append(run()))
    assert seen[0].unique().tolist() == [7]
    torch.cuda._sleep(SLEEP)
    x.fill_(4)
    out = graph.capture(run)
    torch.cuda._sleep(SLEEP)
    x.fill_(5)
    graph.replay()
    assert out.unique().tolist() == [11]


@pytest.mark.parametrize("shared", [False, True])
def test_outputs_outlive_the_replays_of_other_graphs(shared: bool, cuda: torch.device) -> None:
    new_graph = CudaGraph.sharing_a_pool(cuda) if shared else partial(CudaGraph, cuda)
    x, run = doubling(cuda)
    graphs = [new_graph() for _ in range(3)]
    outs = [captured(graph, lambda i=i: run() + i) for i, graph in enumerate(graphs)]
    for value in (2, 9):
        x.fill_(value)
        for graph in graphs:
            graph.replay()
        assert [out.unique().tolist() for out in outs] == [[2 * value + 1 + i] for i in range(3)]


def test_a_shared_pool_is_smaller_and_its_graphs_are_right(cuda: torch.device) -> None:
    def reserved(new_graph: Callable[[], CudaGraph]) -> tuple[int, list[torch.Tensor]]:
        x = torch.full((1 << 24,), 3.0, device=cuda)
        runs = [lambda i=i: ((x * 2).exp().log() + i).sum() for i in range(3)]
        graphs = [new_graph() for _ in runs]
        for graph, run in zip(graphs, runs, strict=True):
            graph.warm_up(run)
        torch.cuda.empty_cache()  # what the warm-up took is no graph's
        before = torch.cuda.memory_reserved(cuda)
        outs = [graph.capture(run) for graph, run in zip(graphs, runs, strict=True)]
        for graph in graphs:
            graph.replay()
        return torch.cuda.memory_reserved(cuda) - before, outs

    shared, outs = reserved(CudaGraph.sharing_a_pool(cuda))
    private, own = reserved(partial(CudaGraph, cuda))
    assert shared < private / 2
    assert [out.item() for out in outs] == [out.item() for out in own]


@torch.no_grad()
def test_two_runners_replayed_by_turns_do_not_disturb_each_other(cuda: torch.device) -> None:
    modes = (Mode.TARGET_VERIFY, Mode.MULTI_STEP_DRAFT)
    runners = [
        Replays(subject, mode, cuda)
        for subject in ("trtllm_mha/xqa", "trtllm_mla/flash_mla")
        for mode in modes
    ]
    drawn = [(replays, replays.draw()) for replays in runners]
    alone = [replays.runner.replay(batch) for replays, batch in drawn]
    for _ in range(10):
        for (replays, batch), due in zip(drawn, alone, strict=True):
            output = tensors(replays.runner.replay(batch))
            assert all(torch.equal(output[k], tensor) for k, tensor in tensors(due).items())


@torch.no_grad()
def test_runners_replay_in_a_shared_pool(cuda: torch.device) -> None:
    replays = Replays("trtllm_mha/xqa", Mode.MULTI_STEP_DRAFT, cuda, CudaGraph.sharing_a_pool(cuda))
    for index in range(30):
        batch = replays.draw()
        assert replays.compare(index, batch, replays.runner.replay(batch)) == []


@torch.no_grad()
def test_nodes_are_counted_by_kind_and_name(cuda: torch.device) -> None:
    x, run = doubling(cuda)
    y = torch.empty_like(x)
    graph = CudaGraph(cuda)
    captured(graph, lambda: y.copy_(run()))
    assert graph.node_counts() == {"kernel": 2, "memcpy": 1}
    assert all(graph.kernel_names())


@pytest.mark.parametrize("subject", ["trtllm_mha/xqa", "trtllm_mla/flash_mla"])
@torch.no_grad()
def test_all_steps_of_a_draft_are_one_graph(subject: str, cuda: torch.device) -> None:
    replays = Replays(subject, Mode.MULTI_STEP_DRAFT, cuda)
    runner = replays.runner
    assert sorted(runner.graphs) == [2, 4, 8]
    single = Replays(subject, Mode.DECODE, cuda).runner
    steps = runner.num_tokens_per_req
    for bucket, graph in runner.graphs.items():
        one = single.graphs[bucket]
        assert isinstance(graph, CudaGraph)
        assert isinstance(one, CudaGraph)
        assert attention(graph) == steps * attention(one) > 0


def attention(graph: CudaGraph) -> int:
    """Kernels of the kernel package, by their names."""
    return sum(
        any(word in name.lower() for word in ("xqa", "mha", "mla")) for name in graph.kernel_names()
    )


@torch.no_grad()
def test_a_runner_refuses_what_it_was_not_captured_for(cuda: torch.device) -> None:
    verify = Replays("trtllm_mha/xqa", Mode.TARGET_VERIFY, cuda)
    extend = Replays("trtllm_mha/xqa", Mode.DRAFT_EXTEND_V2, cuda)
    graphs = dict(verify.runner.graphs)
    batch = extend.draw()
    with pytest.raises(ContractError, match="forward_mode"):
        verify.runner.replay(batch)
    assert verify.runner.graphs == graphs
