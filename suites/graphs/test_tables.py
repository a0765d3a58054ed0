"""Every operation that the tape and the detection of host syncs know by name does what it is for.

The cases are generated from the instruments' own tables: a new entry without a call here is red.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch

from harness.errors import CaptureViolation
from harness.graphs import host_syncs, tape
from harness.graphs.effects import observe
from harness.graphs.tape import Tape

aten = torch.ops.aten
Call = Callable[[torch.Tensor], object]
MASK, INDEX = torch.tensor([True, False, True]), torch.tensor([2, 0])

ALLOCATING: dict[object, Call] = {
    aten.empty.memory_format: lambda x: torch.empty(3),
    aten.empty_strided.default: lambda x: torch.empty_strided((3,), (1,)),
    aten.empty_like.default: torch.empty_like,
    aten.new_empty.default: lambda x: x.new_empty(3),
    aten.new_empty_strided.default: lambda x: x.new_empty_strided((3,), (1,)),
}
REBINDING: dict[str, Call] = {
    "aten::resize_": lambda x: x.resize_(2),
    "aten::resize_as_": lambda x: x.resize_as_(torch.zeros(2)),
    "aten::set_": lambda x: x.set_(torch.zeros(3)),
}
# What reads, and the same operation where it does not, with the reason.
CONDITIONAL: dict[object, tuple[Call, Call, str]] = {
    aten.index.Tensor: (lambda x: x[MASK], lambda x: x[INDEX], "indexes by positions, no mask"),
    aten.index_put.default: (
        lambda x: x.index_put((MASK,), x[:2]),
        lambda x: x.index_put((INDEX,), x[:2]),
        "indexes by positions, no mask",
    ),
    aten.index_put_.default: (
        lambda x: x.index_put_((MASK,), x[:2] * 2),
        lambda x: x.index_put_((MASK,), x[0] * 2),
        "puts one value by one mask",
    ),
    aten._index_put_impl_.default: (
        lambda x: torch._index_put_impl_(x, (MASK,), x[:2] * 2),
        lambda x: torch._index_put_impl_(x, (INDEX,), x[:2] * 2),
        "indexes by positions, no mask",
    ),
    aten.repeat_interleave.Tensor: (
        lambda x: torch.repeat_interleave(INDEX),
        lambda x: torch.repeat_interleave(INDEX, output_size=2),
        "is given its output_size",
    ),
    aten.lift_fresh.default: (
        lambda x: aten.lift_fresh.default(x),
        lambda x: aten.lift_fresh.default(x[0]),
        "takes a scalar",
    ),
    aten._to_copy.default: (
        lambda x: aten._to_copy.default(x, device="meta"),
        lambda x: aten._to_copy.default(x, dtype=torch.float64),
        "stays on its device",
    ),
    aten.copy_.default: (
        lambda x: torch.empty(3, device="meta").copy_(x),
        lambda x: torch.empty(3).copy_(x),
        "stays on its device",
    ),
}
ALWAYS: dict[object, Call] = {
    aten.equal.default: lambda x: torch.equal(x, x * 1),
    aten._pin_memory.default: lambda x: aten._pin_memory.default(x),
}
CALLS: dict[object, Call] = {
    torch.Tensor.tolist: lambda x: x.tolist(),
    torch.Tensor.numpy: lambda x: x.numpy(),
    torch.Tensor.__array__: lambda x: x.__array__(),
    torch.Tensor.__dlpack__: lambda x: x.__dlpack__(),
    torch.Tensor.__repr__: repr,
    torch.Tensor.cpu: lambda x: x.cpu(),
    torch.Tensor.to: lambda x: x.to("cpu"),
    torch.Tensor.new_tensor: lambda x: x.new_tensor([1.0, 2.0]),
    torch.Tensor.pin_memory: lambda x: x.pin_memory(),
    torch.tensor: lambda x: torch.tensor([1.0, 2.0]),
    torch.as_tensor: lambda x: torch.as_tensor([1.0, 2.0]),
    torch.asarray: lambda x: torch.asarray([1.0, 2.0]),
}
COPIES_FROM_THE_HOST = {torch.Tensor.new_tensor, torch.tensor, torch.as_tensor, torch.asarray}
# The same calls where they stay on the device.
ELSEWHERE: dict[object, Call] = {
    torch.Tensor.to: lambda x: x.to(torch.float64),
    torch.Tensor.new_tensor: lambda x: x.new_tensor(x * 2),
    torch.tensor: lambda x: torch.tensor(x * 2),
    torch.as_tensor: lambda x: torch.as_tensor(x * 2),
    torch.asarray: lambda x: torch.asarray(x * 2),
}


def x() -> torch.Tensor:
    return torch.tensor([1.0, 2.0, 3.0])


def named(table: dict[object, Call]) -> list[object]:
    return [pytest.param(key, id=getattr(key, "__name__", str(key))) for key in table]


REFUSED = "a capture refuses an operation that reads on the host or moves storage, before it runs"


def refused(call: Call) -> str:
    try:
        told = refusal(call)
    except RuntimeError as error:  # of an operation that ran
        pytest.fail(f"{REFUSED}: {error}")
    assert told, REFUSED
    return told


def refusal(call: Call) -> str:
    """What a capture says against a call, or nothing."""
    given = x()
    try:
        Tape().capture(lambda: call(given))
    except CaptureViolation as violation:
        return str(violation)
    return ""


def counted(call: Call) -> list[str]:
    given = x()
    # Pinned memory needs a GPU's driver; asking for it is seen all the same.
    with observe() as effects, suppress(RuntimeError):
        call(given)
    return effects.host_syncs


def test_the_tables_here_are_the_instruments() -> None:
    assert ALLOCATING.keys() == tape.ALLOCATIONS
    assert REBINDING.keys() == tape.REBINDING
    ruled = [str(one) for one in CONDITIONAL.keys() - host_syncs.CONDITIONAL.keys()]
    assert not ruled, f"{ruled} read on the host with some arguments alone: others are captured"
    assert CONDITIONAL.keys() == host_syncs.CONDITIONAL.keys()
    assert ALWAYS.keys() == host_syncs.ALWAYS
    unseen = [getattr(one, "__name__", one) for one in CALLS.keys() - host_syncs.CALLS.keys()]
    assert not unseen, f"{unseen} read on the host or copy from it: a capture refuses them"
    assert CALLS.keys() == host_syncs.CALLS.keys()
    given = {call for call, (_, rule) in host_syncs.CALLS.items() if rule is host_syncs._given}
    assert ELSEWHERE.keys() == CALLS.keys() - given


@pytest.mark.parametrize("operation", named(ALLOCATING))
def test_what_was_allocated_is_garbage_at_every_replay(operation: object) -> None:
    given, graph = x(), Tape()
    memory = graph.capture(lambda: ALLOCATING[operation](given))
    assert isinstance(memory, torch.Tensor)
    assert memory.isnan().all()
    memory.zero_()
    graph.replay()
    assert memory.isnan().all()


@pytest.mark.parametrize("name", REBINDING)
def test_storage_that_is_rebound_is_refused(name: str) -> None:
    assert refused(REBINDING[name]).startswith(name.replace("::", "."))


@pytest.mark.parametrize("operation", named(CONDITIONAL))
def test_an_operation_that_reads_sometimes(operation: object) -> None:
    reads, does_not, why = CONDITIONAL[operation]
    assert len(counted(reads)) == 1, f"{operation} reads on the host here and is counted"
    assert refused(reads).startswith(f"{operation} cannot be recorded; asked at {__file__}:")
    assert counted(reads)[0].startswith(f"{operation} at {__file__}:")
    told = refusal(does_not)
    assert not told, f"{operation} reads nothing on the host where it {why}: a capture records it"
    assert counted(does_not) == []


@pytest.mark.parametrize("operation", named(ALWAYS))
def test_an_operation_that_always_reads(operation: object) -> None:
    assert refused(ALWAYS[operation]).startswith(f"{operation} cannot be recorded; asked at")


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("call", named(CALLS))
def test_a_call_that_reads_and_dispatches_nothing(call: object) -> None:
    name = getattr(call, "__name__", str(call))
    does = "copies from the host" if call in COPIES_FROM_THE_HOST else "reads on the host"
    assert call in host_syncs.CALLS, f"{name} {does}: a capture refuses it, effects count it"
    name, _ = host_syncs.CALLS[call]
    assert refused(CALLS[call]).startswith(f"{name} cannot be recorded; asked at {__file__}:")
    assert len(counted(CALLS[call])) == 1
    assert counted(CALLS[call])[0].startswith(f"{name} at {__file__}:")
    if call in ELSEWHERE:
        assert counted(ELSEWHERE[call]) == []
