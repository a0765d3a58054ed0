"""Each way of being malformed is one violation that names it, and well-formed things have none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from harness.core.conventions import OURS
from harness.differential.invariants import (
    check_frozen,
    check_metadata,
    check_padding,
    check_writes,
    frozen,
)


@dataclass
class Planned:
    """Two requests and a padded row: 5 + 3, 16 + 2 and 0 + 1 keys on pages of 8."""

    cache_seqlens_int32: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    page_table: torch.Tensor
    swa_page_table: torch.Tensor | None = None
    max_seq_len_q: int | None = 3


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


PLANNED = Planned(
    int32([8, 18, 1]),
    int32([0, 3, 5, 6]),
    int32([0, 8, 26, 27]),
    int32([[4, 0, 0, 0], [2, 7, 5, 0], [9, 9, 9, 9]]),
)
GIVEN = {
    "prefix_lens": [5, 16, 0],
    "q_lens": [3, 2, 1],
    "pages": [[4, 1], [2, 7, 5, 3]],
    "page_size": 8,
    "num_pages": 10,
}


def test_where_tails_say_nothing_a_padded_lanes_own_pages_are_in_the_pool():
    # Padded lane 2 has one live page; what a release leaves behind it is anybody's.
    tails = replace(OURS, zero_table_tail=False)
    stale = replace(PLANNED, page_table=int32([[4, 77, 77, 77], [2, 7, 5, 77], [9, 77, 77, 77]]))
    assert check_metadata(stale, **GIVEN, conventions=tails) == []
    outside = replace(PLANNED, page_table=int32([[4, 0, 0, 0], [2, 7, 5, 0], [77, 0, 0, 0]]))
    found = check_metadata(outside, **GIVEN, conventions=tails)
    said = "page_table of a padded lane names a page of the pool, 0 to 9, whatever its tail"
    assert len(found) == 1, f"{said}: 77 is told once, not as {found}"
    assert found[0].startswith("page_table[2] names page 77 of 10"), f"{said}: {found}"


def test_well_formed_metadata_has_no_violation():
    assert check_metadata(PLANNED, **GIVEN) == []
    ours = SimpleNamespace(**vars(PLANNED) | {"geometry": SimpleNamespace(max_q_len=4)})
    del ours.max_seq_len_q
    assert check_metadata(ours, **GIVEN) == []
    swa = replace(PLANNED, swa_page_table=int32([[1, 0, 0], [3, 2, 6], [0, 0, 0]]))
    assert check_metadata(swa, **GIVEN, swa_pages=[[1], [3, 2, 6]], num_swa_pages=7) == []


@pytest.mark.parametrize(
    ("field", "value", "violation"),
    [
        ("cache_seqlens_int32", int32([8, 17, 1]), "[1] = 17, expected 18 [length arithmetic]"),
        (
            "cache_seqlens_int32",
            torch.tensor([8, 18, 1]),
            " has dtype torch.int64, expected torch.int32 [index space or capacity]",
        ),
        ("cache_seqlens_int32", int32([8, 18]), " has shape [2], expected [3] [geometry"),
        ("cache_seqlens_int32", None, " is missing [geometry frozen at capture]"),
        ("cu_seqlens_q", int32([0, 3, 6, 9]), "[2] = 6, expected 5 [length arithmetic]"),
        ("cu_seqlens_q", int32([1, 3, 5, 6]), "[0] = 1, expected 0 [length arithmetic]"),
        ("cu_seqlens_k", int32([0, 8, 26, 26]), "[3] = 26, expected 27 [length arithmetic]"),
        ("page_table", None, " is missing [geometry frozen at capture]"),
        ("page_table", int32([4, 2, 7]), " has shape [3], expected [3, >= 3] [index space"),
        ("page_table", int32([[4, 0], [2, 7], [0, 0]]), " has shape [3, 2], expected [3, >= 3]"),
        (
            "page_table",
            int32([[4, 0, 0], [2, 7, 5], [0, 0, 0], [0, 0, 0]]),
            " has shape [4, 3], expected [3, >= 3] [index space or capacity]",
        ),
        (
            "page_table",
            int32([[4, 0, 0], [7, 2, 5], [0, 0, 0]]),
            "[1] has live pages [7, 2, 5], expected [2, 7, 5] [index space or capacity]",
        ),
        (
            "page_table",
            int32([[4, 1, 0], [2, 7, 5], [0, 0, 0]]),
            "[0] has [1, 0] after 1 live pages, expected zeros [stale or undeclared padding]",
        ),
        (
            "page_table",
            int32([[4, 0, 6], [2, 7, 5], [0, 0, 0]]),
            "[0] has [0, 6] after 1 live pages, expected zeros [stale or undeclared padding]",
        ),
        (
            "page_table",
            int32([[4, 0, 0], [2, 7, 5], [0, 10, 0]]),
            "[2] names page 10 of 10 [index space or capacity]",
        ),
        ("swa_page_table", int32([[0]]), " is there, expected none [index space or capacity]"),
        ("max_seq_len_q", 2, " = 2, expected at least 3 [geometry frozen at capture]"),
        ("max_seq_len_q", None, " = None, expected at least 3 [geometry frozen at capture]"),
    ],
)
def test_malformed_metadata(field, value, violation):
    said = f"metadata whose {field}{violation} is a violation"
    try:
        told = check_metadata(replace(PLANNED, **{field: value}), **GIVEN)
    except ValueError as error:
        pytest.fail(f"{said}, and no {error!r} of the judge")
    assert told, said
    assert len(told) == 1, f"{said}, told once: {told}"
    assert told[0].startswith(field + violation), f"{said}, told so: {told[0]}"


def test_missing_swa_table_and_wrong_swa_pages():
    swa = {"swa_pages": [[1], [3, 2, 6]], "num_swa_pages": 7}
    assert check_metadata(PLANNED, **GIVEN, **swa) == [
        "swa_page_table is missing [geometry frozen at capture]"
    ]
    of_others = replace(PLANNED, swa_page_table=int32([[3, 0, 0], [1, 2, 6], [0, 0, 0]]))
    found = check_metadata(of_others, **GIVEN, **swa)
    is_told = [line.split(",")[0] for line in found] == [
        "swa_page_table[0] has live pages [3]",
        "swa_page_table[1] has live pages [1",
    ]
    assert is_told, "a page table's row that names pages of another request is a violation"
    full = replace(PLANNED, swa_page_table=PLANNED.page_table)
    found = check_metadata(full, **GIVEN, **swa)
    assert [line.split(" [")[0] for line in found] == [
        "swa_page_table[0] has live pages",
        "swa_page_table[1] names page 7 of 7",
        "swa_page_table[2] names page 9 of 7",
    ]


def test_queries_padded_to_the_longest_are_what_the_kernel_is_told():
    # Packed 3, 2 and 1, but the kernel sees 4 of each request.
    padded = {"q_lens": [4, 4, 4], "packed_q_lens": [3, 2, 1]}
    planned = replace(
        PLANNED,
        cache_seqlens_int32=int32([9, 20, 4]),
        cu_seqlens_k=int32([0, 9, 29, 33]),
        page_table=int32([[4, 1, 0], [2, 7, 5], [0, 0, 0]]),
    )
    found = check_metadata(planned, **GIVEN | padded)
    said = "max_seq_len_q covers the queries as the kernel sees them, 4, and not as packed, 3"
    assert found == ["max_seq_len_q = 3, expected at least 4 [geometry frozen at capture]"], (
        f"{said}: {found}"
    )
    assert check_metadata(replace(planned, max_seq_len_q=4), **GIVEN | padded) == []


def test_every_violation_is_reported():
    broken = replace(PLANNED, cu_seqlens_k=PLANNED.cu_seqlens_k + 1, max_seq_len_q=1)
    found = check_metadata(broken, **GIVEN)
    assert len(found) == 2, (
        f"a wrong cu_seqlens_k and a max_seq_len_q too small are both told: {found}"
    )


def test_an_idle_forward_is_well_formed():
    empty = Planned(int32([]), int32([0]), int32([0]), int32([]).view(0, 4), max_seq_len_q=0)
    nothing = {"prefix_lens": [], "q_lens": [], "pages": [], "page_size": 8, "num_pages": 10}
    assert check_metadata(empty, **nothing) == []


def test_frozen_sees_moved_resized_and_changed_fields():
    before = frozen(PLANNED)
    assert check_frozen(before, frozen(PLANNED)) == []
    refilled = replace(PLANNED)
    refilled.page_table.add_(0)
    assert check_frozen(before, frozen(refilled)) == []
    for change in (
        {"page_table": PLANNED.page_table.clone()},
        {"page_table": PLANNED.page_table[:, :2]},
        {"max_seq_len_q": 4},
    ):
        (found,) = check_frozen(before, frozen(replace(PLANNED, **change)))
        assert found.startswith(next(iter(change)))
        assert found.endswith("[identity and lifetime]")
    retyped = replace(PLANNED, page_table=PLANNED.page_table.view(torch.float32))
    found = [line.split()[0] for line in check_frozen(before, frozen(retyped))]
    said = "a buffer of the same address and shape that is read as another dtype is another one"
    assert found == ["page_table"], f"{said}: {found}"
    assert len(check_frozen({"q": 64}, {"k": 64})) == 2


BUFFERS = {
    "seq_lens": torch.tensor([7, 9, 1, 1]),
    "hidden_states": torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]]),
    "input_ids": torch.tensor([5, 6]),
}
PADS = {"seq_lens": 1, "hidden_states": 0, "input_ids": 0}
ROWS = {"seq_lens": 2, "hidden_states": 2, "input_ids": 2}


def test_padding_holds_its_declared_value():
    assert check_padding(BUFFERS, PADS, ROWS) == []
    found = check_padding(BUFFERS, PADS | {"seq_lens": 4}, ROWS)
    said = "each padded row of a buffer, from the first on, holds its pad: seq_lens[2] and [3]"
    assert found == ["seq_lens[2] and 1 more are not 4 [stale or undeclared padding]"], (
        f"{said} are told, not {found}"
    )
    stale = BUFFERS | {"hidden_states": torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.0, 9.0]])}
    found = check_padding(stale, PADS, ROWS)
    said = "each element of a padded row holds its pad"
    assert found == ["hidden_states[2] and 0 more are not 0 [stale or undeclared padding]"], (
        f"{said}: hidden_states[2] is [0, 9], and told are {found}"
    )
    poisoned = BUFFERS | {"hidden_states": torch.full((3, 2), torch.nan)}
    found = check_padding(poisoned, PADS, ROWS)
    assert len(found) == 1, f"a padded row of hidden_states that is NaN is told: {found}"
    undeclared = {"positions": torch.zeros(2)}
    found = check_padding(undeclared, PADS, ROWS)
    assert found == ["positions declares no pad or no row count [stale or undeclared padding]"], (
        f"a buffer whose pad or row count is not declared is told: {found}"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_writes_land_in_their_slots_and_nowhere_else(dtype):
    before = torch.full((32, 2, 3), torch.nan).to(dtype)

    def after(*slots):
        written = before.clone()
        for slot in slots:
            written.view(torch.uint8)[slot, -1, -1] += 1
        return {"k0": written}

    def check(written, due):
        return check_writes({"k0": before}, written, {"k0": due}, page_size=16)

    found = check(after(3, 17), [3, 17])
    assert found == [], f"a forward that writes its slots, 3 and 17, and no other is right: {found}"
    found = check(after(0, 3, 17), [3, 17])
    assert found == [], f"slot 0 is padding's, which any forward may write: {found}"
    found = check(after(3, 5, 17), [3, 17])
    said = "of the padding page only slot 0 is anybody's to write; slot 5 is told"
    spoilt = "k0 slot 5 (page 0) and 0 more: was overwritten [index space or capacity]"
    assert found == [spoilt], f"{said}: {found}"
    overwritten = "k0 slot 18 (page 1) and 0 more: was overwritten [index space or capacity]"
    missing = "k0 slot 17 (page 1) and 0 more: was not written [index space or capacity]"
    found = check(after(3, 18), [3, 17])
    said = "a forward that writes a slot that is not its own is told"
    assert overwritten in found, f"{said}: it wrote 18, due were 3 and 17: {found}"
    said = "a forward that does not write one of its own slots is told"
    assert missing in found, f"{said}: it wrote 3 and 18, due were 3 and 17: {found}"
    assert found == [overwritten, missing]
    found = check({}, [3])
    assert found == ["k0 has no expected slots or is gone [index space or capacity]"], (
        f"a buffer of the cache that is gone is told: {found}"
    )


def test_a_buffer_that_is_gone_hides_no_stray_write_of_another():
    before = {name: torch.zeros(32, 3) for name in ("k0", "k1", "v1")}
    written = before["v1"].clone()
    written[17] = 1.0
    found = check_writes(before, {"k1": before["k1"], "v1": written}, dict.fromkeys(before, ()), 16)
    said = "each buffer of the cache is judged, also those behind one that is gone"
    assert found == [
        "k0 has no expected slots or is gone [index space or capacity]",
        "v1 slot 17 (page 1) and 0 more: was overwritten [index space or capacity]",
    ], f"{said}: {found}"


def test_of_a_long_table_a_few_columns_are_told_from_the_first_that_differs() -> None:
    pages = list(range(1, 41))
    wrong = [*pages[:30], *reversed(pages[30:])]
    metadata = SimpleNamespace(
        cache_seqlens_int32=torch.tensor([640], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        cu_seqlens_k=torch.tensor([0, 640], dtype=torch.int32),
        page_table=torch.tensor([wrong], dtype=torch.int32),
        swa_page_table=None,
        max_seq_len_q=1,
    )
    (line,) = check_metadata(
        metadata, prefix_lens=[639], q_lens=[1], pages=[pages], page_size=16, num_pages=64
    )
    told = f"{wrong[30:]} from column 30 on, expected {pages[30:]}"
    assert line == f"page_table[0] has live pages {told} [index space or capacity]"
