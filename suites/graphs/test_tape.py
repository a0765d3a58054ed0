"""A tape replays what was recorded, on the memory it was recorded on, and nothing else."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from harness.errors import CaptureViolation, ContractError
from harness.graphs import factory
from harness.graphs.effects import observe
from harness.graphs.host_syncs import dispatched_read
from harness.graphs.tape import Tape
from harness.kernels.torch_ops import operation

# Not by custom_op, whose first call imports a compiler for seconds.
LIBRARY = torch.library.Library("specgate_test_tape", "DEF")
LIBRARY.define("scaled(Tensor x, Tensor(a!) seen, float factor) -> Tensor")


@torch.library.impl(LIBRARY, "scaled", "CPU")
def scaled(x: torch.Tensor, seen: torch.Tensor, factor: float) -> torch.Tensor:
    seen += int(x.sum())
    return x * factor


@dataclass
class Pair:
    """Outputs of a recording."""

    left: torch.Tensor
    right: torch.Tensor


def test_a_graph_is_of_the_device_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(factory, "CudaGraph", lambda *given: asked.extend(given))
    factory.new_graph("cuda:1")()
    told = f"a graph asked for on cuda:1 is captured there, not on {asked or 'the current GPU'}"
    assert asked == ["cuda:1"], told
    for device in ("cpu", "cpu:0", torch.device("cpu", 0)):
        assert factory.new_graph(device) is Tape, f"a graph of the CPU, {device!r}, is a tape"


def test_a_functional_result_is_written_where_the_capture_left_it() -> None:
    x = torch.tensor([1.0, 2.0])
    tape = Tape()
    pair = tape.capture(lambda: Pair(x + 1, torch.cat([x, x * 3])))
    addresses = pair.left.data_ptr(), pair.right.data_ptr()
    x.copy_(torch.tensor([5.0, 7.0]))
    assert pair.left.tolist() == [2.0, 3.0]
    tape.replay()
    assert pair.left.tolist() == [6.0, 8.0]
    assert pair.right.tolist() == [5.0, 7.0, 15.0, 21.0]
    assert (pair.left.data_ptr(), pair.right.data_ptr()) == addresses


def test_python_numbers_and_control_flow_are_those_of_the_capture() -> None:
    x, state = torch.tensor([10.0]), {"add": 1, "double": False}

    def run() -> torch.Tensor:
        y = x + state["add"]
        return y * 2 if state["double"] else y

    tape = Tape()
    y = tape.capture(run)
    state.update(add=100, double=True)
    tape.replay()
    assert y.tolist() == [11.0]


def test_a_rebound_input_is_not_seen_and_a_copied_one_is() -> None:
    holder = {"x": torch.tensor([1, 2])}
    tape = Tape()
    y = tape.capture(lambda: holder["x"] * 10)
    first, holder["x"] = holder["x"], torch.tensor([3, 4])
    tape.replay()
    assert y.tolist() == [10, 20]
    first.copy_(holder["x"])
    tape.replay()
    assert y.tolist() == [30, 40]


def test_in_place_operations_run_again_and_views_stay_views() -> None:
    x, log = torch.tensor([[1, 2], [3, 4]]), torch.zeros(2, dtype=torch.int64)

    def run() -> torch.Tensor:
        log.add_(x[1])
        row = (x * 1).view(-1)[1:3]
        row[0] = 9
        return row

    tape = Tape()
    row = tape.capture(run)
    assert log.tolist() == [3, 4]
    x.copy_(torch.tensor([[5, 6], [7, 8]]))
    tape.replay()
    assert (log.tolist(), row.tolist()) == ([10, 12], [9, 7])


def test_out_arguments_and_several_results_keep_their_memory() -> None:
    x, total = torch.tensor([[3.0, 1.0, 2.0], [4.0, 6.0, 5.0]]), torch.zeros(2)

    def run() -> tuple[torch.Tensor, ...]:
        torch.sum(x, 1, out=total)
        values, indices = x.topk(2)
        return values, indices, *x.split(1)

    tape = Tape()
    values, indices, *_ = tape.capture(run)
    x.copy_(torch.tensor([[1.0, 2.0, 9.0], [8.0, 7.0, 0.0]]))
    tape.replay()
    assert values.tolist() == [[9.0, 2.0], [8.0, 7.0]]
    assert indices.tolist() == [[2, 1], [0, 1]]
    assert total.tolist() == [12.0, 15.0]


def test_a_chain_of_argmax_and_index_put_follows_its_inputs() -> None:
    logits, cache = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]), torch.zeros(4, 3)
    slots = torch.tensor([2, 0])
    is_read = dispatched_read(torch.ops.aten.index.Tensor, (cache, [slots]), {})
    assert not is_read, "the host reads nothing to index by positions, only to index by a mask"

    def run() -> torch.Tensor:
        cache[slots] = logits
        token = logits.argmax(-1)
        return torch.stack([token, cache[slots].roll(1, 1).argmax(-1)], 1)

    tape = Tape()
    tokens = tape.capture(run)
    assert tokens.tolist() == [[1, 2], [0, 1]]
    logits.copy_(torch.tensor([[0.0, 0.0, 5.0], [0.0, 5.0, 0.0]]))
    slots.copy_(torch.tensor([3, 1]))
    cache.zero_()
    tape.replay()
    assert tokens.tolist() == [[2, 0], [1, 2]]
    assert cache[:, 1:].argmax(1)[[1, 3]].tolist() == [0, 1]
    assert not cache[[0, 2]].any()


def test_a_library_operation_is_opaque_and_may_mutate_and_read_inside() -> None:
    x, seen = torch.tensor([1.0, 2.0]), torch.zeros(1)
    tape = Tape()
    y = tape.capture(lambda: torch.ops.specgate_test_tape.scaled(x, seen, 2.0))
    x.copy_(torch.tensor([4.0, 5.0]))
    tape.replay()
    assert (y.tolist(), seen.tolist()) == ([8.0, 10.0], [12.0])
    assert tape.operations == {"specgate_test_tape.scaled.default": 1}


@pytest.mark.usefixtures("garbage")
def test_a_capture_launches_no_kernel_and_its_replay_does() -> None:
    launched: list[float] = []

    def doubled(x: torch.Tensor) -> torch.Tensor:
        launched.append(float(x[0]))
        return x * 2

    double = operation(torch.empty_like)(doubled)
    x, tape = torch.tensor([3.0, 4.0]), Tape()
    result = tape.capture(lambda: double(x) + 1)
    assert launched == [], "what CUDA captures, it does not run"
    assert result.tolist() == [1.0, 1.0], "what was not computed is zeros to what follows"
    x[0] = 5
    tape.replay()
    assert (launched, result.tolist()) == ([5.0], [11.0, 9.0])


def test_a_tensor_reshaped_in_place_keeps_the_shape_each_operation_saw() -> None:
    x = torch.tensor([1.0, 2.0])

    def run() -> torch.Tensor:
        y = x * 1
        flat = y.sum(0)
        y.unsqueeze_(0)
        return torch.cat([y.sum(0), flat.view(1)])

    tape = Tape()
    out = tape.capture(run)
    x.copy_(torch.tensor([3.0, 4.0]))
    tape.replay()
    tape.replay()
    assert out.tolist() == [3.0, 4.0, 7.0]
    assert "aten.unsqueeze_.default" not in tape.operations


def test_a_tensor_that_is_handed_over_by_name_keeps_its_shape_too() -> None:
    x, y = torch.tensor([1.0, 2.0]), torch.zeros(2)

    def run() -> torch.Tensor:
        torch.add(x, 1, out=y)
        y.unsqueeze_(0)
        return y.sum(1)

    tape = Tape()
    out = tape.capture(run)
    x.copy_(torch.tensor([3.0, 4.0]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where it resizes a result
        tape.replay()
    assert out.tolist() == [9.0]
    assert y.tolist() == [[4.0, 5.0]]


def test_a_tensor_of_a_list_keeps_its_shape_too() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])

    def run() -> torch.Tensor:
        y = x * 1
        rows = torch.cat([y, y[:1]])
        y.t_()
        return rows

    tape = Tape()
    rows = tape.capture(run)
    x.mul_(10)
    tape.replay()
    told = "an operation over a list sees the tensors as they lay at the capture"
    assert rows.tolist() == [[10.0, 20.0], [30.0, 40.0], [10.0, 20.0]], told


def test_a_recording_needs_no_gradient() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    tape = Tape()
    out = tape.capture(lambda: weight * 2)
    tape.replay()
    assert not out.requires_grad


def test_a_tape_is_captured_once_and_before_its_replay() -> None:
    tape = Tape()
    with pytest.raises(ContractError, match="after its capture"):
        tape.replay()
    tape.capture(lambda: torch.zeros(1))
    with pytest.raises(ContractError, match="captured once"):
        tape.capture(lambda: torch.zeros(1))


def test_a_read_on_the_host_is_refused_by_operation_and_line_and_leaves_the_tape_empty() -> None:
    x, tape = torch.tensor([3]), Tape()

    def run() -> int:
        return int(x.item())

    line = run.__code__.co_firstlineno + 1
    where = re.escape(f"{Path(__file__)}:{line}")
    with pytest.raises(CaptureViolation, match=rf"aten\._local_scalar_dense\.default .* {where}$"):
        tape.capture(run)
    with pytest.raises(ContractError, match="after its capture"):
        tape.replay()


def test_an_observed_replay_is_the_recorded_operations_and_nothing_of_the_emulation() -> None:
    x, tape = torch.ones(4), Tape()
    tape.capture(lambda: torch.empty(4).copy_(x).mul(2).topk(2))
    with observe() as effects:
        tape.replay()
    assert (
        effects.operations
        == tape.operations
        == {
            "aten.copy_.default": 1,
            "aten.mul.Tensor": 1,
            "aten.topk.default": 1,
        }
    )
    assert effects.host_syncs == []
