"""One launch leaves, of whatever phases, what a plain loop over requests works out."""

from __future__ import annotations

import mmap
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from fixtures.drivers import fills
from fixtures.drivers.fills import (
    KINDS,
    UNTOUCHED,
    Asked,
    Kind,
    buffers_for,
    expected,
    fill,
    leading,
)
from harness.attention import metadata_writer as writers
from harness.attention.metadata import MetadataBuffers, TableLayout
from harness.attention.metadata_writer import MetadataWriter
from harness.graphs.cuda import CudaGraph
from harness.graphs.effects import observe

NORESERVE = 0x4000  # of Linux; mmap does not name it.
# requests; tokens per page; longest context; fills
SHAPES = (
    (1, 16, 200, 3),
    (2, 64, 700, 3),
    (3, 32, 18_000, 3),
    (5, 16, 9_000, 3),
    (8, 64, 40_000, 2),
    (37, 16, 200, 2),
)
NAMES = (
    "cache_seqlens", "cu_seqlens_q", "cu_seqlens_k", "page_table", "swa_page_table",
    "swa_out_cache_loc", "pad_rows", "unpad_rows",
)  # fmt: skip

RULES = {
    "cache_seqlens": "a request has seq_lens and the phase's new keys, and with padded queries "
    "seq_lens - query_lens + max_q_len",
    "cu_seqlens_q": "the running sum of query lengths, from 0",
    "cu_seqlens_k": "the running sum of cache_seqlens, from 0",
    "page_table": "a request has ceil(keys / page_size) pages of its own req_to_token row, keys "
    "those of the fill's longest phase, then zeros",
    "swa_page_table": "full_to_swa_index_mapping[page * page_size] // page_size of each live page, "
    "then zeros",
    "swa_out_cache_loc": "full_to_swa_index_mapping of each phase's own out_cache_loc",
    "pad_rows": "a padded query repeats the last query row of its request",
    "unpad_rows": "a query row is found at its place among the padded rows of its request",
}

BEHIND = "a fill writes nothing behind its batch's rows: a request's pages end with its own row"


