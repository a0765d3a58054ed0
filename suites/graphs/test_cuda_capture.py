"""A CUDA capture is begun, ended or abandoned on the stream of captures, whatever is recorded."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from harness.errors import CaptureViolation, ContractError
from harness.graphs.cuda import CudaGraph, capture_stream

POOL = (0, 7)
log: list[str] = []


class Stream:
    """Notes who waits for whom."""

    def __init__(self, name: object) -> None:
        self.name = name if isinstance(name, str) else "captures"

    def wait_stream(self, other: Stream) -> None:
        log.append(f"{self.name} waits for {other.name}")


class Recording:
    """Stands for torch.cuda.CUDAGraph; a recording that CUDA has broken off cannot be ended."""

    broken = False

    def __init__(self, keep_graph: bool) -> None:
        assert keep_graph

    def capture_begin(self, pool: tuple[int, int], capture_error_mode: str) -> None:
        log.append(f"begin in {pool}, {capture_error_mode}")

    def capture_end(self) -> None:
        log.append("end")
        if self.broken:
            raise RuntimeError("operation failed due to a previous error during capture")

    def instantiate(self) -> None:
        log.append("instantiate")

    def replay(self) -> None:
        log.append("replay")

    def raw_cuda_graph(self) -> int:
        return 77


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], CudaGraph]]:
    """Makes graphs on a fake device."""
    entered = [Stream("main")]

    @contextmanager
    def inside(stream: Stream) -> Iterator[None]:
        entered.append(stream)
        yield
        entered.pop()

    def release(index: int, pool: tuple[int, int]) -> None:
        log.append(f"release {pool} of {index}")

    fakes = {
        "is_available": lambda: True,
        "CUDAGraph": Recording,
        "graph_pool_handle": lambda: POOL,
        "Stream": Stream,
        "stream": inside,
        "current_stream": lambda device: entered[-1],
        "current_device": lambda: 3,
        "synchronize": lambda device: log.append("synchronize"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", release, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", release, raising=False)
    monkeypatch.setattr(Recording, "broken", False)
    log.clear()
    capture_stream.cache_clear()
    yield CudaGraph
    capture_stream.cache_clear()


def test_a_capture_is_ended_and_made_ready(graph: Callable[[], CudaGraph]) -> None:
    made = graph()
    made.warm_up(lambda: log.append("run"))
    assert log == ["captures waits for main", "run", "main waits for captures"]
    log.clear()
    assert made.capture(lambda: 5) == 5
    made.replay()
    assert log == ["synchronize", f"begin in {POOL}, global", "end", "instantiate", "replay"]
    with pytest.raises(ContractError, match="captured once"):
        made.capture(lambda: 5)


@pytest.mark.parametrize("was_on", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_no_garbage_is_collected_while_a_capture_is_open(
    graph: Callable[[], CudaGraph], monkeypatch: pytest.MonkeyPatch, was_on: bool, fails: bool
) -> None:
    seen: list[bool] = []
    for name in ("capture_begin", "capture_end"):
        monkeypatch.setattr(Recording, name, lambda *_, **__: seen.append(gc.isenabled()))

    def run() -> None:
        seen.append(gc.isenabled())
        if fails:
            raise ContractError("off the plan")

    (gc.enable if was_on else gc.disable)()
    try:
        with pytest.raises(ContractError) if fails else nullcontext():
            graph().capture(run)
        assert gc.isenabled() is was_on
    finally:
        gc.enable()
    assert seen == [False, False, False]


def test_graphs_of_one_runner_may_share_a_pool(graph: Callable[[], CudaGraph]) -> None:
    make = CudaGraph.sharing_a_pool("cuda")
    for made in (make(), make()):
        made.capture(lambda: 5)
    assert log.count(f"begin in {POOL}, global") == 2


@pytest.mark.parametrize("error", [RuntimeError("not\npermitted"), ContractError("off the plan")])
@pytest.mark.parametrize("broken", [False, True])
def test_a_failed_capture_is_abandoned(
    graph: Callable[[], CudaGraph],
    error: Exception,
    broken: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Recording, "broken", broken)
    made = graph()

    def run() -> None:
        raise error

    with pytest.raises(ContractError) as failed:
        made.capture(run)
    if isinstance(error, RuntimeError):
        assert isinstance(failed.value, CaptureViolation)
        assert str(failed.value) == "CUDA cannot record this: not"
    else:
        assert failed.value is error
    released = [f"release {POOL} of 3"] * 2 if broken else []
    assert log[2:] == ["end", *released]
    with pytest.raises(ContractError, match="holds nothing"):
        made.replay()


def test_a_read_of_the_device_is_refused_with_its_line(
    graph: Callable[[], CudaGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(3)
    made = graph()
    assert made.capture(lambda: x.sum().item()) == 3

    monkeypatch.setattr("harness.graphs.cuda.on_cuda", lambda tensors: bool(list(tensors)))

    def run() -> float:
        return x.sum().item()

    line = run.__code__.co_firstlineno + 1
    asked = f"aten._local_scalar_dense.default cannot be recorded; asked at {__file__}:{line}"
    with pytest.raises(CaptureViolation) as refused:
        graph().capture(run)
    assert str(refused.value) == asked
