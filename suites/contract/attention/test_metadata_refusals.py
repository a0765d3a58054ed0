"""Planning refuses what cannot be planned, naming the field, its value and what is accepted."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch

from fixtures.toys.toy_attention import CONTEXT, mha_layer
from fixtures.toys.toy_planning import (
    EXTEND_LENS,
    CapturedPlans,
    accepted,
    batch_for,
    plan,
    toy_backend,
)
from fixtures.toys.toy_scenes import phase_id
from harness.errors import CapacityError, ContractError, KernelRefusal
from harness.upstream.allocator import ReqToTokenPool
from harness.upstream.forward_batch_info import EagleVerifyInput, ForwardMode

NOWHERE = torch.zeros(0, dtype=torch.int64)
V1, V2 = ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2
EAGER_ERRORS: tuple[tuple[ForwardMode, dict[str, Any], type[Exception], str], ...] = (
    (V2, {"spec_info": accepted(0, 0)}, ContractError, r"num_tokens_per_req = 0 .* >= 1"),
    (V2, {"spec_info": accepted(1, 3)}, ContractError, r"num_tokens_per_req = 0"),
    (V2, {}, ContractError, r"spec_info = 'NoneType' .* EagleDraftExtendInput"),
    (V1, {}, ContractError, r"extend_seq_lens = None"),
    (ForwardMode.EXTEND, {}, ContractError, r"extend_seq_lens = None"),
    (
        ForwardMode.TARGET_VERIFY,
        {"spec_info": EagleVerifyInput(NOWHERE, 4)},
        ContractError,
        r"draft_token_num = 4 .* 3, the backend's",
    ),
    (
        ForwardMode.EXTEND,
        EXTEND_LENS | {"seq_lens_cpu": torch.tensor([26, 8])},
        CapacityError,
        r"seq_lens = 26 .* <= 25",
    ),
    (
        ForwardMode.EXTEND,
        EXTEND_LENS | {"seq_lens_cpu": torch.tensor([8] * 40 + [26])},
        CapacityError,
        r"seq_lens = 26 .* <= 25",
    ),
)


def test_a_prefill_of_a_whole_context_is_planned() -> None:
    planner = toy_backend()
    lens = EXTEND_LENS | {"seq_lens_cpu": torch.tensor([25, 8])}
    planner.init_forward_metadata(batch_for(planner, ForwardMode.EXTEND, [25, 8], 6, **lens))


@pytest.mark.parametrize(("mode", "carried", "error", "text"), EAGER_ERRORS, ids=phase_id)
def test_what_eager_planning_refuses(
    mode: ForwardMode, carried: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        plan(toy_backend(), mode, [9, 8], 6, **carried)


# The graph that is captured: mode, requests, what its batch carries.
CAPTURE_ERRORS: dict[str, tuple[ForwardMode, int, dict[str, Any], type[Exception], str]] = {
    "more_requests_than_its_buffers_hold": (
        ForwardMode.TARGET_VERIFY,
        5,
        {},
        CapacityError,
        r"bs = 5 .* <= 4",
    ),
    "more_tokens_than_its_buffers_hold": (
        V1,
        1,
        {"tokens": 17, "spec_info": accepted(1)},
        CapacityError,
        r"num_tokens = 17 .* <= 16",
    ),
    "requests_of_unequal_query_rows": (
        V1,
        2,
        {"tokens": 5, "spec_info": accepted(1, 1)},
        ContractError,
        r"num_tokens = 5 .* multiple of bs = 2",
    ),
    "no_ragged_query_rows": (
        V1,
        2,
        {"tokens": 0, "spec_info": accepted(0, 0)},
        ContractError,
        r"num_tokens = 0 .* multiple of bs = 2",
    ),
    "no_query_rows": (
        V2,
        2,
        {"spec_info": accepted(0, 0)},
        ContractError,
        r"num_tokens_per_req = 0",
    ),
    "prefill": (ForwardMode.EXTEND, 1, EXTEND_LENS, ContractError, "captured mode = 'EXTEND'"),
}


@pytest.mark.parametrize(
    ("mode", "bs", "carried", "error", "text"), CAPTURE_ERRORS.values(), ids=CAPTURE_ERRORS
)
def test_what_a_capture_refuses(
    mode: ForwardMode, bs: int, carried: dict[str, Any], error: type[Exception], text: str
) -> None:
    graphs, rule = CapturedPlans(), f"a capture of {bs} {mode.name} requests is refused: {text}"
    with pytest.raises(error, match=text):
        pytest.fail(f"{rule}, not {graphs.out_graph(mode, bs, True, **carried).geometry}")


def test_what_captured_planning_refuses() -> None:
    graphs, verify = CapturedPlans(), ForwardMode.TARGET_VERIFY
    graphs.out_graph(verify, 2, in_capture=True)
    graphs.out_graph(ForwardMode.DECODE, 4, in_capture=True)
    with pytest.raises(CapacityError) as refused:
        graphs.out_graph(verify, 3)
    rule = "a bucket that was not captured is refused with those of its own mode"
    named = re.search(r"bs = 3 .* captured TARGET_VERIFY buckets \[2\]", str(refused.value))
    assert named, f"{rule}, [2], not {refused.value}"
    unallocated = toy_backend()
    batch = batch_for(unallocated, verify, [9], 3)
    with pytest.raises(ContractError, match="call init_cuda_graph_state first"):
        unallocated.init_forward_metadata_out_graph(batch, in_capture=True)


@pytest.mark.parametrize("field", ["seq_lens", "req_pool_indices", "out_cache_loc"])
def test_index_tensors_of_another_dtype_are_refused(field: str) -> None:
    planner = toy_backend()
    batch = batch_for(planner, ForwardMode.DECODE, [9, 8], 2)
    setattr(batch, field, getattr(batch, field).int())
    with pytest.raises(ContractError, match=rf"{field}.dtype = torch.int32 .* torch.int64"):
        planner.init_forward_metadata(batch)


@pytest.mark.parametrize(
    ("field", "of"),
    [
        ("token_to_kv_pool", "batch"),
        ("token_to_kv_pool", "batch backend"),
        ("req_to_token_pool", "batch"),
        ("req_to_token_pool", "batch backend"),
        ("req_to_token", "table"),
    ],
)
def test_pools_that_were_exchanged_are_refused(field: str, of: str) -> None:
    backend = toy_backend()
    batch = batch_for(backend, ForwardMode.DECODE, [9, 8], 2)
    backend.init_forward_metadata(batch)
    owners = {"batch": batch, "backend": backend, "table": backend.req_to_token_pool}
    exchanged = copy.copy(getattr(owners[of.split()[0]], field))
    for owner in of.split():
        setattr(owners[owner], field, exchanged)
    with pytest.raises(ContractError, match=f"^{field} = .* was built on"):
        backend.init_forward_metadata(batch)


def test_what_a_backend_is_built_from() -> None:
    wide = ReqToTokenPool(4, 40)
    wide.req_to_token = wide.req_to_token.long()
    with pytest.raises(ContractError, match=r"req_to_token.dtype = torch.int64"):
        toy_backend(req_to_token_pool=wide)
    with pytest.raises(CapacityError, match=r"columns = 24 .* >= 25, the context and one round"):
        toy_backend(req_to_token_pool=ReqToTokenPool(4, CONTEXT + 2))
    with pytest.raises(ContractError, match=r"num_draft_tokens = 0 .* >= 1 in target_verify"):
        plan(toy_backend(num_draft_tokens=0), ForwardMode.TARGET_VERIFY, [9], 3)


def test_forward_follows_the_plan_of_its_mode() -> None:
    planner = toy_backend()
    q = torch.zeros(2, 4, 8)
    batch = batch_for(planner, ForwardMode.DECODE, [9, 8], 2)
    with pytest.raises(ContractError, match="none: plan it first"):
        planner.forward_decode(q, q[:, :2], q[:, :2], None, batch)  # type: ignore[arg-type]
    plan(planner, ForwardMode.TARGET_VERIFY, [9, 8], 6)
    rule = "a DECODE forward is refused on the metadata of another mode"
    with pytest.raises(ContractError, match=r"'DECODE' .* the planned one, TARGET_VERIFY"):
        pytest.fail(f"{rule}, {planner.planned(batch).geometry.forward_mode.name}")
    with pytest.raises(ContractError, match=r"'DECODE' .* the planned one, TARGET_VERIFY"):
        planner.forward_decode(q, q[:, :2], q[:, :2], None, batch)  # type: ignore[arg-type]


@pytest.mark.parametrize("committed", [CONTEXT, CONTEXT + 1])
def test_the_context_wall(committed: int) -> None:
    planner = toy_backend()
    batch = batch_for(planner, ForwardMode.TARGET_VERIFY, [committed], 3)
    planner.init_forward_metadata(batch)
    q, kv = torch.zeros(3, 4, 8), torch.zeros(3, 2, 8)
    if committed == CONTEXT:
        planner.forward(q, kv, kv, mha_layer(), batch)
        return
    with pytest.raises(KernelRefusal, match=r"max_seq_len = \d+ .* >= 26") as refused:
        planner.forward(q, kv, kv, mha_layer(), batch)
    told = "a kernel's max_seq_len is the context length and a round's draft tokens"
    assert "max_seq_len = 25 " in str(refused.value), told
