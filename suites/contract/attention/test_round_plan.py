"""Draft steps, verify and extend of a round read one table, which its draft has filled."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from fixtures.toys.tiny_engine import PROMPTS, TinyPair
from fixtures.toys.toy_attention import slots, swa_pool
from fixtures.toys.toy_engine import spec_config
from fixtures.toys.toy_scenes import phase_id
from fixtures.toys.toy_trio import KINDS, Trio
from harness.attention.baselines import HostLengthsMLABackend, VerifyFixUpMHABackend
from harness.attention.metadata import TableLayout
from harness.attention.metadata_writer import MetadataWriter
from harness.attention.round_plan import DRAFT, EXTEND, VERIFY, RoundPlan
from harness.attention.trtllm_mha import TRTLLMHAAttnBackend
from harness.attention.trtllm_mla import TRTLLMMLABackend
from harness.engine.plan_stream import RecordedStreams
from harness.errors import ContractError, UsageError
from harness.upstream.base_attn_backend import SharedReadEnds
from harness.upstream.forward_batch_info import ForwardMode

FILLED = "the draft of a shared round has filled what its verify reads: a verify fills nothing"
HELD = "a round's page table has room for the keys of its draft steps and of its verify, the more"
EXTEND_HELD = "seq_lens of an extend count the verify's tokens, which its table needs no pages for"


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize(("steps", "drafts"), [(6, 3), (3, 5), (2, 1)], ids=str)
def test_one_table_serves_the_round(steps: int, drafts: int, family: str) -> None:
    trio = Trio(steps, drafts, family)
    for seq_lens in ([9, 4], [3], [1, 8], [14, 13]):
        for mode in (DRAFT, VERIFY, EXTEND):
            trio.choose(mode, seq_lens)
        trio.fill(DRAFT, seq_lens)
        assert not trio.fill(VERIFY, seq_lens), FILLED
        table = trio.parts()[0].page_table
        version = table._version
        assert trio.fill(EXTEND, seq_lens)
        again = "the draft of a shared round has filled its page table: an extend fills it no more"
        assert table._version == version, again
        offsets = [*range(1, steps), drafts, drafts]
        for part, offset in zip(trio.parts(), offsets, strict=True):
            keys = [n + offset for n in seq_lens]
            assert part.cache_seqlens_int32.tolist() == keys
            assert part.cu_seqlens_k.tolist() == [0, keys[0], sum(keys)][: len(keys) + 1]
            assert part.cu_seqlens_q[-1] == len(keys) * part.geometry.max_q_len
            assert part.page_table.data_ptr() == table.data_ptr()
            # The extend counts from the end of the verify.
            is_extend = part is trio.parts()[-1]
            num_table_keys = max(steps - 1, drafts) - (drafts if is_extend else 0)
            rule = EXTEND_HELD if is_extend else HELD
            assert part.geometry.table_offset == num_table_keys, rule
        # The Triton fill takes the table's extent from the last of the phases that it is handed.
        handed = trio.plan.verify(len(seq_lens)).geometry.table_offset
        assert handed == max(steps - 1, drafts), f"{HELD}: filled for {handed}"
        for row, length, request in zip(table.tolist(), seq_lens, (1, 3), strict=False):
            held = slots(request, 0, length + max(steps - 1, drafts))[::4] // 4
            assert row == held.tolist() + [0] * (len(row) - len(held))
        assert len({part.cache_seqlens_int32.data_ptr() for part in trio.parts()}) == steps + 1


def test_eager_phases_and_other_modes_plan_for_themselves() -> None:
    trio = Trio()
    for mode in (DRAFT, VERIFY, EXTEND):
        trio.choose(mode, [9, 4])
    shared = trio.parts()[0].page_table.data_ptr()
    for mode in (DRAFT, VERIFY, EXTEND):
        trio.choose(mode, [9, 4], eager=True)
    tables = {part.page_table.data_ptr() for part in trio.parts()}
    assert len(tables) == trio.steps + 1
    assert shared not in tables
    assert [part.cache_seqlens_int32[0] for part in trio.parts()] == [10, 11, 12, 12, 12]
    target, plain = trio.backends[VERIFY], trio.batch(VERIFY, [9, 4])
    plain = plain.with_changes(forward_mode=ForwardMode.DECODE, spec_info=None)
    target.init_forward_metadata_out_graph(plain, in_capture=True)
    target.init_forward_metadata_in_graph(plain)
    assert target.forward_metadata.cache_seqlens_int32.tolist() == [9, 4]
    assert target.forward_metadata.page_table.data_ptr() != shared


@pytest.mark.parametrize("family", KINDS)
def test_a_draft_extend_v1_beside_a_round_fills_its_own_table(family: str) -> None:
    trio = Trio(family=family)
    extend, batch = trio.backends[EXTEND], trio.batch(EXTEND, [9, 4])
    batch = batch.with_changes(forward_mode=ForwardMode.DRAFT_EXTEND)
    extend.init_forward_metadata_out_graph(batch, in_capture=True)
    extend.init_forward_metadata_in_graph(batch)
    pages = [
        (slots(request, 0, length)[::4] // 4).tolist() for request, length in ((1, 12), (3, 7))
    ]
    table = extend.forward_metadata.page_table.tolist()
    assert [row[: len(own)] for row, own in zip(table, pages, strict=True)] == pages


def test_a_draft_extend_v1_beside_a_round_reads_the_table_in_its_replay() -> None:
    read_ends = Trio().backends[EXTEND].shared_read_ends
    rule = "no wait for a v2 draft extend of a shared round: the draft has filled its page table"
    assert read_ends(EXTEND) is SharedReadEnds.PRE_REPLAY, rule
    assert read_ends(ForwardMode.DRAFT_EXTEND) is SharedReadEnds.IN_REPLAY


def test_a_rounds_bucket_counts_rows_though_dp_padding_raised_batch_size() -> None:
    trio = Trio()
    for mode, backend in trio.backends.items():
        padded = trio.batch(mode, [9, 4]).with_changes(batch_size=5)
        # Refused where the draft's bucket is another than that of a phase which reads it.
        backend.init_forward_metadata_out_graph(padded)
    rows = [part.geometry.bs for part in trio.parts()]
    assert rows == [2] * (trio.steps + 1), f"every phase plans the rows of seq_lens, 2, not {rows}"


def test_a_smaller_runner_takes_no_room_from_a_round() -> None:
    trio = Trio()
    for mode, backend in trio.backends.items():
        backend.init_cuda_graph_state(1, trio.drafts)
        backend.init_forward_metadata_out_graph(trio.batch(mode, [1, 1]), in_capture=True)
    trio.fill(DRAFT, [9, 4])
    assert not trio.fill(VERIFY, [9, 4]), FILLED
    assert trio.parts()[-2].cache_seqlens_int32.tolist() == [12, 7]


def test_a_runner_of_more_query_rows_takes_no_phase_out_of_its_round() -> None:
    """The target's backend is also told of a runner with five query tokens per request."""
    trio = Trio()
    trio.backends[VERIFY].init_cuda_graph_state(2, 2 * 5)
    trio.backends[VERIFY].init_forward_metadata_out_graph(
        trio.batch(VERIFY, [1, 1]), in_capture=True
    )
    for mode in (DRAFT, VERIFY):
        trio.choose(mode, [9, 4])
    trio.fill(DRAFT, [9, 4])
    assert not trio.fill(VERIFY, [9, 4]), FILLED
    said = "a verify is captured in the round's buffers, however many rows another runner has"
    draft, verify = trio.parts()[0], trio.parts()[-2]
    assert verify.page_table.data_ptr() == draft.page_table.data_ptr(), said
    assert verify.cache_seqlens_int32.tolist() == [12, 7], said


