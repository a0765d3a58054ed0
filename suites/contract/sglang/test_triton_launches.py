"""Interpreted Triton kernels: seen, replayed, kept inside their memory, cast to FP8 as GPUs cast.

The interpreter is chosen before Triton is imported, so the kernels run in a process of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.core.paths import ROOT

KERNELS = """
import json
import torch
import triton
import triton.language as tl
from harness.errors import ContractError
from harness.graphs.effects import observe
from harness.graphs.tape import Tape
from harness.graphs.triton_launches import watch_interpreter

watch_interpreter()


@triton.jit
def add_one(source, made, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(made + at, tl.load(source + at, mask=at < count) + 1, mask=at < count)


@triton.jit
def cast(source, made, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(made + at, tl.load(source + at).to(made.dtype.element_ty))


@triton.jit
def multiply(left, right, made, SIZE: tl.constexpr):
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    at = row * SIZE + column
    lower = tl.full((SIZE, SIZE), float("-inf"), dtype=tl.float32)
    silent = tl.exp(lower - lower)  # no warning, as on a GPU
    product = tl.dot(tl.load(left + at), tl.load(right + at))
    tl.store(made + at, tl.where(silent == silent, silent, product))


@triton.jit
def twice(value):
    return value + tl.zeros_like(value) + value


@triton.jit
def doubled(source, made, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(made + at, twice(tl.load(source + at)))


@triton.jit
def assembly(made):
    tl.store(made, tl.inline_asm_elementwise(
        "mov.u32 $0, %%smid;", "=r", [], dtype=tl.int32, is_pure=True, pack=1
    ))


def unknown_assembly():
    try:
        assembly[(1,)](torch.zeros(1, dtype=torch.int32))
    except ContractError as error:
        return str(error)


def doubles():
    made = [torch.zeros(8, dtype=torch.int32) for _ in range(2)]
    try:
        for one in made:  # the second launch finds what the first one left patched
            doubled[(1,)](source, one, BLOCK=8)
    except Exception as error:  # the other answers of this process are told all the same
        return repr(error)
    return [one.tolist() for one in made]


def refusal(count_read, count_stored):
    source = torch.arange(count_read, dtype=torch.int32)
    made = torch.zeros(count_stored, dtype=torch.int32)
    try:
        add_one[(1,)](source, made, 6, BLOCK=8)
    except ContractError as error:
        return str(error)
    return made.tolist()


source, made = torch.arange(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
with observe() as effects:
    add_one[(1,)](source, made, 8, BLOCK=8)
tape = Tape()
tape.capture(lambda: add_one[(1,)](source, made, 8, BLOCK=8))
source.mul_(10)
with observe() as again:
    tape.replay()


def moved():
    source.set_(torch.zeros(8, dtype=torch.int32))
    try:
        tape.replay()
    except ContractError as error:
        return str(error)


left = torch.full((16, 16), 1.5, dtype=torch.bfloat16)
right = torch.arange(256, dtype=torch.bfloat16).view(16, 16)
product = torch.zeros(16, 16)
multiply[(1,)](left, right, product, SIZE=16)
exact = torch.tensor([1 + 2.0**-8 + 2.0**-20, 3.0, float("inf")] + [0.0], dtype=torch.float32)
halves = torch.zeros(4, dtype=torch.bfloat16)
cast[(1,)](exact, halves, BLOCK=4)
given = torch.tensor(%s, dtype=torch.bfloat16)
rounded = torch.zeros(len(given), dtype=torch.float8_e4m3fn)
cast[(1,)](given, rounded, BLOCK=len(given))
print(json.dumps({
    "operations": dict(effects.operations),
    "again": dict(again.operations),
    "replayed": made.tolist(),
    "inside": refusal(6, 6),
    "past_load": refusal(5, 8),
    "past_store": refusal(8, 4),
    "unknown_assembly": unknown_assembly(),
    "doubles": doubles(),
    "moved": moved(),
    "product": product.tolist(),
    "bfloat16": halves.float().tolist(),
    "fp8": rounded.float().tolist(),
}))
"""
VALUES = (0.0, 1.0, 1.06, 1.07, -3.3, 17.0, 460.0, -1000.0)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = Path(tmp_path_factory.mktemp("kernels"), "kernels.py")
    file.write_text(KERNELS % (VALUES,))  # Triton reads the source of its kernels
    given = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(file)], env=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_kernel_calls_functions_of_its_own_file_and_of_triton(seen: dict[str, Any]) -> None:
    """Those of ``triton.language.standard`` name a module that the kernel does not."""
    told = "the interpreter runs a kernel that calls a function of another file, as tl.zeros_like"
    assert seen["doubles"] == [[20 * i for i in range(8)]] * 2, told


def test_a_launch_is_one_operation(seen: dict[str, Any]) -> None:
    assert seen["operations"]["triton::add_one"] == 1


def test_a_recorded_launch_is_replayed_on_what_the_memory_holds_then(seen: dict[str, Any]) -> None:
    assert seen["replayed"] == [10 * i + 1 for i in range(8)]


def test_a_replay_shows_the_launch_that_it_repeats(seen: dict[str, Any]) -> None:
    told = "a replayed tape counts as the operations it recorded, launches of kernels included"
    assert seen["again"] == {"triton::add_one": 1}, told


def test_memory_of_a_recorded_launch_may_not_move(seen: dict[str, Any]) -> None:
    told = "a replay whose kernel would read memory that is no longer the tensor's names it"
    assert "int32[8] that add_one reads at" in (seen["moved"] or ""), told


def test_masked_accesses_inside_the_memory_are_accepted(seen: dict[str, Any]) -> None:
    assert seen["inside"] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("past_load", "add_one: loads 4 bytes past the end of int32[5]"),
        ("past_store", "add_one: stores 4 bytes past the end of int32[4]"),
    ],
)
def test_a_stray_pointer_names_kernel_and_tensor(
    seen: dict[str, Any], case: str, message: str
) -> None:
    assert seen[case] == message


def test_assembly_that_has_no_stand_in_is_refused(seen: dict[str, Any]) -> None:
    message = "assembly: the interpreter cannot run 'mov.u32 $0, %smid;'"
    assert seen["unknown_assembly"] == message


def test_fp8_is_rounded_to_the_nearest_and_saturates(seen: dict[str, Any]) -> None:
    limit = torch.finfo(torch.float8_e4m3fn).max
    exact = torch.tensor(VALUES, dtype=torch.bfloat16).clamp(-limit, limit)
    assert seen["fp8"] == exact.to(torch.float8_e4m3fn).float().tolist()
    assert seen["fp8"][:4] == [0.0, 1.0, 1.0, 1.125]


def test_matrices_of_bfloat16_are_multiplied_as_numbers(seen: dict[str, Any]) -> None:
    right = torch.arange(256, dtype=torch.bfloat16).view(16, 16).float()
    assert seen["product"] == (1.5 * right.sum(0)).expand(16, 16).tolist()


def test_bfloat16_is_rounded_to_the_nearest(seen: dict[str, Any]) -> None:
    assert seen["bfloat16"] == [1 + 2.0**-7, 3.0, float("inf"), 0.0]
