"""Every real kernel, on a fake of its package, agrees with the reference kernel."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from fixtures.drivers.kernel_calls import (
    CONTEXT,
    DECODE,
    MLA,
    MLA_CONTEXT,
    ROWS,
    assert_answers,
    row_id,
)
from fixtures.fakes.fake_kernels import MODULES
from harness.core.capability import REFERENCE
from harness.core.case import KVDtype
from harness.differential.invariants.memory import check_semaphores
from harness.kernels import flash_mla, flashinfer_xqa, trtllm_gen, workspace
from harness.kernels.checked import CheckedKernel, scale_and_cast
from harness.kernels.flash_mla import FlashMLA
from harness.kernels.flashinfer_xqa import FlashInferXQA
from harness.kernels.limits.random_calls import RandomCall, Shape, draw
from harness.kernels.reference import TorchPaged


@pytest.fixture(autouse=True)
def _packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in MODULES.items():
        monkeypatch.setitem(sys.modules, name, module)
    for user in (flash_mla, flashinfer_xqa, trtllm_gen):
        monkeypatch.setattr(user, "cuda_device", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(workspace, "_SHARED", {})
    sizes = {name: size + workspace.MIB for name, size in workspace.SEMAPHORES.items()}
    monkeypatch.setattr(workspace, "SIZES", sizes)


def test_a_result_that_needs_no_scale_and_no_cast_costs_no_launch() -> None:
    out = torch.tensor([1.5, -2.0])
    assert scale_and_cast(out, 1.0, torch.float32) is out
    assert scale_and_cast(out, 3.0, torch.float64).tolist() == [4.5, -6.0]


def assert_agrees(kernel: CheckedKernel, shape: Shape, seed: int = 0) -> None:
    call = draw(shape, seed=seed)
    reference = TorchPaged(replace(REFERENCE, casts_query_to_kv_dtype=shape.fp8_query))
    assert_answers(call.on(kernel), call, reference)


@pytest.mark.parametrize(("kind", "shape"), ROWS, ids=row_id)
def test_every_entry_agrees_with_the_reference(kind, shape: Shape) -> None:
    kernel = kind("cuda")
    assert_agrees(kernel, shape)
    assert kernel.calls == [shape.entry], f"a call is logged once by its entry: {kernel.calls}"
    dirty = check_semaphores(workspace.shared_workspaces())
    assert dirty == [], f"a kernel leaves the semaphores of every workspace zero: {dirty}"


def assert_is_the_references(obtained: torch.Tensor, call: RandomCall, **changes: Any) -> None:
    assert_answers(obtained, call, TorchPaged(REFERENCE), **changes)


def backwards(
    out: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor
) -> torch.Tensor:
    """``scatter_``, the last element first: a GPU writes in any order."""
    return out.copy_(out.scatter(dim, index.flip(dim), source.flip(dim)))


@pytest.mark.parametrize("sinks", [False, True])
def test_one_plan_serves_every_batch_of_its_geometry(
    sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths, pages and cuts change under the plan; only the index tensors are refilled."""
    monkeypatch.setattr(torch.Tensor, "scatter_", backwards)
    kernel = FlashInferXQA("cuda")
    context = kernel.kernels["context"]
    first = replace(CONTEXT, lengths=(300, 37, 131), q_len=21, sinks=sinks)
    call = draw(first)
    for lengths, q_lens in (((300, 37, 131), (21, 19, 17)), ((21, 300, 1), (21, 0, 1))):
        other = draw(replace(first, lengths=lengths), seed=len(q_lens) + lengths[0])
        ends = torch.tensor((0, *q_lens)).cumsum(0).int()
        tables = widened(other, call)
        changes = {"cu_seqlens_q": ends, "block_tables": tables, "max_q_len": 21}
        obtained = other.on(kernel, **changes)
        rule = f"no length, cut or page of an earlier batch is left in a plan, {lengths} {q_lens}"
        assert_is_the_references(obtained, other, rule=rule, **changes)
    assert len(context._plans) == 1, "batches of one geometry share a plan"


def widened(call: RandomCall, like: RandomCall) -> torch.Tensor:
    """The block tables of a call in the width of another's."""
    tables, width = call.arguments.block_tables, like.arguments.block_tables.shape[1]
    return torch.nn.functional.pad(tables, (0, width - tables.shape[1]))


def test_another_geometry_has_a_plan_of_its_own() -> None:
    kernel = FlashInferXQA("cuda")
    for shape in (CONTEXT, replace(CONTEXT, window_left=9), replace(CONTEXT, q_len=19), CONTEXT):
        assert_agrees(kernel, shape)
    assert len(kernel.kernels["context"]._plans) == 3


def test_layers_of_a_forward_with_other_tables_read_their_own() -> None:
    """A layer of the SWA pool beside a full one: the same geometry, another table."""
    kernel, forward = FlashInferXQA("cuda"), object()
    for seed in (0, 5, 0):
        call = draw(CONTEXT, seed=seed)
        obtained = call.on(kernel, forward=forward)
        rule = "each layer of a forward reads the pages of its own block_tables"
        assert_is_the_references(obtained, call, rule=rule)


