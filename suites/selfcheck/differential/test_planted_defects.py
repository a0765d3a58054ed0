"""Real defects, planted in a backend or a runner, turn their case red and name the cause."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import pad

from fixtures.fakes.sample_records import compared, trial
from fixtures.tables import find
from harness.attention.multi_step_draft import TRTLLMHAAttnMultiStepDraftBackend
from harness.attention.paged_backend import PagedBackend
from harness.attention.trtllm_mha import TRTLLMHAAttnBackend
from harness.attention.trtllm_mla import TRTLLMMLABackend
from harness.core.case import Execution, Mode
from harness.core.record import Verdict
from harness.differential.trial import explanation, run_trial
from harness.graphs.draft_extend_runner import DraftExtendRunner
from harness.kernels.shape_checks import FP8
from harness.subjects import SUBJECTS, Subject
from harness.upstream.base_attn_backend import SharedReadEnds
from harness.upstream.forward_batch_info import EagleDraftExtendInput, ForwardBatch, ForwardMode
from harness.upstream.memory_pool import SWAKVPool

EAGER, GRAPH = Execution.EAGER, Execution.GRAPH
MHA, XQA, MLA = (
    SUBJECTS[name] for name in ("trtllm_mha/trtllm_gen", "trtllm_mha/xqa", "trtllm_mla/trtllm_gen")
)


class Int64Lengths(TRTLLMHAAttnBackend):
    def _fill(self, batch: ForwardBatch, *, table: bool = True) -> None:
        super()._fill(batch, table=table)
        plan = self.forward_metadata
        self.forward_metadata = replace(plan, cache_seqlens_int32=plan.cache_seqlens_int32.long())


class VerifyForgetsDraftTokens(TRTLLMHAAttnBackend):
    def _fill(self, batch: ForwardBatch, *, table: bool = True) -> None:
        super()._fill(batch, table=table)
        self.forward_metadata.cache_seqlens_int32.sub_(self.num_draft_tokens - 1)


class DraftStepOneShort(TRTLLMHAAttnMultiStepDraftBackend):
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        for step in self.attn_backends:
            step.forward_metadata.cache_seqlens_int32.sub_(1)


class LastStepRebound(TRTLLMHAAttnMultiStepDraftBackend):
    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        super().init_forward_metadata_out_graph(batch, in_capture)
        step = self.attn_backends[-1]
        if not in_capture:
            lengths = step.forward_metadata.cache_seqlens_int32.clone()
            step.forward_metadata = replace(step.forward_metadata, cache_seqlens_int32=lengths)


class PaddedRowsHaveAnInfinity(TRTLLMHAAttnBackend):
    def forward(self, *args: Any, **options: Any) -> torch.Tensor:
        out = super().forward(*args, **options)
        out[self.forward_metadata.geometry.num_tokens + 1 :, ..., -1] = torch.inf
        return out


class StaleTableTail(TRTLLMHAAttnBackend):
    def _fill(self, batch: ForwardBatch, *, table: bool = True) -> None:
        super()._fill(batch, table=table)
        table = self.forward_metadata.page_table
        table.copy_(torch.where(table == 0, 1, table))


class TableOfAllColumns(TRTLLMHAAttnBackend):
    """Copies the request table's rows whole, with what an older request left at their ends."""

    def _fill(self, batch: ForwardBatch, *, table: bool = True) -> None:
        super()._fill(batch, table=table)
        pages, layout = self.forward_metadata.page_table, self.writer.layout
        columns = torch.arange(pages.shape[1], device=pages.device) * layout.page_size
        columns = columns.clamp_max(layout.req_to_token.shape[1] - 1)
        rows = layout.req_to_token[batch.req_pool_indices[: len(pages)]]
        pages.copy_(rows[:, columns] // layout.page_size)


class UntranslatedWindowTable(TRTLLMHAAttnBackend):
    def _fill(self, batch: ForwardBatch, *, table: bool = True) -> None:
        super()._fill(batch, table=table)
        self.forward_metadata.swa_page_table.copy_(self.forward_metadata.page_table)


class UntranslatedWindowWrites(TRTLLMHAAttnBackend):
    def _fill(self, batch: ForwardBatch, *, table: bool = True) -> None:
        super()._fill(batch, table=table)
        loc = self.forward_metadata.swa_out_cache_loc
        loc.copy_(batch.out_cache_loc[: len(loc)])


class WindowWritesByTheMappingOfNow(TRTLLMHAAttnBackend):
    def _write(self, k: Any, v: Any, layer: Any, batch: Any, metadata: Any) -> None:
        pool = self.token_to_kv_pool
        if isinstance(pool, SWAKVPool):
            now = pool.translate_loc_from_full_to_swa(batch.out_cache_loc)
            metadata = replace(metadata, swa_out_cache_loc=now[: metadata.geometry.num_tokens])
        super()._write(k, v, layer, batch, metadata)


class ReqToTokenReadByEveryLayer(TRTLLMHAAttnBackend):
    """Reads what the scheduler has written since."""

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, **given: Any) -> Any:
        self._fill(batch)
        return super().forward_extend(q, k, v, layer, batch, **given)

    forward_decode = forward_extend


