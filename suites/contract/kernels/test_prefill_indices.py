"""What FlashInfer's prefill reads from its index buffers, for ragged batches and for full ones."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("q_lens", "seq_lens"),
    [((1, 8, 3), (17, 8, 48)), ((8, 8, 8), (64, 64, 64)), ((2, 1, 1), (64, 1, 49))],
    ids=["ragged", "every_table_is_full", "full_beside_short"],
)
def test_each_request_has_its_own_pages(
    monkeypatch: pytest.MonkeyPatch, q_lens: tuple[int, ...], seq_lens: tuple[int, ...]
) -> None:
    planned: list[torch.Tensor] = []

    def plan(*given: Any, **_: Any) -> None:
        planned.extend(given[:4])

    monkeypatch.setattr(flashinfer_plan, "_wrapper", lambda *_: SimpleNamespace(plan=plan))
    made = PrefillPlan(GEOMETRY, torch.device("cpu"))
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
