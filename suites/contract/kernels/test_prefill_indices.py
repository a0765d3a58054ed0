"""What FlashInfer's prefill reads from its index buffers, for ragged batches and for full ones."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.kernels import flashinfer_plan
from harness.kernels.flashinfer_plan import PrefillGeometry, PrefillPlan

GEOMETRY = PrefillGeometry(
    batch_size=3,
    max_q_len=8,
    table_width=4,
    page_size=16,
    q_heads=2,
    kv_heads=1,
    head_dim=8,
    q_dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
    window_left=-1,
    has_sinks=False,
)


def prefill_plan(monkeypatch: pytest.MonkeyPatch) -> tuple[PrefillPlan, list[torch.Tensor]]:
    """A plan, and the index buffers that its kernel reads."""
    planned: list[torch.Tensor] = []

    def plan(*given: Any, **_: Any) -> None:
        planned.extend(given[:4])

    monkeypatch.setattr(flashinfer_plan, "_wrapper", lambda *_: SimpleNamespace(plan=plan))
    return PrefillPlan(GEOMETRY, torch.device("cpu")), planned


@pytest.mark.parametrize(
    ("q_lens", "seq_lens"),
    [((1, 8, 3), (17, 8, 48)), ((8, 8, 8), (64, 64, 64)), ((2, 1, 1), (64, 1, 49))],
    ids=["ragged", "every_table_is_full", "full_beside_short"],
)
def test_each_request_has_its_own_pages(
    monkeypatch: pytest.MonkeyPatch, q_lens: tuple[int, ...], seq_lens: tuple[int, ...]
) -> None:
    made, planned = prefill_plan(monkeypatch)
    qo_indptr, kv_indptr, kv_indices, last_page_len = planned
    tables = torch.arange(100, 112, dtype=torch.int32).view(3, 4)
    ends = torch.tensor([0, *q_lens]).cumsum(0, dtype=torch.int32)
    for lens in ((64, 64, 64), seq_lens):  # a fuller batch before it leaves nothing behind
        made.fill(ends, torch.tensor(lens, dtype=torch.int32), tables)
    pages = [-(-n // 16) for n in seq_lens]
    cuts = qo_indptr.tolist()
    assert cuts == ends.tolist(), f"qo_indptr is this batch's cu_seqlens_q, {ends}, not {cuts}"
    ends_of_pages = [0, *torch.tensor(pages).cumsum(0).tolist()]
    assert kv_indptr.tolist() == ends_of_pages, "pages are those that seq_lens fill"
    own = [page for row, n in zip(tables.tolist(), pages, strict=True) for page in row[:n]]
    assert kv_indices[: len(own)].tolist() == own, "pages are those of the request's row"
    last = [(n - 1) % 16 + 1 for n in seq_lens]
    assert last_page_len.tolist() == last, "a last page holds what is left of seq_lens"


def test_columns_without_a_page_are_scattered_to_the_spare_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In which order a GPU writes one slot twice nobody knows; on a CPU the last one stays."""
    made, _ = prefill_plan(monkeypatch)
    written: list[int] = []

    def scatter(into: torch.Tensor, dim: int, slots: torch.Tensor, pages: torch.Tensor) -> None:
        written.extend(slots.tolist())

    monkeypatch.setattr(torch.Tensor, "scatter_", scatter)
    ends, lens = (torch.tensor(n, dtype=torch.int32) for n in ((0, 1, 2, 3), (17, 8, 48)))
    made.fill(ends, lens, torch.zeros(3, 4, dtype=torch.int32))
    spare = 3 * 4
    # Two pages, one and three.
    due = [0, 1, spare, spare, 2, spare, spare, spare, 3, 4, 5, spare]
    assert written == due, f"each slot but the spare one, {spare}, is written once: {written}"


@pytest.mark.parametrize(
    "changed",
    [
        {"window_left": 127},
        {"head_dim": 16},
        {"q_dtype": torch.float16},
        {"kv_dtype": torch.float8_e4m3fn},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_no_two_kernels_with_sinks_share_the_name_of_a_binary(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]
) -> None:
    variants = SimpleNamespace(attention_sink_decl={"fa2": ""})
    monkeypatch.setattr(flashinfer_plan, "load", lambda *_: variants)
    first, second = (
        flashinfer_plan._with_sinks(replace(GEOMETRY, has_sinks=True, **more))
        for more in ({}, changed)
    )
    assert first != second, "the variant is compiled for what changed"
    name = first["jit_args"][0]
    said = f"a kernel for another {next(iter(changed))} has a binary, and so a name, of its own"
    assert second["jit_args"][0] != name, f"{said}: {name}"
