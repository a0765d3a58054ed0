"""Real kernels agree with the reference kernel, also where a graph replays them on new lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module

import pytest
import torch
from packaging.version import Version

from fixtures.drivers.kernel_calls import CONTEXT, DECODE, MLA, MLA_CONTEXT, ROWS, row_id
from harness.core.capability import REFERENCE, device_refusal
from harness.core.case import KVDtype
from harness.core.environment import compute_capability
from harness.differential.invariants.memory import check_semaphores
from harness.kernels.checked import CheckedKernel
from harness.kernels.flash_mla import FlashMLA
from harness.kernels.flashinfer_xqa import FlashInferXQA
from harness.kernels.interface import ContextCall
from harness.kernels.limits.__main__ import AGREES, worst_row
from harness.kernels.limits.random_calls import RandomCall, Shape, draw
from harness.kernels.reference import TorchPaged
from harness.kernels.trtllm_gen import CAPABILITY_OF
from harness.kernels.workspace import shared_workspaces
from harness.kernels.xqa_source import CORRECTED_IN

Kind = Callable[[torch.device], CheckedKernel]


def made(kind: Kind, cuda: torch.device) -> CheckedKernel:
    """The kernel, or a skip that says which GPU it needs."""
    if isinstance(kind, partial):
        reason = device_refusal(CAPABILITY_OF[kind.args[0]], compute_capability(cuda))
        if reason is not None:
            pytest.skip(reason)
    return kind(cuda)


def assert_agrees(obtained: torch.Tensor, call: RandomCall, shape: Shape) -> None:
    reference = TorchPaged(replace(REFERENCE, casts_query_to_kv_dtype=shape.fp8_query))
    expected = call.on(reference, out_dtype=torch.float32)
    assert worst_row(obtained, expected) <= AGREES[shape.kv_dtype]
    assert check_semaphores(shared_workspaces()) == []


@pytest.mark.parametrize(("kind", "shape"), ROWS, ids=row_id)
def test_every_entry_agrees_with_the_reference(
    cuda: torch.device, kind: Kind, shape: Shape
) -> None:
    kernel, call = made(kind, cuda), draw(shape, cuda)
    for _ in range(2):
        assert_agrees(call.on(kernel), call, shape)


CAPTURED = (
    (FlashInferXQA, replace(CONTEXT, lengths=(300, 80, 131, 60))),
    (FlashInferXQA, replace(CONTEXT, lengths=(300, 80, 131, 60), sinks=True, window_left=20)),
    (FlashInferXQA, replace(CONTEXT, lengths=(300, 80, 131, 60), kv_dtype=KVDtype.FP8)),
    (FlashInferXQA, replace(DECODE, q_len=4)),
    (FlashInferXQA, replace(DECODE, window_left=20, sinks=True)),
    (FlashMLA, replace(MLA, q_len=4)),
    (FlashMLA, replace(MLA_CONTEXT, q_len=21, lengths=(300, 80, 131, 60))),
)


def next_batch(call: RandomCall, turn: int) -> None:
    """Other requests, lengths, cuts and queries in the same tensors; rows swap their pages."""
    arguments = call.arguments
    tables, lengths, q = arguments.block_tables, arguments.seq_lens, arguments.q
    tables.copy_(tables.roll(1, 0))
    lengths.copy_((lengths.roll(1) - 3 * turn % 5).clamp_min(17))
    q.copy_(torch.randn(q.shape, generator=torch.Generator().manual_seed(turn)))
    if isinstance(arguments, ContextCall):
        q_lens = torch.tensor([(5 * turn + 7 * i) % 18 for i in range(len(lengths))])
        arguments.cu_seqlens_q[1:].copy_(q_lens.cumsum(0))
        arguments.cu_seqlens_k[1:].copy_(lengths.cumsum(0))


@pytest.mark.parametrize(("kind", "shape"), CAPTURED, ids=row_id)
def test_a_captured_call_follows_its_tensors(cuda: torch.device, kind: Kind, shape: Shape) -> None:
    kernel, call = made(kind, cuda), draw(shape, cuda)
    side, graph = torch.cuda.Stream(cuda), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream(cuda))
    with torch.cuda.stream(side):
        call.on(kernel)
    torch.cuda.current_stream(cuda).wait_stream(side)
    with torch.cuda.graph(graph):
        out = call.on(kernel)
    for turn in range(12):
        next_batch(call, turn)
        out.fill_(torch.nan)
        graph.replay()
        assert_agrees(out, call, shape)


def test_contexts_between_decodes_leave_the_semaphores_alone(cuda: torch.device) -> None:
    kernel = FlashInferXQA(cuda)
    calls = [draw(replace(shape, lengths=(4000, 37)), cuda) for shape in (DECODE, CONTEXT)]
    first = [call.on(kernel) for call in calls]
    for _ in range(5):
        for call, expected in zip(calls, first, strict=True):
            assert torch.equal(call.on(kernel), expected)
            assert check_semaphores(shared_workspaces()) == []


def test_what_xqa_launches_was_compiled_corrected(cuda: torch.device) -> None:
    kernel, call = FlashInferXQA(cuda), draw(DECODE, cuda)
    call.on(kernel)
    version = import_module("flashinfer").__version__
    if Version(version).release >= CORRECTED_IN:
        pytest.skip(f"XQA of FlashInfer {version} is compiled as it is")
    q, keys = call.arguments.q, call.arguments.caches[0]
    dtype, group = q.dtype, q.shape[1] // keys.shape[2]
    module = import_module("flashinfer.xqa")  # whose name in the package is a function
    spec = module.gen_xqa_module(dtype, dtype, keys.shape[1], q.shape[2], group, False, dtype, 1)
    assert spec.name.endswith("_last_writes")
    assert spec.is_compiled, "the module that is launched, and no other"
