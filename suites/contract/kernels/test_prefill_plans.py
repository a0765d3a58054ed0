"""Plans of FlashInfer's prefill: shared by like prompts, bounded, and kept where a graph reads."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.errors import CaptureViolation
from harness.kernels import flashinfer_prefill
from harness.kernels.flashinfer_plan import Filled, PrefillGeometry
from harness.kernels.flashinfer_prefill import KEPT_PLANS, PagedPrefill, rounded_width
from harness.kernels.interface import ContextCall

FILLS: list[list[int]] = []


class Plan:
    """Gives each query row its request's number of queries; counts what was planned."""

    made: list[PrefillGeometry]

    def __init__(self, geometry: PrefillGeometry, device: torch.device) -> None:
        self.geometry = geometry
        self.filled: Filled | None = None
        self.made.append(geometry)

    def fill(
        self, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, block_tables: torch.Tensor
    ) -> None:
        told = "a plan is as wide as the block tables of its calls, however many keys they have"
        assert self.geometry.table_width == block_tables.shape[1], told
        self.lens = cu_seqlens_q.diff().tolist()
        FILLS.append(self.lens)

    def run(self, q: torch.Tensor, *_: Any) -> torch.Tensor:
        rows = torch.zeros(self.geometry.rows, *q.shape[1:])
        for request, count in enumerate(self.lens):
            start = request * self.geometry.max_q_len
            rows[start : start + count] = float(count)
        return rows


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """[True] while a graph is captured."""
    capturing = [False]
    Plan.made = []
    FILLS.clear()
    monkeypatch.setattr(flashinfer_prefill, "PrefillPlan", Plan)
    monkeypatch.setattr(flashinfer_prefill, "is_readable", lambda _: not capturing[0])
    return capturing


def call(*lens: int, forward: object | None = None) -> ContextCall:
    """Prompts of these lengths, without a prefix."""
    counts = torch.tensor(lens, dtype=torch.int32)
    ends = torch.cat((counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)))
    cache = torch.zeros(4, 16, 1, 8)
    return ContextCall(
        q=torch.zeros(sum(lens), 2, 8),
        caches=(cache, cache),
        block_tables=torch.zeros(len(lens), 4, dtype=torch.int32),
        seq_lens=counts,
        max_seq_len=max(lens),
        bmm1_scale=1.0,
        bmm2_scale=1.0,
        out_dtype=torch.float32,
        cu_seqlens_q=ends,
        cu_seqlens_k=ends,
        max_q_len=max(lens),
        forward=forward,
    )


@pytest.mark.parametrize("length", [1, 4, 8, 15, 16, 17, 100, 1000, 1024, 8191, 8192, 8193])
def test_a_width_is_rounded_up_by_an_eighth_at_most(length: int) -> None:
    width = rounded_width(length)
    told = f"a plan for max_q_len {length} is that wide and an eighth wider at most, not {width}"
    assert length <= width <= length * 1.125, told
    # Widths of drafts stay what they are: their graphs are counted to the node.
    told = f"a plan for max_q_len {length}, 16 at most, is exactly that wide, not {width}"
    assert length > 16 or width == length, told


def test_like_prompts_share_a_plan_and_get_their_own_rows(captures: list[bool]) -> None:
    prefill = PagedPrefill(torch.device("cpu"))
    for lens in ((1000, 3), (1001, 40), (1024, 1)):
        out = prefill(call(*lens))[:, 0, 0].tolist()
        assert out == [float(n) for n in lens for _ in range(n)]
    assert [geometry.max_q_len for geometry in Plan.made] == [1024]


def test_only_the_plans_last_used_are_kept(captures: list[bool]) -> None:
    prefill = PagedPrefill(torch.device("cpu"))
    lengths = [16 + 2 * i for i in range(8)] + [32 + 4 * i for i in range(8)]
    assert len({rounded_width(length) for length in lengths}) == KEPT_PLANS
    for length in (*lengths, lengths[0], 200, lengths[0], lengths[1]):
        prefill(call(length))
    # The first was used again before the seventeenth came; the second was pushed out by it.
    assert [geometry.max_q_len for geometry in Plan.made] == [*lengths, 208, lengths[1]]


