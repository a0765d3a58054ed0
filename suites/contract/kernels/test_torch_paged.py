"""The reference kernel computes dense attention over the pages it is shown, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fixtures.toys.toy_attention import HEADS, RANK, ROPE, ROWS, dense, mha_pool, mla_pool, slots
from fixtures.toys.toy_calls import LENS, Q_LEN, SCALES, int32, ragged, uniform
from harness.attention.metadata import packed_causal_mask
from harness.core.capability import REFERENCE
from harness.graphs.effects import observe
from harness.kernels import torch_attention
from harness.kernels.fp8 import widened
from harness.kernels.interface import DecodeCall
from harness.kernels.paged_kv import PagedKeys
from harness.kernels.reference import TorchPaged
from harness.kernels.torch_attention import Softmax
from harness.kernels.value_checks import check_cumulative


def expected(
    q: torch.Tensor, pool: Any, q_lens: tuple[int, ...], lens: tuple[int, ...] = LENS, **how: Any
) -> torch.Tensor:
    """Dense attention, request after request, on keys found by slot and never by page."""
    out = []
    for row, length, part in zip(ROWS, lens, q.split(q_lens), strict=True):
        at = slots(row, 0, length)
        out.append(dense(part, pool.k_buffer[0][at], pool.v_buffer[0][at], 0.4, **how))
    return torch.cat(out).float()


@pytest.fixture
def kernel() -> TorchPaged:
    torch.manual_seed(7)
    return TorchPaged(REFERENCE)


@pytest.mark.parametrize("window_left", [-1, 0, 2, 6])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_decode_equals_dense(kernel: TorchPaged, window_left: int, has_sinks: bool) -> None:
    pool, q = mha_pool(), torch.randn(6, HEADS, 8)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]) if has_sinks else None
    how: dict[str, Any] = {"window_left": window_left, "sinks": sinks}
    obtained = kernel.decode(uniform(q, pool, **how))
    told = f"a query sees its own key and window_left = {window_left} before it, -1 for all"
    due = expected(q, pool, (3, 3), **how)
    torch.testing.assert_close(obtained, due, msg=lambda more: f"{told}\n{more}")
    assert kernel.calls == ["decode"]


@pytest.mark.parametrize("q_lens", [(1, 7), (5, 1), (0, 4)], ids=str)
def test_context_equals_dense_and_leaves_padding_zero(
    kernel: TorchPaged, q_lens: tuple[int, int]
) -> None:
    pool, tokens = mha_pool(), sum(q_lens)
    q = torch.randn(tokens + 2, HEADS, 8)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    how: dict[str, Any] = {"window_left": 4, "sinks": sinks}
    obtained = kernel.context(ragged(q, pool, q_lens, **how))
    told = "a query attends to its own key and window_left = 4 before it, with sinks"
    due = expected(q[:tokens], pool, q_lens, **how)
    torch.testing.assert_close(obtained[:tokens], due, msg=lambda more: f"{told}\n{more}")
    padding = obtained[tokens:]
    assert torch.equal(padding, torch.zeros(2, HEADS, 8)), "rows after the last query are zero"


@pytest.mark.parametrize("q_lens", [(1, 2), (3, 3)], ids=str)
def test_both_mla_entries_equal_dense(kernel: TorchPaged, q_lens: tuple[int, int]) -> None:
    pool, tokens = mla_pool(), sum(q_lens)
    q = torch.randn(tokens, HEADS, RANK + ROPE)
    wanted = []
    for row, length, part in zip(ROWS, LENS, q.split(q_lens), strict=True):
        latent = pool.kv_buffer[0][slots(row, 0, length)][:, None]
        wanted.append(dense(part, latent, latent[..., :RANK], 0.4) * 2)
    obtained = [kernel.mla_context(ragged(q, pool, q_lens, bmm2_scale=2.0))]
    if q_lens[0] == q_lens[1]:
        obtained.append(kernel.mla_decode(uniform(q, pool, bmm2_scale=2.0)))
    told = "an MLA value is the first kv_lora_rank columns of the latent, times bmm2_scale"
    for each in obtained:
        due = torch.cat(wanted).float()
        torch.testing.assert_close(each, due, msg=lambda more: f"{told}\n{more}")


def test_scales_and_output_dtype(kernel: TorchPaged) -> None:
    pool, q = mha_pool(dtype=torch.bfloat16), torch.randn(6, HEADS, 8).bfloat16()
    obtained = kernel.decode(uniform(q, pool, bmm2_scale=3.0, out_dtype=torch.bfloat16))
    assert torch.equal(obtained, (expected(q, pool, (3, 3)) * 3).bfloat16())


def test_fp8_cache_is_read_as_numbers(kernel: TorchPaged) -> None:
    pool, q = mha_pool(dtype=torch.float8_e4m3fn), torch.randn(6, HEADS, 8)
    obtained = kernel.decode(uniform(q, pool))
    pool.k_buffer, pool.v_buffer = ([b.float() for b in x] for x in (pool.k_buffer, pool.v_buffer))
    torch.testing.assert_close(obtained, expected(q, pool, (3, 3)))


def test_packed_mask_decides_the_last_keys(kernel: TorchPaged) -> None:
    pool, q = mha_pool(), torch.randn(6, HEADS, 8)
    causal = kernel.decode(uniform(q, pool, packed_mask=packed_causal_mask(2, Q_LEN, "cpu")))
    assert torch.equal(causal, kernel.decode(uniform(q, pool)))
    # Row 1 of request 0 sees key 0 and 2 of the last three, but not its own.
    mask = packed_causal_mask(2, Q_LEN, "cpu")
    mask[0, 1, 0] = 0b101
    obtained = kernel.decode(uniform(q, pool, packed_mask=mask))
    at = torch.cat((slots(1, 0, 11), slots(1, 12, 13)))
    row = dense(q[1:2], pool.k_buffer[0][at], pool.v_buffer[0][at], 0.4).float()
    torch.testing.assert_close(obtained[1:2], row)
    rest = [0, 2, 3, 4, 5]
    assert torch.equal(obtained[rest], causal[rest])


def test_packed_mask_reaches_its_third_word() -> None:
    assert REFERENCE.max_q_len == 16, "calls read the first word alone, so the mask is read here"
    mask = packed_causal_mask(1, 33, "cpu")
    assert mask.shape == (1, 33, 4)
    words = [int(word) for word in mask[0, 32].to(torch.int32)]
    assert words == [0xFFFF, 0xFFFF, 1, 0]
    assert [int(w) for w in mask[0, 17].to(torch.int32)] == [0xFFFF, 0b11, 0, 0]
    key, position = torch.arange(38), torch.arange(5, 38)[None]
    seen = torch_attention.visible_keys(position, 38, Softmax(1.0, packed_mask=mask))
    told = "bit i % 16 of word i // 16 of a packed mask says whether the i-th key is seen"
    assert torch.equal(seen, key <= position[..., None]), told


def test_a_query_that_sees_nothing_yields_zeros() -> None:
    q, keys = torch.randn(1, 2, HEADS, 8), torch.randn(1, 3, HEADS, 8)
    position = torch.tensor([[-1, 0]])
    obtained = torch_attention.attend(q, keys, keys, position, Softmax(1.0))
    assert not obtained[:, 0].any()
    torch.testing.assert_close(obtained[:, 1], keys[:, 0])


def test_where_nobody_has_a_key_every_query_yields_zeros() -> None:
    keys, values = torch.ones(2, 0, HEADS, 8), torch.ones(2, 0, HEADS, 5)
    position = torch.full((2, 3), -1)
    obtained = torch_attention.attend(
        torch.ones(2, 3, HEADS, 8), keys, values, position, Softmax(1.0)
    )
    assert torch.equal(obtained, torch.zeros(2, 3, HEADS, 5))


def test_lengths_of_nobody_are_accepted() -> None:
    nobody = int32()
    check_cumulative("reference", int32(0), int32(0), nobody, tokens=0, max_q_len=0)


def test_a_full_last_page_makes_no_other_page_live() -> None:
    tables, lengths = int32([5, 2, -1], [7, 1, 3]), int32(8, 9)
    paged = PagedKeys((torch.zeros(8, 4, 1, 8),) * 2, tables, lengths, max_seq_len=9)
    assert paged.live_columns(3).tolist() == [[True, True, False], [True, True, True]]


@pytest.mark.parametrize("broken", [torch.nan, torch.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("cache", ["k_buffer", "v_buffer"])
def test_nan_or_inf_reaches_exactly_the_rows_that_see_it(
    kernel: TorchPaged, cache: str, broken: float
) -> None:
    pool, q = mha_pool(), torch.randn(6, HEADS, 8)
    clean = kernel.decode(uniform(q, pool))
    # Unowned slots, and request 3's slots after its end: unread.
    owned = torch.cat([slots(row, 0, n) for row, n in zip(ROWS, LENS, strict=True)])
    unread = torch.ones(pool.num_pages * 4, dtype=torch.bool)
    unread[owned] = False
    getattr(pool, cache)[0][unread] = broken
    told = f"{broken} in slots of {cache} that no request owns reaches no row"
    assert torch.equal(kernel.decode(uniform(q, pool)), clean), told
    # Token 11 of request 1 is the own key of its second query row; the first does not see it.
    getattr(pool, cache)[0][slots(1, 11, 12)] = broken
    obtained = kernel.decode(uniform(q, pool))
    told = f"rows 1 and 2, which see {broken} in {cache}, are NaN, and no other row"
    rows = obtained.isnan().flatten(1).any(1).nonzero().flatten().tolist()
    assert obtained[1:3].isnan().all(), f"{told}: rows {rows}"
    kept = [0, 3, 4, 5]
    assert torch.equal(obtained[kept], clean[kept]), f"{told}: rows {rows}"


def test_a_value_that_is_no_number_reaches_the_heads_of_its_kv_head(kernel: TorchPaged) -> None:
    pool, q = mha_pool(), torch.randn(6, HEADS, 8)
    clean = kernel.decode(uniform(q, pool))
    assert pool.v_buffer[0].shape[1] == 2, "query heads 0 and 1 read KV head 0, 2 and 3 the other"
    # Token 11 of request 1 is the own key of its second query row; the first does not see it.
    pool.v_buffer[0][slots(1, 11, 12), 1] = torch.nan
    obtained = kernel.decode(uniform(q, pool))
    spoilt = torch.zeros(6, HEADS, dtype=torch.bool)
    spoilt[1:3, 2:] = True
    told = "a NaN in values of KV head 1 is NaN in query heads 2 and 3 of the rows that see it"
    assert torch.equal(obtained.isnan().any(-1), spoilt), told
    assert torch.equal(obtained[~spoilt], clean[~spoilt]), f"{told}, and changes no other head"


def test_pages_past_the_end_are_never_looked_up(kernel: TorchPaged) -> None:
    pool, q = mha_pool(), torch.randn(6, HEADS, 8)
    tables = uniform(q, pool).block_tables
    clean = kernel.decode(uniform(q, pool))
    tables[0, 4:], tables[1, 2:] = -5, 10**6
    assert torch.equal(kernel.decode(uniform(q, pool, block_tables=tables)), clean)


def test_requests_without_keys_or_queries_give_zeros(kernel: TorchPaged) -> None:
    pool, q = mha_pool(), torch.randn(4, HEADS, 8)
    call = ragged(q, pool, (0, 0), (0, 0), max_q_len=4)
    assert torch.equal(kernel.context(call), torch.zeros(4, 4, 8))
    call = ragged(q, pool, (0, 2), (0, 7))
    obtained = kernel.context(call)
    assert obtained[:2].abs().sum() > 0
    empty = {"block_tables": torch.zeros(0, 7, dtype=torch.int32), "seq_lens": int32()}
    obtained = kernel.decode(uniform(q[:0], pool, **empty))
    assert obtained.shape == (0, HEADS, 8)


def test_blocks_of_queries_change_nothing(
    kernel: TorchPaged, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, q = mha_pool(), torch.randn(6, HEADS, 8)
    whole = kernel.decode(uniform(q, pool))
    monkeypatch.setattr(torch_attention, "SCORES_PER_BLOCK", 1)
    torch.testing.assert_close(kernel.decode(uniform(q, pool)), whole)


@pytest.mark.parametrize(("held", "rows"), [(167, [2, 2, 1]), (168, [3, 2]), (1, [1] * 5)])
def test_blocks_hold_no_more_scores_than_one_query_needs_or_the_limit_allows(
    held: int, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query token of two requests has 4 heads of 7 keys each: 56 scores."""
    blocks: list[int] = []
    block = torch_attention._block

    def noted(q: torch.Tensor, *rest: Any) -> torch.Tensor:
        blocks.append(q.shape[1])
        return block(q, *rest)

    monkeypatch.setattr(torch_attention, "_block", noted)
    monkeypatch.setattr(torch_attention, "SCORES_PER_BLOCK", held)
    keys = torch.ones(2, 7, 2, 8)
    position = torch.arange(2, 7).expand(2, 5)
    torch_attention.attend(torch.ones(2, 5, 4, 8), keys, keys, position, Softmax(1.0))
    assert blocks == rows, f"{held} scores at a time are queries {rows}, not {blocks}"