@pytest.fixture(autouse=True)
def only_what_shows_is_interpreted(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter does half of its work in vain, at every call and every sum."""
    if device.type == "cuda":
        return
    from triton.runtime import interpreter

    core, builder, patch = (
        interpreter.tl.core,
        interpreter.interpreter_builder,
        interpreter._patch_lang,
    )

    def call(self: Any, *args: Any, **kwargs: Any) -> object:
        # A launch patches what its kernel names; Triton's own functions, such as cdiv, name core.
        if core.is_builtin(core.load):
            patch(self.fn)
        return self.rewrite()(*args, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
    # It works out whether a sum overflows, for an assertion that only debug mode makes.
    assert not builder.options.debug
    monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))


def check_rows(buffers: MetadataBuffers, wanted: dict[str, list[Any]]) -> None:
    """Each buffer begins with these rows."""
    for name, rows in wanted.items():
        assert leading(getattr(buffers, name), rows) == rows, f"{name}: {RULES[name]}"


class Scene:
    """A request table, and a writer of it by torch and one by Triton, each with buffers."""

    def __init__(
        self, kind: Kind, rows: int, page: int, context: int, device: torch.device, swa: bool
    ) -> None:
        random.seed(rows * page + context)
        torch.manual_seed(rows)
        width, slots = -(-context // page), page * 300
        self.kind, self.page, self.context, self.slots = kind, page, width * page, slots
        table = torch.randint(0, slots, (rows + 4, width * page + 5), dtype=torch.int32)
        self.table: list[list[int]] = table.tolist()
        pool = fills.hybrid(page, slots, device) if swa else None
        self.mapping: list[int] = pool.full_to_swa_index_mapping.tolist() if pool else []
        self.writers = [
            MetadataWriter(
                TableLayout(
                    req_to_token=table.to(device), page_size=page, width=width, swa_pool=pool
                ),
                needs_packed_mask=False,
                fused=fused,
            )
            for fused in (False, True)
        ]
        self.buffers = [buffers_for(writer, kind, rows) for writer in self.writers]

    def ask(self, bs: int) -> Asked:
        return fills.ask(self.kind, bs, len(self.table), self.context, self.page, self.slots)

    def check(self, asked: Asked) -> None:
        """Fill both; each holds what it should, and the two hold the same everywhere."""
        for writer, buffers in zip(self.writers, self.buffers, strict=True):
            fill(writer, buffers, self.kind, asked)
            wanted = expected(self.kind, asked, writer, self.table, self.mapping)
            check_rows(buffers, wanted)
        by_torch, fused = self.buffers
        for name in NAMES:
            one, other = getattr(by_torch, name), getattr(fused, name)
            same = (one is other) or (one.dtype == other.dtype and torch.equal(one, other))
            assert same, f"{name}: {BEHIND}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("bs", "page", "context", "times"), SHAPES)
def test_every_fill_leaves_what_a_loop_works_out(
    bs: int, page: int, context: int, times: int, kind: str, device: torch.device
) -> None:
    scene = Scene(KINDS[kind], bs + 2, page, context, device, swa=False)
    for buffers in scene.buffers:
        for name in NAMES[:4]:
            getattr(buffers, name)[..., bs + 1 if name.startswith("cu") else bs :] = UNTOUCHED
        buffers.page_table.zero_()[bs:] = UNTOUCHED
    for _ in range(times):
        scene.check(scene.ask(bs))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("kind", "swa"), [("draft_extend_v1-padded", False), ("target_verify", True)]
)
def test_inputs_may_have_any_stride(
    kind: str, swa: bool, fused: bool, device: torch.device
) -> None:
    scene = Scene(KINDS[kind], 3, 16, 200, device, swa=swa)
    asked, writer, buffers = scene.ask(3), scene.writers[fused], scene.buffers[fused]
    packed = asked.inputs(scene.kind, device)
    apart = {
        name: torch.stack([value, value.new_full(value.shape, 7)], -1)[:, 0]
        for name, value in vars(packed).items()
        if value is not None
    }
    (geometry,) = scene.kind.geometries(3, sum(asked.queries))
    writer.fill([buffers.slice(geometry)], replace(packed, **apart), table=True)
    wanted = expected(scene.kind, asked, writer, scene.table, scene.mapping)
    check_rows(buffers, wanted)


@pytest.mark.parametrize("kind", ["multi_step_draft", "draft_extend_v1-padded"])
def test_buffers_begin_with_zeros(kind: str, garbage: None, device: torch.device) -> None:
    scene = Scene(KINDS[kind], 3, 16, 200, device, swa=not kind.endswith("padded"))
    for buffers in scene.buffers:
        for name in (*NAMES, "filled"):
            held = getattr(buffers, name)
            assert held is None or not held.any(), name


@pytest.mark.untraced
def test_a_batch_of_1023_requests(device: torch.device) -> None:
    scene = Scene(KINDS["round-wide_verify"], 1023, 16, 200, device, swa=False)
    scene.check(scene.ask(1023))


@pytest.mark.parametrize(
    ("kind", "bs", "context"),
    [
        ("decode", 3, 9_000),
        ("multi_step_draft", 3, 9_000),
        ("multi_step_draft-of-nine", 3, 200),
        ("target_verify", 5, 200),
        # More write locations than a program translates.
        ("target_verify", 260, 60),
    ],
)
def test_pages_and_write_locations_of_windowed_layers(
    kind: str, bs: int, context: int, device: torch.device
) -> None:
    # Steps of a bucket lie side by side, also where larger ones would fit.
    scene = Scene(KINDS[kind], bs + 1, 16, context, device, swa=True)
    assert scene.mapping[0] > 0
    scene.check(scene.ask(bs))


@pytest.mark.parametrize("fused", [False, True])
def test_a_length_beyond_the_request_table_reads_nothing_of_another_request(
    fused: bool, device: torch.device
) -> None:
    # Four pages per request, in a page table whose width was rounded up to eight.
    table = torch.arange(3 * 64, dtype=torch.int32).view(3, 64).to(device)
    writer = MetadataWriter(
        TableLayout(req_to_token=table, page_size=16, width=8, swa_pool=None),
        needs_packed_mask=False,
        fused=fused,
    )
    buffers = buffers_for(writer, KINDS["decode"], 2)
    fill(
        writer,
        buffers,
        KINDS["decode"],
        Asked(rows=[1, 0], lens=[128, 65], queries=[1, 1], locs=[0, 0]),
    )
    assert buffers.page_table.tolist() == [[4, 5, 6, 7, 7, 7, 7, 7], [0, 1, 2, 3, 3, 0, 0, 0]]


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_row_has_fewer_programs_than_chunks(
    parts: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "ROW_PROGRAMS", parts)
    monkeypatch.setattr(writers, "TABLE_PROGRAMS", 1)
    scene = Scene(KINDS["target_verify"], 2, 16, 64_000, device, swa=True)
    assert scene.buffers[1].filled.shape == (2, parts)
    for lens in ([63_000, 9_000], [8_193, 64_000], [17, 0], [64_000, 30_000], [0, 1]):
        asked = scene.ask(2)
        scene.check(Asked(asked.rows, lens, asked.queries, asked.locs))
        # What is no longer alive was cleared once and is not cleared again.
        live = [min(-(-(n + 4) // 16), scene.writers[1].layout.width) for n in lens]
        assert scene.buffers[1].filled.tolist() == [[n] * parts for n in live]


@pytest.mark.parametrize(("bs", "parts"), [(1, 400), (8, 256), (64, 32), (1000, 8)])
def test_long_rows_of_few_requests_are_shared_by_many_programs(
    bs: int, parts: int, device: torch.device
) -> None:
    """400 chunks of 256 pages: a program each, 2,048 programs in all, or 8 a row."""
    table = torch.zeros(1, 400 * 256 * 16, dtype=torch.int32, device=device)
    writer = MetadataWriter(
        TableLayout(req_to_token=table, page_size=16, width=table.shape[1] // 16, swa_pool=None),
        needs_packed_mask=False,
        fused=True,
    )
    assert buffers_for(writer, KINDS["decode"], bs).filled.shape == (bs, parts)


def test_buckets_of_one_memory_filled_in_turn(device: torch.device) -> None:
    scene = Scene(KINDS["decode"], 4, 16, 20_000, device, swa=False)
    for lens in ([20_000, 300, 9_000, 16], [17, 16_000], [1, 40, 8_000, 0], [0, 0], [5, 6, 7, 8]):
        asked = scene.ask(len(lens))
        scene.check(Asked(asked.rows, lens, asked.queries, asked.locs))


def test_a_fill_of_lengths_leaves_the_table_and_its_record(device: torch.device) -> None:
    scene = Scene(KINDS["draft_extend_v2-lengths"], 3, 16, 200, device, swa=False)
    for buffers in scene.buffers:
        buffers.page_table.fill_(UNTOUCHED)
        buffers.filled.fill_(3)
    scene.check(scene.ask(3))
    for buffers in scene.buffers:
        assert buffers.page_table.unique().tolist() == [UNTOUCHED]
        assert buffers.filled.unique().tolist() == [3]


def test_strided_inputs_are_read_by_their_strides(device: torch.device) -> None:
    scene = Scene(KINDS["target_verify"], 3, 16, 200, device, swa=False)
    asked = Asked(rows=[2, 5, 1], lens=[33, 190, 16], queries=[1, 1, 1], locs=[0] * 12)
    inputs = asked.inputs(scene.kind, device)
    strided = replace(
        inputs,
        seq_lens=torch.stack((inputs.seq_lens, inputs.seq_lens + 64), 1)[:, 0],
        req_pool_indices=torch.stack((inputs.req_pool_indices, inputs.req_pool_indices - 1), 1)[
            :, 0
        ],
    )
    phases = [scene.buffers[1].slice(geometry) for geometry in scene.kind.geometries(3, 0)]
    scene.writers[1].fill(phases, strided)
    wanted = expected(scene.kind, asked, scene.writers[1], scene.table, [])
    check_rows(scene.buffers[1], wanted)


def far_table(stride: int, rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """[rows, columns] int32 with so many elements between rows; untouched memory costs nothing."""
    count = stride * (rows - 1) + columns
    if device.type == "cuda":
        flat = torch.empty(count, dtype=torch.int32, device=device)
    else:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
        flat = torch.frombuffer(mmap.mmap(-1, 4 * count, flags=flags), dtype=torch.int32)
    return flat.as_strided((rows, columns), (stride, 1))


def test_a_request_lies_beyond_32_bits(device: torch.device) -> None:
    # In 32 bits row 4 would begin at element 64, which is row 0's; row 1 lies within them.
    table = far_table(2**30 + 16, 5, 128, device)
    table[0], table[1], table[4] = 16 * 3, 16 * 7, 16 * 9
    writer = MetadataWriter(
        TableLayout(req_to_token=table, page_size=16, width=6, swa_pool=None),
        needs_packed_mask=False,
        fused=True,
    )
    kind = KINDS["decode"]
    buffers: MetadataBuffers = buffers_for(writer, kind, 2)
    fill(writer, buffers, kind, Asked(rows=[1, 4], lens=[40] * 2, queries=[1] * 2, locs=[0] * 2))
    near, far = buffers.page_table.tolist()
    rule = "a request's pages are in its req_to_token row req_pool_indices[i], not in row i"
    assert near == [7, 7, 7, 0, 0, 0], rule
    assert far == [9, 9, 9, 0, 0, 0], "a row of req_to_token begins at a 64-bit offset"


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if not kind.is_ragged])
def test_a_captured_fill_is_one_launch_that_follows_every_batch(
    kind: str, cuda: torch.device
) -> None:
    scene = Scene(KINDS[kind], 5, 32, 30_000, cuda, swa=False)
    writer, buffers = scene.writers[1], scene.buffers[1]
    inputs = scene.ask(5).inputs(scene.kind, cuda)
    phases = [buffers.slice(g, i) for i, g in enumerate(scene.kind.geometries(5, 0))]

    def planning() -> None:
        writer.fill(phases, inputs, table=scene.kind.has_table)

    graph = CudaGraph(cuda)
    graph.warm_up(planning)
    graph.capture(planning)
    for _ in range(500):
        asked = scene.ask(5)
        inputs.req_pool_indices.copy_(torch.tensor(asked.rows))
        inputs.seq_lens.copy_(torch.tensor(asked.lens))
        graph.replay()
        wanted = expected(scene.kind, asked, writer, scene.table, [])
        check_rows(buffers, wanted)
    with observe(cuda) as effects:
        planning()
    assert effects.operations == {"fill_metadata": 1}