@pytest.mark.parametrize("kv_dtype", [KVDtype.AUTO, KVDtype.FP8])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_variants_with_sinks_are_built_for_each_head_size_and_cache(
    head_dim: int, kv_dtype: KVDtype
) -> None:
    shape = replace(CONTEXT, sinks=True, head_dim=head_dim, kv_dtype=kv_dtype, bmm2_scale=3.0)
    assert_agrees(FlashInferXQA("cuda"), shape)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (FlashInferXQA, DECODE),
        (FlashInferXQA, CONTEXT),
        (FlashMLA, MLA),
        (FlashMLA, MLA_CONTEXT),
    ],
    ids=row_id,
)
def test_nothing_is_launched_for_no_request(kind, shape: Shape) -> None:
    call, kernel = draw(shape), kind("cuda")
    arguments, empty = call.arguments, {"q": call.arguments.q[:0]}
    for name in ("block_tables", "seq_lens"):
        empty[name] = getattr(arguments, name)[:0]
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if hasattr(arguments, name):
            empty[name] = getattr(arguments, name)[:1]
    kernel.kernels = {}
    out = call.on(kernel, **empty)
    value_dim = 512 if len(arguments.caches) == 1 else 64
    assert out.shape == (0, shape.heads, value_dim)
    half = call.on(kernel, **empty, out_dtype=torch.float16)
    assert out.dtype == torch.bfloat16
    assert half.dtype == torch.float16, "a result has out_dtype, one without a query row too"


@pytest.mark.parametrize(
    ("kind", "shape"), [(FlashInferXQA, CONTEXT), (FlashMLA, MLA_CONTEXT)], ids=row_id
)
@pytest.mark.parametrize("requests", [0, 3])
def test_rows_of_padding_alone_launch_nothing_and_are_zero(kind, shape: Shape, requests) -> None:
    call, kernel = draw(shape), kind("cuda")
    kernel.kernels = {}
    arguments = call.arguments
    out = call.on(
        kernel,
        block_tables=arguments.block_tables[:requests],
        seq_lens=arguments.seq_lens[:requests],
        cu_seqlens_q=torch.zeros(requests + 1, dtype=torch.int32),
        cu_seqlens_k=arguments.cu_seqlens_k[: requests + 1],
        max_q_len=0 if requests else 1,
    )
    assert out.shape[0] == arguments.q.shape[0], "a result has a row for each row of q"
    assert not out.any(), "rows of padding alone, which no kernel writes, are zero"


def test_layers_of_a_forward_share_a_schedule_and_a_graph_records_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package, scheduled = MODULES["sgl_kernel.flash_mla"], []

    def schedule(*args):
        scheduled.append(args)
        return get_mla_metadata(*args)

    get_mla_metadata = package.get_mla_metadata
    monkeypatch.setattr(package, "get_mla_metadata", schedule)
    kernel, capturing = FlashMLA("cuda"), False
    monkeypatch.setattr(flash_mla, "is_readable", lambda _: not capturing)
    row = next(shape for kind, shape in ROWS if kind is FlashMLA and shape.entry == "mla_decode")
    short, long = (draw(replace(row, lengths=lengths)) for lengths in ((70, 9), (300, 37)))

    def layers(call: RandomCall, forward: object) -> int:
        """Schedules that two layers of a forward ask for."""
        before = len(scheduled)
        for _ in range(2):
            obtained = call.on(kernel, forward=forward)
            assert_is_the_references(obtained, call)
        return len(scheduled) - before

    first, second = object(), object()
    told = "layers of a forward share one schedule, which is made once"
    assert layers(short, first) == 1, told
    assert layers(long, second) == 1, told
    assert layers(long, second) == 0, told
    assert layers(short, first) == 1, "only the schedule of the last forward is kept"
    capturing = True  # after a warm-up on the same plan
    assert layers(short, first) == 1, "a capture schedules anew: the warm-up's is no part of it"
    capturing = False
    assert layers(short, first) == 1, "a schedule that a capture made is not an eager forward's"
    told = "calls without a forward share no schedule"
    assert layers(long, None) == layers(short, None) == 2, told


def test_a_forward_at_the_address_of_one_that_is_gone_has_its_own_schedule() -> None:
    kernel = FlashMLA("cuda")
    row = next(shape for kind, shape in ROWS if kind is FlashMLA and shape.entry == "mla_decode")
    calls = [draw(replace(row, lengths=lengths)) for lengths in ((70, 9), (300, 37))] * 4
    # Nothing is made between two calls that could take the address.
    obtained = [call.on(kernel, forward=object()) for call in calls]
    for call, out in zip(calls, obtained, strict=True):
        assert_is_the_references(out, call)


def test_a_workspace_and_what_no_kernel_writes_begin_with_zeros(garbage: None) -> None:
    made = workspace.workspace("trtllm_gen", torch.device("cpu"))
    assert not made.semaphores.any(), "semaphores of a new workspace are zero"
    call = draw(CONTEXT)
    ends = torch.zeros(len(CONTEXT.lengths) + 1, dtype=torch.int32)
    out = call.on(FlashInferXQA("cuda"), cu_seqlens_q=ends, max_q_len=0)
    assert not out.any(), "rows that no kernel writes are zero"