def test_no_value_of_a_stream_under_capture_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_attention, "is_readable", lambda _: False)
    keys, position = torch.ones(1, 3, 1, 8), torch.tensor([[2]])
    with observe() as effects:
        torch_attention.attend(torch.ones(1, 1, 1, 8), keys, keys, position, Softmax(1.0))
    assert effects.host_syncs == [], f"a captured stream is not read: {effects.host_syncs}"


def test_thirty_two_thousand_tokens(kernel: TorchPaged) -> None:
    length, page = 32768, 64
    pages = torch.randperm(length // page) + 1
    cache = torch.randn(length // page + 1, page, 1, 8)
    q = torch.randn(2, 2, 8)
    obtained = kernel.decode(
        DecodeCall(
            q=q,
            caches=(cache, cache),
            block_tables=pages.int()[None],
            seq_lens=int32(length),
            max_seq_len=length,
            q_len_per_req=2,
            **SCALES,
        )
    )
    keys = cache[pages].flatten(0, 1)
    torch.testing.assert_close(obtained, dense(q, keys, keys, 0.4).float())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_is_widened_as_torch_does(dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(16, 16).T.view(dtype)
    assert not every.is_contiguous()
    for given in (every, every[:5, :7], every[:0]):
        torch.testing.assert_close(widened(given), given.float(), rtol=0, atol=0, equal_nan=True)


def test_what_is_wider_than_fp8_keeps_its_values() -> None:
    given = torch.tensor([1.5, -0.0, torch.inf], dtype=torch.bfloat16)
    assert widened(given).dtype == torch.float32
    assert widened(given).tolist() == [1.5, 0.0, torch.inf]
