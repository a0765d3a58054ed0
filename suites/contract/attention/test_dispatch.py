"""Every mode reaches the kernel entry, widths and key counts of the table, by every path to it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from fixtures.drivers.rigs import new_rig
from harness.core.case import Case, Family, Mode
from harness.differential.rig import Rig
from harness.kernels.interface import AttentionCall, ContextCall, DecodeCall
from harness.subjects import GRAPH_MODES

SUBJECT = {Family.MHA: "trtllm_mha/xqa", Family.MLA: "trtllm_mla/trtllm_gen"}
# Three ragged requests in a bucket of four; no accept length reaches the width of four.
PREFIX, EXTEND, ACCEPT = (30, 5, 66), (2, 7, 1), (1, 3, 2)
BUCKET, STEPS, WIDTH = 4, 4, 4
LAYERS = 2
Cut = list[int] | None
Row = tuple[Family, Mode, str, str, int, Cut, list[list[int]]]
EAGER, CAPTURE, REPLAY = "eager", "capture", "replay"
MHA, MLA = Family.MHA, Family.MLA
# family, mode, path, entry, queries per request, ragged cut (context entries), keys each step sees
ROWS: tuple[Row, ...] = (
    (MHA, Mode.EXTEND, EAGER, "context", 7, [0, 2, 9, 10], [[32, 12, 67]]),
    (MLA, Mode.EXTEND, EAGER, "mla_context", 7, [0, 2, 9, 10], [[32, 12, 67]]),
    (MHA, Mode.DECODE, EAGER, "decode", 1, None, [[31, 6, 67]]),
    (MHA, Mode.DECODE, CAPTURE, "decode", 1, None, [[1, 1, 1, 1]]),
    (MHA, Mode.DECODE, REPLAY, "decode", 1, None, [[31, 6, 67, 1]]),
    (MLA, Mode.DECODE, EAGER, "mla_decode", 1, None, [[31, 6, 67]]),
    (MLA, Mode.DECODE, CAPTURE, "mla_decode", 1, None, [[1, 1, 1, 1]]),
    (MLA, Mode.DECODE, REPLAY, "mla_decode", 1, None, [[31, 6, 67, 1]]),
    (MHA, Mode.TARGET_VERIFY, EAGER, "decode", 4, None, [[34, 9, 70]]),
    (MHA, Mode.TARGET_VERIFY, CAPTURE, "decode", 4, None, [[5, 5, 5, 5]]),
    (MHA, Mode.TARGET_VERIFY, REPLAY, "decode", 4, None, [[34, 9, 70, 5]]),
    (MLA, Mode.TARGET_VERIFY, EAGER, "mla_decode", 4, None, [[34, 9, 70]]),
    (MLA, Mode.TARGET_VERIFY, CAPTURE, "mla_decode", 4, None, [[5, 5, 5, 5]]),
    (MLA, Mode.TARGET_VERIFY, REPLAY, "mla_decode", 4, None, [[34, 9, 70, 5]]),
    (MHA, Mode.DRAFT_EXTEND, EAGER, "context", 3, [0, 1, 4, 6], [[31, 8, 68]]),
    (MHA, Mode.DRAFT_EXTEND, CAPTURE, "context", 4, [0, 1, 2, 3, 4], [[1, 1, 1, 1]]),
    (MHA, Mode.DRAFT_EXTEND, REPLAY, "context", 4, [0, 1, 4, 6, 7], [[31, 8, 68, 1]]),
    # Keys grow as the queries are padded: to the longest the host knows, or to the captured four.
    (MLA, Mode.DRAFT_EXTEND, EAGER, "mla_decode", 3, None, [[33, 8, 69]]),
    (MLA, Mode.DRAFT_EXTEND, CAPTURE, "mla_decode", 4, None, [[4, 4, 4, 4]]),
    (MLA, Mode.DRAFT_EXTEND, REPLAY, "mla_decode", 4, None, [[34, 9, 70, 4]]),
    (MHA, Mode.DRAFT_EXTEND_V2, EAGER, "decode", 4, None, [[34, 9, 70]]),
    (MHA, Mode.DRAFT_EXTEND_V2, CAPTURE, "decode", 4, None, [[4, 4, 4, 4]]),
    (MHA, Mode.DRAFT_EXTEND_V2, REPLAY, "decode", 4, None, [[34, 9, 70, 4]]),
    (MLA, Mode.DRAFT_EXTEND_V2, EAGER, "mla_decode", 4, None, [[34, 9, 70]]),
    (MLA, Mode.DRAFT_EXTEND_V2, CAPTURE, "mla_decode", 4, None, [[4, 4, 4, 4]]),
    (MLA, Mode.DRAFT_EXTEND_V2, REPLAY, "mla_decode", 4, None, [[34, 9, 70, 4]]),
    *(
        (family, Mode.MULTI_STEP_DRAFT, path, entry, 1, None, keys)
        for family, entry in ((MHA, "decode"), (MLA, "mla_decode"))
        for path, keys in (
            (EAGER, [[31, 6, 67], [32, 7, 68], [33, 8, 69]]),
            (CAPTURE, [[2, 2, 2, 2], [3, 3, 3, 3], [4, 4, 4, 4]]),
            (REPLAY, [[31, 6, 67, 2], [32, 7, 68, 3], [33, 8, 69, 4]]),
        )
    ),
)


def case_of(family: Family, mode: Mode) -> Case:
    """The ragged batch in one mode."""
    accepts = mode in (Mode.DRAFT_EXTEND, Mode.DRAFT_EXTEND_V2)
    return Case(
        id=f"dispatch-{family}-{mode}",
        family=family,
        mode=mode,
        prefix_lens=() if mode is Mode.IDLE else PREFIX,
        extend_lens=EXTEND if mode is Mode.EXTEND else (),
        accept_lens=ACCEPT if accepts else (),
        num_kv_heads=1 if family is Family.MLA else 2,
        num_draft_tokens=WIDTH,
        num_steps=STEPS,
        page_size=32,
    )


def watch(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, AttentionCall]]:
    """Every call of a kernel from now on, by entry.

    The tensors are those the kernel holds, so after a replay they show what that replay read.
    """
    calls: list[tuple[str, AttentionCall]] = []

    def traced(entry: str) -> Any:
        serve = getattr(kernel, entry)

        def answer(call: AttentionCall) -> torch.Tensor:
            calls.append((entry, call))
            out: torch.Tensor = serve(call)
            return out

        return answer

    for entry in ("decode", "context", "mla_decode", "mla_context"):
        monkeypatch.setattr(kernel, entry, traced(entry))
    return calls


def go(rig: Rig, path: str) -> None:
    """One forward by this path, or no more than its capture."""
    if path == EAGER:
        rig.run_eager(rig.batch)
        return
    runner = rig.capture((BUCKET,))
    if path == REPLAY:
        runner.replay(rig.batch)


@pytest.mark.parametrize("row", [pytest.param(row, id="-".join(row[:3])) for row in ROWS])
def test_what_reaches_the_kernel(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    family, mode, path, entry, q_len, cut, keys = row
    rig = new_rig(SUBJECT[family], case_of(family, mode))
    calls = watch(rig.kernel, monkeypatch)
    go(rig, path)
    own = LAYERS * len(keys)
    # Once in an eager forward; a capture runs twice, the second time recorded; a replay calls none.
    assert len(calls) == own * (1 if path == EAGER else 2)
    assert {name for name, _ in calls} == {entry}
    for i, (_, call) in enumerate(calls[-own:]):
        seen, rows = keys[i // LAYERS], call.q.shape[0]
        assert call.seq_lens.tolist() == seen
        assert call.seq_lens.dtype == call.block_tables.dtype == torch.int32
        if isinstance(call, DecodeCall):
            assert cut is None
            assert (call.q_len_per_req, rows) == (q_len, q_len * len(seen))
        else:
            assert isinstance(call, ContextCall)
            assert (call.max_q_len, call.batch_size) == (q_len, len(seen))
            assert call.cu_seqlens_q.tolist() == cut
            assert call.cu_seqlens_k.tolist() == [sum(seen[:n]) for n in range(len(seen) + 1)]
            assert rows == (cut[-1] if path == EAGER else q_len * BUCKET)
        # Captured steps of a draft read one table, which holds the last step's pages.
        last = keys[-1] if path != EAGER else seen
        check_pages(rig, call.block_tables, last, path)


def check_pages(rig: Rig, tables: torch.Tensor, keys: list[int], path: str) -> None:
    """Real requests read their own pages; nothing stands after the last one, nor in padding."""
    owned = rig.pool_state.inputs.tested.pages if path != CAPTURE else ()
    for i, (row, seen) in enumerate(zip(tables.tolist(), keys, strict=True)):
        live = -(-seen // 32)
        if i < len(owned):
            assert row[:live] == list(owned[i][:live])
        assert not any(row[live:])


def test_every_mode_of_both_families_has_a_row_for_every_path() -> None:
    wanted = {
        (family, mode, path)
        for family in Family
        for mode in Mode
        for path in (EAGER, CAPTURE, REPLAY)
        if mode is not Mode.IDLE and (path == EAGER or mode in GRAPH_MODES)
    }
    assert {row[:3] for row in ROWS} == wanted


@pytest.mark.parametrize("family", Family)
def test_idle_reaches_no_kernel(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = new_rig(SUBJECT[family], case_of(family, Mode.IDLE))
    calls = watch(rig.kernel, monkeypatch)
    go(rig, EAGER)
    assert calls == []
    assert rig.plans == ()


@pytest.mark.parametrize("mode", sorted(GRAPH_MODES))
@pytest.mark.parametrize("family", Family)
def test_eager_capture_and_replay_plan_the_same_type_and_fields(family: Family, mode: Mode) -> None:
    shapes = []
    for path in (EAGER, CAPTURE, REPLAY):
        rig = new_rig(SUBJECT[family], case_of(family, mode))
        go(rig, path)
        shapes.append([anatomy(plan) for plan in rig.plans])
    eager, captured, replayed = shapes
    assert len(eager) == (STEPS - 1 if mode is Mode.MULTI_STEP_DRAFT else 1)
    assert eager == captured == replayed


def anatomy(plan: Any) -> dict[str, object]:
    """Type of a plan; of each field whether it is there, its dtype and its columns."""
    parts: dict[str, object] = {"type": type(plan), "mode": plan.geometry.forward_mode}
    for field in fields(plan):
        value = getattr(plan, field.name)
        tensor = isinstance(value, torch.Tensor)
        parts[field.name] = (value.dtype, value.shape[1:]) if tensor else type(value)
    return parts