Told = tuple[ForwardMode, int, bool]
E1, E2 = (1, True), (2, True)
G1, G2 = (1, False), (2, False)
# Phases in the order of their planning: who, how many requests, whether eagerly.
ROUNDS: dict[str, list[Told]] = {
    "draft_first": [(DRAFT, *G2), (VERIFY, *G2), (EXTEND, *G2), (DRAFT, *G1), (VERIFY, *G1)],
    "verify_first": [(VERIFY, *G2), (DRAFT, *G2), (EXTEND, *G2), (VERIFY, *G1), (DRAFT, *G1)],
    "eager": [(DRAFT, *E2), (VERIFY, *E2), (EXTEND, *E2), (VERIFY, *G1), (DRAFT, *G1)],
    "eager_reader": [(VERIFY, *E2), (DRAFT, *G2), (EXTEND, *E2), (VERIFY, *E1), (DRAFT, *G2)],
    "no_extend": [(VERIFY, *G2), (DRAFT, *G2), (VERIFY, *G1), (DRAFT, *G1)],
}
STALE: dict[str, list[Told]] = {
    "another_bucket": [(DRAFT, *G2), (VERIFY, *G1)],
    "another_bucket_behind": [(VERIFY, *G2), (DRAFT, *G1)],
    "another_extend": [(DRAFT, *G2), (VERIFY, *G2), (EXTEND, *G1)],
    "eager_draft": [(DRAFT, *E2), (VERIFY, *G2)],
    "eager_draft_behind": [(VERIFY, *G2), (DRAFT, *E2)],
    "eager_draft_later": [(VERIFY, *G2), (DRAFT, *G2), (EXTEND, *G2), (VERIFY, *G2), (DRAFT, *E2)],
    "no_draft": [(VERIFY, *G2), (EXTEND, *G2)],
    "no_draft_twice": [(VERIFY, *G2), (VERIFY, *G2)],
    "no_draft_this_time": [(DRAFT, *G2), (VERIFY, *G2), (EXTEND, *G2), (EXTEND, *G2)],
}


