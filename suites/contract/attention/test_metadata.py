"""Metadata holds, for every phase, the int32 lengths and pages worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fixtures.toys.toy_attention import (
    DRAFTS,
    PAGE,
    ROWS,
    make_batch,
    slots,
    swa_pool,
)
from fixtures.toys.toy_planning import (
    EXTEND_LENS,
    CapturedPlans,
    accepted,
    batch_for,
    plan,
    toy_backend,
)
from fixtures.toys.toy_scenes import phase_id
from harness.attention.geometry import Geometry
from harness.attention.metadata import packed_causal_mask
from harness.attention.trtllm_mla import TRTLLMMLABackend
from harness.core.capability import TRTLLM_GEN_MLA, XQA
from harness.errors import ContractError
from harness.kernels.reference import TorchPaged
from harness.upstream.forward_batch_info import (
    EagleVerifyInput,
    ForwardMode,
)
from harness.upstream.older_contracts import OlderContracts

NOWHERE = torch.zeros(0, dtype=torch.int64)
LONGEST = (
    "max_q_len is the longest query the host knows, else a draft extend's width, else all rows"
)


# mode, query rows, what the batch carries, keys, cumulative queries, longest query
PHASES: tuple[tuple[ForwardMode, int, dict[str, Any], list[int], list[int], int], ...] = (
    (ForwardMode.EXTEND, 7, EXTEND_LENS, [9, 8], [0, 2, 7], 7),
    (ForwardMode.EXTEND, 7, EXTEND_LENS | {"extend_seq_lens_cpu": [2, 5]}, [9, 8], [0, 2, 7], 5),
    (ForwardMode.DECODE, 2, {}, [9, 8], [0, 1, 2], 1),
    (ForwardMode.TARGET_VERIFY, 6, {}, [12, 11], [0, 3, 6], 3),
    (ForwardMode.DRAFT_EXTEND, 4, {"spec_info": accepted(1, 3)}, [9, 8], [0, 1, 4], 3),
    (ForwardMode.DRAFT_EXTEND, 4, {"spec_info": accepted(2, 2)}, [9, 8], [0, 2, 4], 3),
    (ForwardMode.DRAFT_EXTEND_V2, 8, {"spec_info": accepted(1, 3, width=4)}, [9, 8], [0, 4, 8], 4),
)


@pytest.mark.parametrize(
    ("mode", "tokens", "carried", "keys", "cu_q", "longest"), PHASES, ids=phase_id
)
def test_lengths_and_pages_of_every_phase(
    mode: ForwardMode,
    tokens: int,
    carried: dict[str, Any],
    keys: list[int],
    cu_q: list[int],
    longest: int,
) -> None:
    metadata = plan(toy_backend(), mode, [9, 8], tokens, **carried)
    seqlens = metadata.cache_seqlens_int32.tolist()
    rule = "cache_seqlens_int32 is seq_lens, plus num_draft_tokens in TARGET_VERIFY"
    assert seqlens == keys, f"{rule}: {keys}, not {seqlens}"
    ends_q, ends_k = metadata.cu_seqlens_q.tolist(), metadata.cu_seqlens_k.tolist()
    assert ends_q == cu_q, f"cu_seqlens_q is the running sum of query lengths, not {ends_q}"
    rule = "cu_seqlens_k is the running sum of cache_seqlens_int32"
    assert ends_k == [0, keys[0], sum(keys)], f"{rule}, not {ends_k}"
    assert metadata.geometry.max_q_len == longest, LONGEST
    # Width: (22 + 3) tokens in pages of 4. Pages of 9 … 12 keys: three, of 8: two.
    second = [4, 12] if keys[1] == 8 else [4, 12, 1]
    pages = [[7, 2, 11, 0, 0, 0, 0], second + [0] * (7 - len(second))]
    table = metadata.page_table.tolist()
    assert table == pages, f"page_table has the pages of a request's keys, then zeros, not {table}"
    tensors = (metadata.cache_seqlens_int32, metadata.cu_seqlens_q, metadata.cu_seqlens_k)
    dtypes = {t.dtype for t in (*tensors, metadata.page_table)}
    assert dtypes == {torch.int32}, f"lengths and page tables are int32, not {dtypes}"


@pytest.mark.parametrize(
    ("keys", "pages"), [(4, [7]), (5, [7, 2]), (8, [7, 2]), (9, [7, 2, 11])], ids=str
)
def test_pages_around_an_edge(keys: int, pages: list[int]) -> None:
    row = plan(toy_backend(), ForwardMode.DECODE, [keys], 1).page_table[0].tolist()
    assert row == pages + [0] * (7 - len(pages))


def test_the_longest_query_is_the_one_the_host_knows() -> None:
    spec = accepted(1, 2)
    assert (
        plan(toy_backend(), ForwardMode.DRAFT_EXTEND, [9, 8], 3, spec_info=spec).geometry.max_q_len
        == 3
    )
    spec.num_accept_tokens_cpu = [1, 2]
    assert (
        plan(toy_backend(), ForwardMode.DRAFT_EXTEND, [9, 8], 3, spec_info=spec).geometry.max_q_len
        == 2
    )


def test_accept_counts_cut_a_draft_extend_and_no_lengths_of_its_prefill() -> None:
    spec, of_prefill = accepted(1, 3), torch.tensor([2, 5], dtype=torch.int32)
    spec.num_accept_tokens_cpu = [1, 3]
    kept = {"extend_seq_lens": of_prefill, "extend_seq_lens_cpu": [2, 5]}
    metadata = plan(toy_backend(), ForwardMode.DRAFT_EXTEND, [9, 8], 4, spec_info=spec, **kept)
    rule = "a draft extend's queries are the accepted tokens, whatever an older extend had"
    assert metadata.cu_seqlens_q.tolist() == [0, 1, 4], rule
    assert metadata.geometry.max_q_len == 3, rule


@pytest.mark.parametrize("declared", [DRAFTS - 1, DRAFTS + 2])
def test_a_longest_query_nobody_knows_is_what_the_batch_declares(declared: int) -> None:
    spec, v1 = accepted(1, 2, width=declared), ForwardMode.DRAFT_EXTEND
    assert plan(toy_backend(), v1, [9, 8], 9, spec_info=spec).geometry.max_q_len == declared
    spec = accepted(1, 2)
    assert plan(toy_backend(), v1, [9, 8], 9, spec_info=spec).geometry.max_q_len == DRAFTS
    one = accepted(1, width=declared)  # and no more than there are rows
    width = plan(toy_backend(), v1, [9], 1, spec_info=one).geometry.max_q_len
    assert width == 1, "max_q_len is at most the number of query rows, whatever width is declared"


@pytest.mark.parametrize("asked", [[(4, 8), (3, 9)], [(3, 9), (4, 8)]], ids=str)
def test_room_of_two_runners_holds_the_padded_queries_of_each(asked: list[tuple[int, int]]) -> None:
    backend = toy_backend(TRTLLMMLABackend)
    for size in asked:
        backend.init_cuda_graph_state(*size)
    for bs, width in ((4, 2), (3, 3)):
        lens, rows = [9, 8, 7, 6][:bs], (1, 3, 2, 0)[:bs]
        counts = accepted(*[1] * bs)
        batch = batch_for(
            backend, ForwardMode.DRAFT_EXTEND, lens, bs * width, rows=rows, spec_info=counts
        )
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        backend.init_forward_metadata_in_graph(batch)
        assert backend.forward_metadata.pad_rows.tolist() == [
            row for row in range(bs) for _ in range(width)
        ]


@pytest.mark.parametrize(("steps", "room"), [(6, 6), (2, DRAFTS)])
def test_a_request_at_full_context_has_room_for_drafts_and_steps(steps: int, room: int) -> None:
    backend = toy_backend(speculative_num_steps=steps)
    assert backend.max_total_len == backend.max_context_len + room


def test_mla_v1_pads_queries_and_lengths_to_the_longest() -> None:
    spec = accepted(1, 3)
    spec.num_accept_tokens_cpu = [1, 3]
    metadata = plan(
        toy_backend(TRTLLMMLABackend), ForwardMode.DRAFT_EXTEND, [9, 8], 5, spec_info=spec
    )
    seqlens, ends = metadata.cache_seqlens_int32.tolist(), metadata.cu_seqlens_q.tolist()
    padded, found = metadata.pad_rows.tolist(), metadata.unpad_rows.tolist()
    rule = "cache_seqlens_int32 is seq_lens - accepted tokens + max_q_len"
    assert seqlens == [9 - 1 + 3, 8], f"{rule}, not {seqlens}"
    assert ends == [0, 1, 4], f"cu_seqlens_q counts the accepted tokens, unpadded, not {ends}"
    rule = "pad_rows repeats each request's own last query to max_q_len"
    assert padded == [0, 0, 0, 1, 2, 3], f"{rule}, not {padded}"
    rule = "unpad_rows finds each query among padded ones, and the zero row behind the last"
    assert found == [0, 3, 4, 5, 6], f"{rule}, not {found}"
    row = metadata.page_table[0].tolist()
    assert row == [7, 2, 11, 0, 0, 0, 0], f"page_table has the pages of padded keys, not {row}"


def test_table_width_covers_the_round_of_draft_tokens_and_the_kernels_multiple() -> None:
    assert plan(toy_backend(), ForwardMode.DECODE, [1], 1).page_table.shape == (1, 7)
    steps = toy_backend(speculative_num_steps=6)
    assert plan(steps, ForwardMode.DECODE, [1], 1).page_table.shape == (1, 7)
    wide = toy_backend(TRTLLMMLABackend, kernel=TorchPaged(TRTLLM_GEN_MLA))
    assert plan(wide, ForwardMode.DECODE, [1], 1).page_table.shape == (1, 32)


def test_swa_pages_and_write_locations_are_translated_at_planning() -> None:
    hybrid = swa_pool()
    planner = toy_backend(token_to_kv_pool=hybrid)
    loc = torch.cat((slots(1, 9, 12), slots(3, 8, 11)))
    batch = make_batch(ForwardMode.TARGET_VERIFY, planner.req_to_token_pool, hybrid, [9, 8], loc)
    planner.init_forward_metadata(batch)
    metadata = planner.forward_metadata
    assert metadata is not None
    # Page p lives in 5 p mod 17: 7 -> 1, 2 -> 10, 11 -> 4; 4 -> 3, 12 -> 9, 1 -> 5.
    full = metadata.page_table[:, :3].tolist()
    rule = "page_table has the pages of the full pool"
    assert full == [[7, 2, 11], [4, 12, 1]], f"{rule}, not {full}"
    assert metadata.swa_page_table is not None, "a plan on an SWA pool has a swa_page_table"
    dtype = metadata.swa_page_table.dtype
    assert dtype == torch.int32, f"swa_page_table is int32, not {dtype}"
    pages = metadata.swa_page_table.tolist()
    rule = "swa_page_table has the SWA pages of live pages, then zeros"
    assert pages == [[1, 10, 4, 0, 0, 0, 0], [3, 9, 5, 0, 0, 0, 0]], f"{rule}, not {pages}"
    wanted = [4 * PAGE + 1, 4 * PAGE + 2, 4 * PAGE + 3, 5 * PAGE, 5 * PAGE + 1, 5 * PAGE + 2]
    hybrid.full_to_swa_index_mapping.zero_()
    assert metadata.swa_out_cache_loc is not None, "a plan on an SWA pool has a swa_out_cache_loc"
    found = metadata.swa_out_cache_loc.tolist()
    rule = "swa_out_cache_loc is what full_to_swa_index_mapping said at planning"
    assert found == wanted, f"{rule}, not {found}"


def test_each_draft_step_has_its_own_swa_write_locations() -> None:
    writer = toy_backend(token_to_kv_pool=swa_pool()).writer
    step = Geometry(forward_mode=ForwardMode.DECODE, bs=2, num_tokens=2, max_q_len=1)
    buffers = writer.new_buffers(step, phases=3)
    own = [buffers.slice(step, phase).swa_out_cache_loc for phase in range(3)]
    starts = [loc.storage_offset() for loc in own if loc is not None]
    assert starts == [0, 2, 4], "a draft step writes window keys to its own swa_out_cache_loc"


def test_a_plain_pool_is_never_translated() -> None:
    metadata = plan(toy_backend(), ForwardMode.DECODE, [9], 1)
    assert metadata.swa_page_table is None
    assert metadata.swa_out_cache_loc is None


def test_packed_mask_bits() -> None:
    mask = packed_causal_mask(2, 3, "cpu")
    assert mask.dtype == torch.uint16, f"packed_causal_mask is uint16, not {mask.dtype}"
    bits = mask.to(torch.int32).tolist()
    rule = "query i of packed_causal_mask sees keys 0 to i, its own too, in as many low bits"
    assert bits == [[[1, 0], [3, 0], [7, 0]]] * 2, f"{rule}, not {bits}"


@pytest.mark.parametrize("mode", [ForwardMode.TARGET_VERIFY, ForwardMode.DECODE], ids=phase_id)
def test_a_mask_is_planned_where_the_kernel_needs_one(mode: ForwardMode) -> None:
    planner = toy_backend(kernel=TorchPaged(XQA))
    mask = plan(planner, mode, [9, 8], 6).packed_mask
    assert (mask is None) == mode.is_decode()
    planner = toy_backend(kernel=TorchPaged(XQA), num_draft_tokens=2)
    narrow = plan(planner, mode, [9, 8], 4).packed_mask
    assert (narrow is None) == mode.is_decode(), "two queries of a request need a mask already"
    assert plan(toy_backend(), mode, [9, 8], 6).packed_mask is None


def test_buckets_of_a_phase_share_storage_and_phases_do_not() -> None:
    graphs = CapturedPlans()
    verify = ForwardMode.TARGET_VERIFY
    four, two = (graphs.out_graph(verify, bs, in_capture=True) for bs in (4, 2))
    decode = graphs.out_graph(ForwardMode.DECODE, 2, in_capture=True)
    assert four.page_table.data_ptr() == two.page_table.data_ptr() != decode.page_table.data_ptr()
    assert (four.page_table.shape[0], two.page_table.shape[0]) == (4, 2)
    # An eager forward in between, and a second runner's allocation, leave the addresses alone.
    eager = plan(graphs.planner, verify, [5, 6], 6)
    assert eager.page_table.data_ptr() != two.page_table.data_ptr()
    assert graphs.out_graph(verify, 2) is two
    assert two.cache_seqlens_int32.tolist() == [12, 11]
    graphs.planner.init_cuda_graph_state(2, 8)
    one = graphs.out_graph(verify, 1, in_capture=True)
    assert one.page_table.data_ptr() == two.page_table.data_ptr()


def test_a_phase_captured_after_a_smaller_runner_has_the_room_of_the_larger_one() -> None:
    graphs, extend = CapturedPlans(), ForwardMode.DRAFT_EXTEND_V2
    graphs.planner.init_cuda_graph_state(2, 8)
    late = graphs.out_graph(extend, 4, in_capture=True, spec_info=accepted(1, 4, 2, 1))
    assert late.page_table.shape[0] == 4


def test_a_larger_runner_gets_larger_buffers_and_earlier_graphs_keep_theirs() -> None:
    graphs, verify = CapturedPlans(), ForwardMode.TARGET_VERIFY
    four = graphs.out_graph(verify, 4, in_capture=True)
    graphs.planner.init_cuda_graph_state(8, 32)
    assert graphs.out_graph(verify, 4) is four
    five = graphs.out_graph(verify, 5, in_capture=True)
    assert five.page_table.shape[0] == 5
    assert five.page_table.data_ptr() != four.page_table.data_ptr()


def test_v2_keeps_its_captured_stride() -> None:
    graphs, v2 = CapturedPlans(), ForwardMode.DRAFT_EXTEND_V2
    captured = graphs.out_graph(v2, 2, in_capture=True, spec_info=accepted(1, 4))
    assert captured.geometry.max_q_len == 4
    replayed = graphs.out_graph(v2, 2, spec_info=accepted(2, 1))
    assert replayed.cu_seqlens_q.tolist() == [0, 4, 8]
    with pytest.raises(ContractError, match=r"num_tokens_per_req = 3 .* 4, the captured stride"):
        graphs.out_graph(v2, 2, spec_info=accepted(2, 1, width=3))


def test_v1_keeps_its_captured_width_and_refills_its_cumulative_lengths() -> None:
    graphs, v1 = CapturedPlans(), ForwardMode.DRAFT_EXTEND
    graphs.out_graph(v1, 2, in_capture=True, tokens=8, spec_info=accepted(1, 1))
    replayed = graphs.out_graph(v1, 2, tokens=8, spec_info=accepted(1, 3))
    assert replayed.geometry.max_q_len == 4
    assert replayed.cu_seqlens_q.tolist() == [0, 1, 4]


def test_the_older_pair_plans_the_same() -> None:
    planner = toy_backend()
    planner.init_cuda_graph_state(4, 16)
    rows, lens = torch.tensor([*ROWS, 0]), torch.tensor([9, 8, 1])
    verify = EagleVerifyInput(NOWHERE, DRAFTS)
    mode = ForwardMode.TARGET_VERIFY
    older = OlderContracts(planner, planner.req_to_token_pool, planner.token_to_kv_pool)
    older.init_forward_metadata_capture_cuda_graph(2, 6, rows, lens, None, mode, verify)
    captured = planner.forward_metadata
    older.init_forward_metadata_replay_cuda_graph(
        2, rows, torch.tensor([13, 4, 1]), None, None, mode, verify, None
    )
    metadata = planner.forward_metadata
    assert metadata is not None
    assert metadata is captured
    assert metadata.cache_seqlens_int32.tolist() == [16, 7]
    assert metadata.page_table[:, :5].tolist() == [[7, 2, 11, 5, 0], [4, 12, 0, 0, 0]]
    hybrid = OlderContracts(planner, planner.req_to_token_pool, swa_pool())
    with pytest.raises(ContractError, match="the older pair carries no write locations"):
        hybrid.init_forward_metadata_capture_cuda_graph(2, 6, rows, lens, None, mode, verify)


def test_idle_plans_nothing() -> None:
    planner = toy_backend()
    idle = batch_for(planner, ForwardMode.IDLE, [], 0)
    planner.init_forward_metadata(idle)
    planner.init_forward_metadata_out_graph(idle)
    planner.init_forward_metadata_in_graph(idle)
    assert planner.forward_metadata is None


@pytest.mark.parametrize("plan_idle", ["init_forward_metadata", "init_forward_metadata_out_graph"])
def test_a_plan_does_not_outlive_an_idle_forward(plan_idle: str) -> None:
    planner = toy_backend()
    batch = batch_for(planner, ForwardMode.DECODE, [9, 8], 2)
    planner.init_cuda_graph_state(2, 2)
    planner.init_forward_metadata_out_graph(batch, in_capture=True)
    assert planner.planned(batch).geometry.bs == 2
    getattr(planner, plan_idle)(batch_for(planner, ForwardMode.IDLE, [], 0))
    with pytest.raises(
        ContractError, match="'DECODE' is not accepted; accepted: the planned one, none"
    ):
        planner.planned(batch)


@pytest.mark.parametrize(
    ("mode", "tokens"), [(ForwardMode.TARGET_VERIFY, 6), (ForwardMode.DECODE, 2)]
)
def test_the_plan_of_an_eager_forward_outlives_the_next_plan(
    mode: ForwardMode, tokens: int
) -> None:
    """With overlap the next batch is planned while this one runs."""
    backend = toy_backend()
    first = plan(backend, mode, [9, 8], tokens)
    names = ("cache_seqlens_int32", "cu_seqlens_q", "cu_seqlens_k", "page_table")
    before = {name: getattr(first, name).clone() for name in names}
    plan(backend, mode, [3, 14], tokens)
    for name in names:
        assert torch.equal(getattr(first, name), before[name]), name


def test_a_runner_of_as_many_requests_and_more_tokens_gets_its_own_room() -> None:
    backend = toy_backend(TRTLLMMLABackend)
    for width in (2, 3):
        backend.init_cuda_graph_state(2, 2 * width)
        spec = accepted(*[width] * 2)
        batch = batch_for(backend, ForwardMode.DRAFT_EXTEND, [9, 8], 2 * width, spec_info=spec)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        assert backend.forward_metadata is not None
        assert backend.forward_metadata.geometry.max_q_len == width