class ReadsEndBeforeTheReplay(TRTLLMHAAttnBackend):
    """Says what its graph, which fills the table, does not keep."""

    def shared_read_ends(self, fm: ForwardMode) -> SharedReadEnds:
        return SharedReadEnds.PRE_REPLAY


class RowsCountedByBatchSize(TRTLLMHAAttnBackend):
    def _fill(self, batch: ForwardBatch, *, table: bool = True) -> None:
        super()._fill(batch, table=table)
        missing = batch.batch_size - len(batch.seq_lens)
        lengths = pad(self.forward_metadata.cache_seqlens_int32, (0, missing), value=1)
        self.forward_metadata = replace(self.forward_metadata, cache_seqlens_int32=lengths)


class TableWithoutHeadroom(TRTLLMHAAttnBackend):
    def _table_width(self) -> int:
        return -(-self.max_context_len // self.token_to_kv_pool.page_size)


class NoPackedMask(TRTLLMHAAttnBackend):
    def _attend(self, q: Any, out_dtype: Any, layer: Any, metadata: Any) -> torch.Tensor:
        return super()._attend(q, out_dtype, layer, replace(metadata, packed_mask=None))


class Fp8QueryForXqa(TRTLLMHAAttnBackend):
    def _kernel_query(self, q: torch.Tensor, layer: Any) -> torch.Tensor:
        return super()._kernel_query(q, layer).to(FP8)


class StridedQuery(TRTLLMHAAttnBackend):
    def _kernel_query(self, q: torch.Tensor, layer: Any) -> torch.Tensor:
        return q


class ScalesForgotten(TRTLLMHAAttnBackend):
    def _kv_scales(self, layer: Any) -> tuple[float, float]:
        return 1.0, 1.0


class WindowOneShort(TRTLLMHAAttnBackend):
    def _attend(self, q: Any, out_dtype: Any, layer: Any, metadata: Any) -> torch.Tensor:
        if layer.sliding_window_size > 0:
            layer = replace(layer, sliding_window_size=layer.sliding_window_size - 1)
        return super()._attend(q, out_dtype, layer, metadata)


class EqualSplit(TRTLLMMLABackend):
    """Takes a total that the batch size divides for a uniform query length."""

    def _attend(self, q: Any, out_dtype: Any, layer: Any, metadata: Any) -> torch.Tensor:
        bs, tokens = metadata.geometry.bs, metadata.geometry.num_tokens
        if metadata.geometry.pads_queries and tokens % bs == 0:
            geometry = replace(metadata.geometry, max_q_len=tokens // bs, pads_queries=False)
            metadata = replace(metadata, geometry=geometry)
        return super()._attend(q, out_dtype, layer, metadata)


class PaddedQueryUnpaddedKeys(TRTLLMMLABackend):
    def _fill(self, batch: ForwardBatch, *, table: bool = True) -> None:
        super()._fill(batch, table=table)
        self.forward_metadata.cache_seqlens_int32.copy_(batch.seq_lens)


class AcceptLengthsAsStride(TRTLLMHAAttnBackend):
    def _fill(self, batch: ForwardBatch, *, table: bool = True) -> None:
        super()._fill(batch, table=table)
        if isinstance(batch.spec_info, EagleDraftExtendInput):
            accepted = batch.spec_info.num_accept_tokens
            self.forward_metadata.cu_seqlens_q[1:].copy_(accepted.cumsum(0))


class KeysOfLayerZero(TRTLLMHAAttnBackend):
    def _write(self, k: Any, v: Any, layer: Any, batch: Any, metadata: Any) -> None:
        super()._write(k, v, replace(layer, layer_id=0), batch, metadata)


class Spoiling(TRTLLMHAAttnBackend):
    """Spoils what it stored, once attention has read it."""

    def _write(self, k: Any, v: Any, layer: Any, batch: Any, metadata: Any) -> None:
        super()._write(k, v, layer, batch, metadata)
        self.stored = batch.out_cache_loc

    def _attend(self, q: Any, out_dtype: Any, layer: Any, metadata: Any) -> torch.Tensor:
        out = super()._attend(q, out_dtype, layer, metadata)
        self.spoilt(self.token_to_kv_pool)[layer.layer_id][self.stored] *= 1.5
        return out


class KeysSpoiltForTheNextRound(Spoiling):
    def spoilt(self, pool: Any) -> Any:
        return pool.k_buffer


class ValuesSpoiltForTheNextRound(Spoiling):
    def spoilt(self, pool: Any) -> Any:
        return pool.v_buffer


class ViewsHandedOut(DraftExtendRunner):
    def trim(self, output: Any, extent: Any) -> Any:
        return replace(
            output,
            next_token_logits=output.next_token_logits[: extent.tokens],
            hidden_states=output.hidden_states[: extent.tokens],
        )


class HiddenStatesHandedOut(DraftExtendRunner):
    def trim(self, output: Any, extent: Any) -> Any:
        copied = super().trim(output, extent)
        return replace(copied, hidden_states=output.hidden_states[: extent.tokens])


class TopKOfHalfLogits(DraftExtendRunner):
    def finish(self, output: Any, batch: ForwardBatch) -> Any:
        half = output.next_token_logits.half().float()
        rounded = super().finish(replace(output, next_token_logits=half), batch)
        return replace(rounded, next_token_logits=output.next_token_logits)


class TopKPIsNaN(DraftExtendRunner):
    def finish(self, output: Any, batch: ForwardBatch) -> Any:
        finished = super().finish(output, batch)
        return replace(finished, topk_p=finished.topk_p * torch.nan)


class TopKIndexOfAnotherRequest(DraftExtendRunner):
    def finish(self, output: Any, batch: ForwardBatch) -> Any:
        finished = super().finish(output, batch)
        return replace(finished, topk_index=finished.topk_index.roll(1, 0))


class StaleTail(DraftExtendRunner):
    def prepare(self, batch: ForwardBatch) -> None:
        super().prepare(batch)
        self.buffers["out_cache_loc"][-1] = 77


def planted(subject: Subject, part: type) -> Subject:
    """The subject with one part broken."""
    if issubclass(part, DraftExtendRunner):
        return replace(subject, draft_extend_runner=part)
    field = "backend" if issubclass(part, PagedBackend) else "draft_backend"
    return replace(subject, **{field: part})


ROWS: tuple[tuple[Subject, type, str, Execution, Verdict, str], ...] = (
    (MHA, Int64Lengths, "mha-decode-bs2_ragged", EAGER, Verdict.ERROR, "seq_lens"),
    (MHA, VerifyForgetsDraftTokens, "mha-target_verify-page_edge_on", EAGER, Verdict.BROKEN_INVARIANT, "cache_seqlens_int32[0] = 65, expected 68"),
    (MHA, DraftStepOneShort, "mha-multi_step_draft-bs2_ragged", GRAPH, Verdict.BROKEN_INVARIANT, "cache_seqlens_int32"),
    (MHA, LastStepRebound, "mha-multi_step_draft-bs2_ragged", GRAPH, Verdict.BROKEN_INVARIANT, "cache_seqlens_int32 was ("),
    (MHA, PaddedRowsHaveAnInfinity, "mha-target_verify-dp_padding_whole_rows", EAGER, Verdict.BROKEN_INVARIANT, "row 9 of DP padding is not finite"),
    (MHA, StaleTableTail, "mha-decode-page_edge_after", GRAPH, Verdict.BROKEN_INVARIANT, "live pages, expected zeros"),
    (MHA, TableOfAllColumns, "mha-decode-bs2_ragged", EAGER, Verdict.BROKEN_INVARIANT, "live pages, expected zeros"),
    (MHA, TableOfAllColumns, "mha-decode-bs2_ragged", GRAPH, Verdict.BROKEN_INVARIANT, "live pages, expected zeros"),
    (MHA, UntranslatedWindowTable, "mha-decode-window_of_one_page", EAGER, Verdict.BROKEN_INVARIANT, "swa_page_table"),
    (MHA, UntranslatedWindowWrites, "mha-target_verify-window_of_one_page", EAGER, Verdict.BROKEN_INVARIANT, "swa.k0 slot"),
    (MHA, WindowWritesByTheMappingOfNow, "mha-decode-window_bs5_interleaved", EAGER, Verdict.BROKEN_INVARIANT, "swa.k0 slot"),
    (MHA, WindowWritesByTheMappingOfNow, "mha-decode-window_bs5_interleaved", GRAPH, Verdict.BROKEN_INVARIANT, "swa.k0 slot"),
    (MHA, ReqToTokenReadByEveryLayer, "mha-extend-bs2_ragged", EAGER, Verdict.BROKEN_INVARIANT, "page_table"),
    (MHA, ReqToTokenReadByEveryLayer, "mha-target_verify-bs2_ragged", GRAPH, Verdict.BROKEN_INVARIANT, "page_table"),
    (XQA, ReadsEndBeforeTheReplay, "mha-draft_extend_v2-bs2_ragged", GRAPH, Verdict.BROKEN_INVARIANT, "page_table"),
    (MHA, RowsCountedByBatchSize, "mha-draft_extend_v2-dp_padding_ahead_of_the_plan", EAGER, Verdict.ERROR, "rows"),
    (MHA, TableWithoutHeadroom, "mha-target_verify-context_edge_bs1", EAGER, Verdict.ERROR, "seq_lens = [196] is not accepted; accepted: <= 192"),
    (XQA, NoPackedMask, "mha-draft_extend_v2-bs2_ragged", EAGER, Verdict.ERROR, "packed_mask"),
    (XQA, Fp8QueryForXqa, "mha-target_verify-fp8_cache", EAGER, Verdict.ERROR, "q.dtype"),
    (XQA, StridedQuery, "mha-target_verify-bs2_ragged", GRAPH, Verdict.ERROR, "contiguous"),
    (XQA, ScalesForgotten, "mha-decode-fp8_cache", EAGER, Verdict.WRONG_NUMBERS, "hidden_states: 3 of 3 rows wrong, first at request 0, position 33"),
    (MHA, WindowOneShort, "mha-decode-window_bs5_interleaved", EAGER, Verdict.WRONG_NUMBERS, "hidden_states"),
    (MLA, EqualSplit, "mla-draft_extend_v1-accept_1_3", EAGER, Verdict.NON_FINITE, "2 of 4 rows, first at request 0"),
    (MLA, PaddedQueryUnpaddedKeys, "mla-draft_extend_v1-accept_1_3", EAGER, Verdict.BROKEN_INVARIANT, "cache_seqlens_int32[0] = 41, expected 43"),
    (MHA, AcceptLengthsAsStride, "mha-draft_extend_v2-accept_1_3", GRAPH, Verdict.BROKEN_INVARIANT, "cu_seqlens_q"),
    (MHA, KeysOfLayerZero, "mha-decode-bs2_ragged", EAGER, Verdict.BROKEN_INVARIANT, "k1 slot"),
    (MHA, KeysSpoiltForTheNextRound, "mha-target_verify-bs2_ragged", EAGER, Verdict.WRONG_NUMBERS, "kv_cache.key0: "),
    (XQA, ValuesSpoiltForTheNextRound, "mha-decode-bs2_ragged", GRAPH, Verdict.WRONG_NUMBERS, "kv_cache.value0: "),
    (MHA, ViewsHandedOut, "mha-draft_extend_v2-accept_1_3", GRAPH, Verdict.BROKEN_INVARIANT, "changed in the next one"),
    (MHA, HiddenStatesHandedOut, "mha-draft_extend_v2-accept_1_3", GRAPH, Verdict.BROKEN_INVARIANT, "hidden_states of a replay changed in the next one"),
    (MHA, TopKOfHalfLogits, "mha-draft_extend_v1-accept_1_3", GRAPH, Verdict.WRONG_NUMBERS, "topk_p: off by"),
    (MHA, TopKPIsNaN, "mha-draft_extend_v1-accept_1_3", GRAPH, Verdict.WRONG_NUMBERS, "topk_p: off by nan"),
    (MHA, TopKIndexOfAnotherRequest, "mha-draft_extend_v1-accept_1_3", GRAPH, Verdict.WRONG_TOKENS, "topk: token "),
    (MHA, StaleTail, "mha-draft_extend_v2-bs3_ragged_padded_to_4", GRAPH, Verdict.BROKEN_INVARIANT, "out_cache_loc"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("subject", "part", "case_id", "execution", "verdict", "cause"),
    [pytest.param(*row, id=f"{row[1].__name__}-{row[2]}-{row[3]}") for row in ROWS],
)
def test_turns_its_case_red(
    subject: Subject, part: type, case_id: str, execution: Execution, verdict: Verdict, cause: str
) -> None:
    case = find(case_id)
    assert run_trial(case, subject, execution).verdict is Verdict.PASSED
    record = run_trial(case, planted(subject, part), execution)
    said = f"{part.__name__} is told as {verdict}, {cause!r}, and not as: {record.message}"
    assert record.verdict is verdict, said
    assert cause in record.message, said
    assert case_id in record.reproduce


@pytest.mark.parametrize(
    "error", [AssertionError("torn\nplan"), KeyError("torn"), ZeroDivisionError("torn")], ids=repr
)
def test_whatever_a_subject_raises_is_recorded(error: Exception) -> None:
    class Raising(TRTLLMHAAttnBackend):
        def _fill(self, batch: ForwardBatch, *, table: bool = True) -> None:
            raise error

    case = find("mha-decode-bs2_ragged")
    record = run_trial(case, replace(MHA, backend=Raising), EAGER)
    assert record.verdict is Verdict.ERROR
    assert record.message in (f"{type(error).__name__}: torn", "KeyError: 'torn'")


def test_a_refusal_is_recorded_with_its_reason() -> None:
    record = run_trial(find("mha-decode-fp32"), XQA, EAGER)
    assert record.verdict is Verdict.REFUSED
    assert record.message == "xqa refuses dtype float32: accepts ['bfloat16', 'float16']"


def test_modes_without_a_graph_are_refused_by_name() -> None:
    case = find("mha-extend-bs2_ragged")
    assert case.mode is Mode.EXTEND
    assert run_trial(case, MHA, GRAPH).message == "extend has no graph"


def test_an_explanation_has_cause_place_size_and_the_command_that_repeats_it() -> None:
    quantities = (
        *compared(0.9, allowed=1.0, name="cache"),
        *compared(0.75),
        *compared(0.5, name="hidden_states"),
    )
    facts = {"message": "rows swapped", "quantities": quantities, "reproduce": "pytest -k one"}
    red = trial("one", Verdict.WRONG_NUMBERS, **facts)
    lines = explanation(red).splitlines()
    said = "the worst quantity is furthest beyond its budget: logits, 0.75 of 0.5, not cache's 0.9"
    assert any(line.startswith("worst: logits at ") for line in lines), f"{said}: {lines[2:3]}"
    assert lines == [
        "one on trtllm_mha/reference, eager: wrong_numbers",
        "cause: rows swapped",
        "worst: logits at request 1, position 17: 7.50e-01, allowed 5.00e-01",
        "reproduce: pytest -k one",
    ], f"an explanation has cause, worst quantity and command, a line each: {lines}"
    told = explanation(replace(red, quantities=()))
    assert "worst" not in told, f"where no quantity was compared none is the worst: {told!r}"