@pytest.mark.parametrize("told", ROUNDS.values(), ids=ROUNDS)
def test_rounds_in_any_order(told: list[Told]) -> None:
    trio = Trio()
    for mode, bs, eager in told:
        try:
            trio.choose(mode, [9, 4][:bs], eager=eager)
        except ContractError as error:
            pytest.fail(f"a phase that comes again begins a round, which forgets the last: {error}")


@pytest.mark.parametrize("told", STALE.values(), ids=STALE)
def test_nobody_reads_what_no_draft_filled(told: list[Told]) -> None:
    trio = Trio()
    for mode, bs, eager in told[:-1]:
        trio.choose(mode, [9, 4][:bs], eager=eager)
    mode, bs, eager = told[-1]
    rule = f"{mode.name} must be refused a page_table that no draft of its round filled"
    with pytest.raises(ContractError, match=r"the draft"):
        pytest.fail(f"{rule}: {trio.choose(mode, [9, 4][:bs], eager=eager)}")
    # It is refused once; the next round is a round again.
    for mode in (DRAFT, VERIFY, EXTEND):
        trio.choose(mode, [9, 4])


def writer(**changes: Any) -> MetadataWriter:
    layout: dict[str, Any] = {"req_to_token": TABLE, "page_size": 4, "width": 7, "swa_pool": None}
    return MetadataWriter(TableLayout(**layout | changes), needs_packed_mask=False)


TABLE = torch.zeros(4, 28, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "bs", "refused"),
    [
        ({}, 3, r"max_bs = 3 .* <= 2"),
        ({"width": 6}, 2, r"page table width = 6 .* 7, as the others of its round"),
        ({"page_size": 8}, 2, r"page table page_size = 8 .* 4, as the others"),
        ({"req_to_token": TABLE.clone()}, 2, r"req_to_token"),
        ({"swa_pool": swa_pool()}, 2, r"SWAKVPool"),
    ],
    ids=["bs", "width", "page_size", "table", "windows"],
)
def test_a_table_that_cannot_be_shared_is_refused(
    changes: dict[str, Any], bs: int, refused: str
) -> None:
    plan = RoundPlan(speculative_num_steps=3, num_draft_tokens=4)
    buffers = plan.buffers(writer(), 2)
    assert plan.buffers(writer(), 1) is buffers
    with pytest.raises(ContractError, match=refused):
        plan.buffers(writer(**changes), bs)


def test_a_single_step_shares_nothing() -> None:
    with pytest.raises(UsageError, match=r"speculative_num_steps = 1 .* >= 2"):
        RoundPlan(speculative_num_steps=1, num_draft_tokens=4)


BACKENDS = {"gqa": TRTLLMHAAttnBackend, "mla": TRTLLMMLABackend}
# family, version, steps: what every phase of a bucket fills in warm-up and capture
RIGGED = (
    ("gqa", 2, 4, {(4, True): 2, (1, True): 1, (1, False): 2}),
    ("mla", 2, 3, {(3, True): 2, (1, True): 1, (1, False): 2}),
    ("gqa", 2, 1, {(1, True): 4}),
    ("gqa", 1, 4, {(3, True): 2, (1, True): 4}),
)


@pytest.mark.parametrize(("family", "version", "steps", "fills"), RIGGED, ids=phase_id)
def test_an_engine_shares_where_it_can(
    family: str, version: int, steps: int, fills: dict[Any, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Counter[tuple[int, bool]] = Counter()
    fill = MetadataWriter.fill

    def counted(self: Any, phases: Any, source: Any, *, table: bool = True) -> None:
        seen[len(phases), table] += 1
        fill(self, phases, source, table=table)

    monkeypatch.setattr(MetadataWriter, "fill", counted)
    spec = spec_config(steps, min(3, steps + 1), version)
    TinyPair(family).engine(spec, graphs=True)
    buckets = 2
    rule = "the warm-up of a verify reads a table that it fills itself, for no draft has filled it"
    assert seen[1, True] == buckets * fills[1, True], rule
    assert seen == {key: buckets * times for key, times in fills.items()}
    # A baseline fills by itself, beside steps that share a table all the same.
    monkeypatch.setattr(BACKENDS[family], "shares_rounds", False)
    seen.clear()
    TinyPair(family).engine(spec, graphs=True)
    assert not any(kind.shares_rounds for kind in (HostLengthsMLABackend, VerifyFixUpMHABackend))
    assert seen[1, False] == 0
    assert seen[steps, True] == 0 or steps == 1


def test_what_the_draft_fills_is_a_resource_of_both_queues() -> None:
    streams = RecordedStreams()
    tiny = TinyPair("gqa")
    tiny.engine(spec_config(3, 4, 2), graphs=True, streams=streams).generate(PROMPTS[:2], 4)
    shared = "round metadata"
    assert {op.name for op in streams.issued if shared in op.writes} == {"draft"}
    assert {op.name for op in streams.issued if shared in op.reads} == {"verify", "draft extend"}
    assert streams.hazards() == []
