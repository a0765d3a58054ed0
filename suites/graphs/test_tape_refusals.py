"""Whatever would wait for a device, or move memory, cannot be recorded; look-alikes can."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

from harness.errors import CaptureViolation
from harness.graphs.tape import Tape

X = torch.arange(6.0).view(2, 3)
N = torch.tensor(2)
COUNTS = torch.tensor([1, 2])
MASK = X > 2
READ = "aten._local_scalar_dense"

REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "item": (lambda: N.item(), READ),
    "tolist": (lambda: N.tolist(), "Tensor.tolist"),
    "numpy": (lambda: X.numpy(), "Tensor.numpy"),
    "array": (lambda: np.asarray(X), "Tensor.__array__"),
    "dlpack": (lambda: X.__dlpack__(), "Tensor.__dlpack__"),
    "repr": (lambda: repr(X), "Tensor.__repr__"),
    "bool": (lambda: bool(N), READ),
    "int": (lambda: int(N), READ),
    "float": (lambda: float(N), READ),
    "range": (lambda: range(N), READ),
    "slice": (lambda: X[:N], READ),
    "if": (lambda: 1 if N > 1 else 0, READ),
    "contains": (lambda: 2 in X, READ),
    "max as number": (lambda: torch.zeros(int(COUNTS.max())), READ),
    "arange to a tensor": (lambda: torch.arange(N), READ),
    "full of a tensor": (lambda: torch.full((2,), N), READ),
    "split by tensor": (lambda: X.split(N, 1), READ),
    "one hot": (lambda: torch.nn.functional.one_hot(COUNTS), READ),
    "allclose": (lambda: torch.allclose(X, X), "aten.allclose"),
    "equal": (lambda: torch.equal(X, X), "aten.equal"),
    "cpu": (lambda: X.cpu(), "Tensor.cpu"),
    "to cpu": (lambda: X.to("cpu"), "Tensor.to"),
    "to device=cpu": (lambda: X.to(device=torch.device("cpu")), "Tensor.to"),
    "to another device": (lambda: X.to("meta"), "aten._to_copy"),
    "tensor": (lambda: torch.tensor([1, 2]), "torch.tensor"),
    "tensor of a number": (lambda: torch.tensor(1), "torch.tensor"),
    "tensor of data=": (lambda: torch.tensor(data=[1]), "torch.tensor"),
    "as_tensor": (lambda: torch.as_tensor([1]), "torch.as_tensor"),
    "asarray": (lambda: torch.asarray([1]), "torch.asarray"),
    "from_numpy": (lambda: torch.from_numpy(np.zeros(2)), "aten.lift_fresh"),
    "LongTensor": (lambda: torch.LongTensor([1]), "aten.lift_fresh"),
    "new_tensor": (lambda: X.new_tensor([1]), "Tensor.new_tensor"),
    "list index": (lambda: X[[1, 0]], "aten.lift_fresh"),
    "list index written": (lambda: X.clone().__setitem__([1, 0], 1.0), "aten.lift_fresh"),
    "pin_memory": (lambda: X.pin_memory(), "Tensor.pin_memory"),
    "nonzero": (lambda: X.nonzero(), "aten.nonzero"),
    "where of one": (lambda: torch.where(MASK), "aten.nonzero"),
    "masked_select": (lambda: X.masked_select(MASK), "aten.masked_select"),
    "mask index": (lambda: X[MASK], "aten.index"),
    # Torch takes uint8 for a mask, too.
    "mask of bytes": (lambda: torch.ops.aten.index(X, [MASK.byte()]), "aten.index"),
    "mask written with a tensor": (
        lambda: X.clone().__setitem__(MASK, torch.zeros(3)),
        "aten.index_put_",
    ),
    "two masks filled with a number": (
        lambda: X.clone().__setitem__((MASK[:, 0], MASK[0]), 0.0),
        "aten.index_put_",
    ),
    "mask and index filled with a number": (
        lambda: X.clone().__setitem__((MASK[:, 0], COUNTS[:1] - 1), 0.0),
        "aten.index_put_",
    ),
    "mask accumulated": (
        lambda: X.clone().index_put_((MASK,), torch.ones(()), accumulate=True),
        "aten.index_put_",
    ),
    "unique": (lambda: X.unique(), "aten._unique2"),
    "unique_consecutive": (lambda: X.unique_consecutive(), "aten.unique_consecutive"),
    "bincount": (lambda: COUNTS.bincount(), "aten.bincount"),
    "repeat_interleave": (
        lambda: X.repeat_interleave(COUNTS, dim=0),
        "aten.repeat_interleave",
    ),
    "resize": (lambda: torch.zeros(2).resize_(8), "aten.resize_"),
    "set": (lambda: torch.zeros(2).set_(X), "aten.set_"),
}

RECORDED: dict[str, Callable[[], object]] = {
    "number written": lambda: X.clone().__setitem__(0, 1.0),
    "mask filled with a number": lambda: X.clone().__setitem__(MASK, 0.0),
    "tensor index": lambda: X[COUNTS - 1],
    "where of three": lambda: torch.where(MASK, X, 0.0),
    "repeat_interleave of known size": lambda: X.repeat_interleave(COUNTS, dim=0, output_size=3),
    "as_tensor of a tensor": lambda: torch.as_tensor(X),
    "dtype conversion": lambda: X.to(torch.int32),
    "as another tensor": lambda: X.to(COUNTS),
    "size of a tensor": lambda: torch.arange(X.shape[0], device=X.device),
    "tensor as a number": lambda: X * N,
}


@pytest.mark.parametrize(("run", "operation"), REFUSED.values(), ids=REFUSED.keys())
def test_is_refused_by_name(run: Callable[[], object], operation: str) -> None:
    told = ""
    try:
        Tape().capture(run)
    except CaptureViolation as violation:
        told = str(violation)
    rule = "waits for the device, copies from the host or moves memory, and a capture refuses it"
    assert told, f"{operation} {rule}"
    named = re.search(rf"^{operation}.* at .*test_tape_refusals\.py:\d+$", told)
    assert named, f"a refusal names {operation} and the line that asked for it, not: {told}"


@pytest.mark.parametrize("run", RECORDED.values(), ids=RECORDED.keys())
def test_is_recorded(run: Callable[[], object]) -> None:
    tape = Tape()
    tape.capture(run)
    tape.replay()
