"""Step i of a multi-step draft sees seq_lens + i + 1 keys, planned with no work in the parent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fixtures.toys.toy_attention import (
    CONTEXT,
    DRAFTS,
    make_batch,
    mha_pool,
    mla_pool,
    request_table,
    slots,
    swa_pool,
)
from harness.attention.baselines import KVIndicesMLAMultiStepDraftBackend
from harness.attention.multi_step_draft import (
    PagedMultiStepDraftBackend,
    TRTLLMHAAttnMultiStepDraftBackend,
    TRTLLMMLAMultiStepDraftBackend,
)
from harness.core.capability import REFERENCE
from harness.errors import CapacityError, ContractError, UsageError
from harness.kernels.reference import TorchPaged
from harness.upstream.base_attn_backend import decide_needs_cpu_seq_lens
from harness.upstream.forward_batch_info import EagleDraftInput, ForwardBatch, ForwardMode

STEPS = 4
KINDS = (
    TRTLLMHAAttnMultiStepDraftBackend,
    TRTLLMMLAMultiStepDraftBackend,
    KVIndicesMLAMultiStepDraftBackend,
)
# Step-major: where tokens 7, 8, 9 of row 1 and 4, 5, 6 of row 3 go.
LOCS = torch.stack((slots(1, 7, 10), slots(3, 4, 7)), 1).flatten()
LENGTHS = "cache_seqlens_int32 of draft step i is seq_lens + i + 1"


def backend(kind: type[PagedMultiStepDraftBackend], **changes: Any) -> PagedMultiStepDraftBackend:
    is_mha = kind is TRTLLMHAAttnMultiStepDraftBackend
    arguments = {
        "kernel": TorchPaged(REFERENCE),
        "req_to_token_pool": request_table(),
        "token_to_kv_pool": mha_pool() if is_mha else mla_pool(),
        "max_context_len": CONTEXT,
        "num_draft_tokens": DRAFTS,
        "speculative_num_steps": STEPS,
    }
    return kind(**arguments | changes)


def draft_batch(multi_step: PagedMultiStepDraftBackend) -> ForwardBatch:
    step = multi_step.attn_backends[0]
    spec = EagleDraftInput(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), None, STEPS)
    table, pool = step.req_to_token_pool, step.token_to_kv_pool
    return make_batch(ForwardMode.DECODE, table, pool, [7, 4], LOCS, spec_info=spec)


@pytest.mark.parametrize("kind", KINDS)
def test_a_smaller_runners_state_leaves_room_for_the_first_ones(kind: Any) -> None:
    multi_step = backend(kind)
    batch = draft_batch(multi_step)
    for max_bs in (2, 1):
        multi_step.init_cuda_graph_state(max_bs, max_bs)
    try:
        multi_step.init_forward_metadata_out_graph(batch, in_capture=True)
    except CapacityError as error:
        told = "init_cuda_graph_state of a smaller runner keeps the buffers that graphs read"
        pytest.fail(f"{told}: {error}")
    multi_step.init_forward_metadata_in_graph(batch)
    lengths = [
        step.forward_metadata.cache_seqlens_int32.tolist() for step in multi_step.attn_backends
    ]
    assert lengths == [[8, 5], [9, 6], [10, 7]], f"{LENGTHS}, not {lengths}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_graph", [False, True])
def test_each_step_sees_one_more_key(kind: Any, is_graph: bool) -> None:
    multi_step = backend(kind)
    batch = draft_batch(multi_step)
    if is_graph:
        multi_step.init_cuda_graph_state(4, 4)
        multi_step.init_forward_metadata_out_graph(batch, in_capture=True)
        multi_step.init_forward_metadata_out_graph(batch)
        multi_step.init_forward_metadata_in_graph(batch)
    else:
        multi_step.init_forward_metadata(batch)
    planned = [step.forward_metadata for step in multi_step.attn_backends]
    lengths = [m.cache_seqlens_int32.tolist() for m in planned]
    assert lengths == [[8, 5], [9, 6], [10, 7]], f"{LENGTHS}, not {lengths}"
    # Token 8 of row 1 opens its third page; captured steps read the last one's table.
    tables = [m.page_table[0, :4].tolist() for m in planned]
    rule = "phases that share a page table find the pages of num_table_keys in it, not of their own"
    assert not is_graph or tables == [[7, 2, 11, 0]] * 3, rule
    rule = "page_table of an eager draft step has the pages of its own keys"
    assert is_graph or tables == [[7, 2, 0, 0], [7, 2, 11, 0], [7, 2, 11, 0]], f"{rule}: {tables}"
    totals = {m.cu_seqlens_q.tolist()[-1] for m in planned}
    assert totals == {2}, f"a draft step has one query per request, 2 and not {totals}"
    # (22 + 4) tokens in pages of 4.
    sizes = {m.page_table.shape for m in planned}
    rule = "page_table has columns for max_context_len and a round's draft tokens"
    assert sizes == {(2, 7)}, f"{rule}, (2, 7) and not {sizes}"
    kept = batch.seq_lens.tolist()
    assert kept == [7, 4], f"planning leaves seq_lens of the batch as they were, not {kept}"


@pytest.mark.parametrize("kind", KINDS)
def test_captured_steps_read_one_table_as_far_as_the_last_sees(kind: Any) -> None:
    multi_step = backend(kind)
    multi_step.init_cuda_graph_state(4, 4)
    batch = draft_batch(multi_step).with_changes(seq_lens=torch.tensor([6, 4]))
    multi_step.init_forward_metadata_out_graph(batch, in_capture=True)
    multi_step.init_forward_metadata_in_graph(batch)
    planned = [step.forward_metadata for step in multi_step.attn_backends]
    tables = {m.page_table.data_ptr() for m in planned}
    assert len(tables) == 1, f"captured draft steps share one page_table, not {len(tables)}"
    # The last step's ninth token opens the third page of row 1, its seventh fills none of row 3's.
    pages = planned[0].page_table[:, :4].tolist()
    rule = "the page_table that draft steps and the verify share has every page of the last step"
    assert pages == [[7, 2, 11, 0], [4, 12, 0, 0]], f"{rule}, not {pages}"
    offsets = [m.geometry.table_offset for m in planned]
    assert offsets == [3, 3, 3], f"table_offset of each step is the last step's, 3, not {offsets}"
    # Room that suffices stays where it is; where it does not, later captures get their own.
    multi_step.init_cuda_graph_state(2, 2)
    multi_step.init_forward_metadata_out_graph(batch, in_capture=True)
    again = multi_step.attn_backends[0].forward_metadata
    stays = again.page_table.data_ptr() == planned[0].page_table.data_ptr()
    assert stays, "init_cuda_graph_state of a smaller runner keeps the buffers of captured graphs"
    multi_step.init_cuda_graph_state(8, 8)
    multi_step.init_forward_metadata_out_graph(batch, in_capture=True)
    again = multi_step.attn_backends[0].forward_metadata
    moved = again.page_table.data_ptr() != planned[0].page_table.data_ptr()
    assert moved, "init_cuda_graph_state of a larger runner allocates another page_table"


@pytest.mark.parametrize("batch_size", [2, 5], ids=["own_size", "dp_padded"])
def test_each_step_translates_its_own_write_locations(batch_size: int) -> None:
    multi_step = backend(TRTLLMHAAttnMultiStepDraftBackend, token_to_kv_pool=swa_pool())
    batch = draft_batch(multi_step).with_changes(batch_size=batch_size)
    mapping = batch.token_to_kv_pool.full_to_swa_index_mapping.clone()
    said = "a step writes its own slots, request by request"
    try:
        multi_step.init_forward_metadata(batch)
    except RuntimeError as error:
        pytest.fail(f"{said}, whatever batch_size was padded to: {error}")
    batch.token_to_kv_pool.full_to_swa_index_mapping.zero_()
    for i, step in enumerate(multi_step.attn_backends):
        wanted = mapping[torch.cat((slots(1, 7 + i, 8 + i), slots(3, 4 + i, 5 + i)))]
        found = step.forward_metadata.swa_out_cache_loc
        assert found.tolist() == wanted.tolist(), said


def test_the_parent_generates_no_kv_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[type, list[EagleDraftInput]] = {}
    for kind in KINDS[1:]:
        multi_step = backend(kind)
        for step in multi_step.attn_backends:
            log = seen.setdefault(kind, [])
            monkeypatch.setattr(
                step, "init_forward_metadata", lambda b, log=log: log.append(b.spec_info)
            )
        multi_step.init_forward_metadata(draft_batch(multi_step))
    assert [spec.kv_indices for spec in seen[TRTLLMMLAMultiStepDraftBackend]] == [None] * 3
    spec = seen[KVIndicesMLAMultiStepDraftBackend][0]
    assert spec.kv_indptr is not None
    assert spec.kv_indices is not None
    assert spec.kv_indptr.tolist() == [[0, 8, 13], [0, 9, 15], [0, 10, 17]]
    for i, total in enumerate((13, 15, 17)):
        wanted = torch.cat((slots(1, 0, 8 + i), slots(3, 0, 5 + i)))
        assert torch.equal(spec.kv_indices[i, :total].long(), wanted)
        # The last entry takes what lies after a request's end.
        assert not spec.kv_indices[i, total:-1].any(), "a step lists no slot after its last key"


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_stay_on_the_device(kind: Any) -> None:
    multi_step = backend(kind)
    assert not decide_needs_cpu_seq_lens([multi_step, *multi_step.attn_backends])
    assert multi_step.get_cuda_graph_seq_len_fill_value() == 1
    multi_step.on_after_cuda_graph_warmup()


@pytest.mark.parametrize("kind", KINDS)
def test_idle_and_a_single_step_plan_nothing(kind: Any) -> None:
    multi_step = backend(kind)
    idle = draft_batch(multi_step).with_changes(forward_mode=ForwardMode.IDLE)
    multi_step.init_forward_metadata(idle)
    assert [step.forward_metadata for step in multi_step.attn_backends] == [None] * 3
    single = backend(kind, speculative_num_steps=1)
    single.init_forward_metadata(idle)
    assert single.attn_backends == []


ARGUMENTS = (
    ({"topk": 2}, r"topk = 2 .* 1: these kernels draft a chain"),
    (
        {"speculative_num_steps": 0},
        r"speculative_num_steps = 0 .* >= 1",
    ),
)


@pytest.mark.parametrize(("changes", "text"), ARGUMENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_arguments_out_of_range(kind: Any, changes: dict[str, int], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        backend(kind, **changes)


@pytest.mark.parametrize("kind", KINDS)
def test_its_steps_serve_drafts_only(kind: Any) -> None:
    steps = backend(kind).attn_backends
    assert len(steps) == STEPS - 1, "a draft has speculative_num_steps - 1 forwards, each a backend"
    assert [step.skip_prefill for step in steps] == [True] * (STEPS - 1)


def test_one_write_location_per_step_and_request() -> None:
    multi_step = backend(TRTLLMMLAMultiStepDraftBackend)
    own = multi_step._step_batch(draft_batch(multi_step), 1).out_cache_loc.tolist()
    rule = "out_cache_loc of a draft is step-major: step i has rows i * bs to (i + 1) * bs"
    assert own == LOCS[2:4].tolist(), f"{rule}, not {own}"
    batch = draft_batch(multi_step).with_changes(out_cache_loc=LOCS[:4])
    with pytest.raises(ContractError, match=r"out_cache_loc rows = 4 .* multiple of 3"):
        multi_step.init_forward_metadata(batch)


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_of_one_step_has_no_backend_and_plans_nothing(kind: Any) -> None:
    multi_step = backend(kind, speculative_num_steps=1)
    assert not multi_step.attn_backends
    multi_step.init_cuda_graph_state(4, 4)
    multi_step.init_forward_metadata_in_graph(draft_batch(backend(kind)))