def test_a_plan_that_a_graph_reads_is_kept(captures: list[bool]) -> None:
    prefill = PagedPrefill(torch.device("cpu"))
    prefill(call(4, 4))
    captures[0] = True
    prefill(call(4, 4))
    captures[0] = False
    for length in [step * n for step in (2, 4, 8) for n in range(8, 16)]:
        prefill(call(length))
    planned = len(Plan.made)
    assert planned > 1 + KEPT_PLANS
    prefill(call(4, 4))
    assert len(Plan.made) == planned
    captures[0] = True
    prefill(call(4, 4))
    with pytest.raises(CaptureViolation, match=r"planned during capture.*max_q_len 5"):
        prefill(call(5))


def test_plans_that_graphs_read_take_no_room_from_those_last_used(captures: list[bool]) -> None:
    prefill, lengths = PagedPrefill(torch.device("cpu")), range(1, KEPT_PLANS + 1)
    for length in lengths:
        for captures[0] in (False, True):
            prefill(call(length))
    captures[0] = False
    for length in (24, 28, 24):
        prefill(call(length))
    planned = [geometry.max_q_len for geometry in Plan.made]
    told = f"{KEPT_PLANS} eager plans are kept beside as many of graphs"
    assert planned == [*lengths, 24, 28], f"{told}: planned were {planned}"


def rows_of(out: torch.Tensor) -> list[float]:
    """What each query row got: its request's number of queries."""
    return [float(row) for row in out[:, 0, 0]]


def test_layers_of_a_forward_fill_a_plan_once(captures: list[bool]) -> None:
    prefill = PagedPrefill(torch.device("cpu"))
    first, second = object(), object()
    for lens, forward in (((6, 2), first), ((3, 6), second), ((6, 2), first)):
        layer = call(*lens, forward=forward)
        for _ in range(3):
            assert rows_of(prefill(layer)) == [n for n in lens for _ in range(n)]
    assert FILLS == [[6, 2], [3, 6], [6, 2]]
    for _ in range(2):
        prefill(call(6, 2))
    assert FILLS[3:] == [[6, 2], [6, 2]]


def test_a_call_between_two_layers_leaves_the_second_its_own_numbers(captures: list[bool]) -> None:
    prefill, layer = PagedPrefill(torch.device("cpu")), call(6, 2, forward=object())
    for one in (layer, call(3, 6), layer):
        prefill(one)
    told = "a layer behind a call of no forward, which filled its plan, fills it again"
    assert FILLS == [[6, 2], [3, 6], [6, 2]], f"{told}: filled for {FILLS}"


def test_forwards_whose_tables_lie_in_one_buffer_fill_a_plan_each(captures: list[bool]) -> None:
    prefill, first = PagedPrefill(torch.device("cpu")), call(6, 2, forward=object())
    second = replace(call(3, 6, forward=object()), block_tables=first.block_tables)
    for layer in (first, second, second):
        prefill(layer)
    told = "a forward fills the plan, also where its tables lie where those of the last one did"
    assert FILLS == [[6, 2], [3, 6]], f"{told}: filled for {FILLS}"


def test_a_forward_that_is_gone_is_taken_for_no_later_one(captures: list[bool]) -> None:
    prefill = PagedPrefill(torch.device("cpu"))
    # Nobody else holds a forward, so that the next one may have its address.
    for lens in ((6, 2), (3, 6)) * 4:
        expected = [n for n in lens for _ in range(n)]
        assert rows_of(prefill(call(*lens, forward=object()))) == expected
    assert len(Plan.made) == 1


def test_a_plan_that_a_graph_reads_is_filled_in_every_layer(captures: list[bool]) -> None:
    prefill, forward = PagedPrefill(torch.device("cpu")), object()
    prefill(call(4, 4, forward=forward))
    captures[0] = True
    prefill(call(4, 4))
    with suppress(CaptureViolation):
        prefill(call(5, 4))
    assert len(Plan.made) == 1, "nothing is planned on the host while a graph is captured"
    captures[0] = False
    told = "a plan is filled for every prompt, though one of the same geometry has filled it"
    assert FILLS == [[4, 4]] * 2, told
    FILLS.clear()
    layer = call(4, 1, forward=forward)
    for _ in range(2):
        prefill(layer)
        assert Plan.made[0] in prefill._captured, (
            "the plan that a capture ran is kept for the graph"
        )
        # A replay writes the plan's buffers, and nobody here is told.
        prefill._captured[Plan.made[0]].lens = [9, 9]
    rows = rows_of(prefill(layer))
    told = "an eager layer fills the plan again that a replay may have written"
    assert FILLS == [[4, 1]] * 3, told
    told = "a query's row is gathered from its request's rows of the plan"
    assert rows == [4, 4, 4, 4, 1], told
