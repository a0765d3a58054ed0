"""A recording owns its memory: garbage stays garbage, inputs may not move, tapes do not meet."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from harness.errors import ContractError
from harness.graphs.tape import Tape


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.complex64, torch.bool, torch.int32], ids=str
)
def test_what_empty_gave_is_garbage_again_at_every_replay(dtype: torch.dtype) -> None:
    tape = Tape()
    memory = tape.capture(lambda: torch.empty(3, dtype=dtype))
    expected = memory.clone()
    memory.zero_()
    tape.replay()
    assert not (memory == 0).any()
    assert torch.equal(memory, expected) or memory.isnan().all()


ALIKE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "empty_like": torch.empty_like,
    "new_empty": lambda like: like.new_empty(3),
    "new_empty_strided": lambda like: like.new_empty_strided((3,), (2,)),
    "empty_strided": lambda like: torch.empty_strided((3,), (2,), dtype=like.dtype),
}


@pytest.mark.parametrize("name", ALIKE)
def test_what_is_made_like_another_is_garbage_again_at_every_replay(name: str) -> None:
    tape, like = Tape(), torch.zeros(3)
    memory = tape.capture(lambda: ALIKE[name](like))
    for number in (1, 2):
        memory.zero_()
        tape.replay()
        told = f"replay {number} leaves NaN in what {name} gave, and never zeros by luck"
        assert memory.isnan().all(), told
    assert not tape.operations, "an allocation is no operation of a graph"


def test_zeros_are_zero_again_at_every_replay() -> None:
    x = torch.tensor([1, 2])
    tape = Tape()
    total = tape.capture(lambda: torch.zeros(2, dtype=torch.int64).add_(x))
    tape.replay()
    tape.replay()
    assert total.tolist() == [1, 2]


def test_two_tapes_over_one_input_do_not_disturb_each_other() -> None:
    x, tapes = torch.tensor([2.0]), (Tape(), Tape())
    doubled, squared = tapes[0].capture(lambda: x * 2), tapes[1].capture(lambda: x * x)
    x.fill_(5.0)
    tapes[1].replay()
    assert (doubled.tolist(), squared.tolist()) == ([4.0], [25.0])
    x.fill_(6.0)
    tapes[0].replay()
    assert (doubled.tolist(), squared.tolist()) == ([12.0], [25.0])


MOVES = {
    "set to other memory": lambda x: x.set_(torch.zeros(6)),
    "grown": lambda x: x.resize_(4096),
    "freed": lambda x: x.untyped_storage().resize_(0),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
def test_an_input_that_moved_is_named(move: Callable[[torch.Tensor], object]) -> None:
    x = torch.zeros(2, 3)
    tape = Tape()
    tape.capture(lambda: x + 1)
    tape.replay()
    move(x)
    with pytest.raises(
        ContractError, match=r"float32\[2, 3\] that aten.add.Tensor reads at .*test_tape"
    ):
        tape.replay()


def test_an_argument_given_by_name_may_not_move_either() -> None:
    x, y, tape = torch.zeros(6), torch.zeros(6), Tape()
    tape.capture(lambda: torch.add(x, 1, out=y))
    y.set_(torch.ones(6))
    with pytest.raises(ContractError, match=r"float32\[6\] that aten.add.out reads at"):
        tape.replay()
