"""The emulation of the Triton extend kernel: cached slots by scale, new rows as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.errors import KernelRefusal
from harness.kernels.extend_attention import extend_attention
from harness.oracle import attend

PREFIXES, QUERIES = (5, 0, 18), (3, 4, 1)
HEADS, KV_HEADS, DIM, VALUE_DIM, SLOTS = 4, 2, 8, 6, 40
K_SCALE, V_SCALE, SCALE = 0.5, 2.0, 0.3


@pytest.fixture
def call() -> dict[str, Any]:
    """Arguments of a call whose slots outside ``kv_indices`` are NaN."""
    random = torch.Generator().manual_seed(3)
    total = sum(QUERIES)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    kv_indices = torch.randperm(SLOTS, generator=random)[: sum(PREFIXES)].int()
    keys, values = drawn(SLOTS, KV_HEADS, DIM), drawn(SLOTS, KV_HEADS, VALUE_DIM)
    unread = torch.ones(SLOTS, dtype=torch.bool)
    unread[kv_indices.long()] = False
    keys[unread], values[unread] = torch.nan, torch.nan
    return {
        "q": drawn(total, HEADS, DIM),
        "new_keys": drawn(total, KV_HEADS, DIM),
        "new_values": drawn(total, KV_HEADS, VALUE_DIM),
        "keys": keys,
        "values": values,
        "qo_indptr": torch.tensor([0, 3, 7, 8], dtype=torch.int32),
        "kv_indptr": torch.tensor([0, 5, 5, 23], dtype=torch.int32),
        "kv_indices": kv_indices,
        "mask": None,
        "mask_indptr": None,
        "mask_starts": None,
        "window_left": -1,
        "scale": SCALE,
        "k_scale": K_SCALE,
        "v_scale": V_SCALE,
    }


def request(call: dict[str, Any], r: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, all keys and all values of a request, put together by hand."""
    rows = slice(call["qo_indptr"][r], call["qo_indptr"][r + 1])
    own = call["kv_indices"][call["kv_indptr"][r] : call["kv_indptr"][r + 1]].long()
    keys = torch.cat((call["keys"][own] * K_SCALE, call["new_keys"][rows]))
    values = torch.cat((call["values"][own] * V_SCALE, call["new_values"][rows]))
    return call["q"][rows], keys, values


def causal_masks() -> dict[str, torch.Tensor]:
    """Masks that say of each request what causality says."""
    lens = zip(PREFIXES, QUERIES, strict=True)
    masks = [torch.ones(queries, n + queries).tril(n).flatten() for n, queries in lens]
    starts = torch.tensor([0, *(len(mask) for mask in masks)]).cumsum(0)
    return {"mask": torch.cat(masks), "mask_indptr": starts}


@pytest.mark.parametrize("masks", [{}, causal_masks()], ids=["causal", "masked"])
@pytest.mark.parametrize("window", [-1, 0, 2, 7])
def test_each_request_agrees_with_the_oracle(
    call: dict[str, Any], window: int, masks: dict[str, torch.Tensor]
) -> None:
    out, lse = extend_attention(**call | masks | {"window_left": window})
    expected = [
        attend(*request(call, r), prefix_len=prefix, scale=SCALE, window_left=window)
        for r, prefix in enumerate(PREFIXES)
    ]
    rule = "a query sees the window_left keys before its own, under a mask, too; -1 for all"
    torch.testing.assert_close(
        out.double(),
        torch.cat(expected),
        rtol=1e-5,
        atol=1e-5,
        msg=lambda found: f"{rule}: {found}",
    )
    q, keys, _ = request(call, 2)
    seen = keys[max(0, len(keys) - 1 - window) :] if window >= 0 else keys
    scores = torch.einsum("hd,khd->hk", q[0], seen.repeat_interleave(2, 1)) * SCALE
    torch.testing.assert_close(lse[-1], scores.logsumexp(-1) / torch.log(torch.tensor(2.0)))


def test_a_mask_rules_among_the_new_keys_alone(call: dict[str, Any]) -> None:
    rows = [torch.ones(queries, n + queries) for n, queries in zip(PREFIXES, QUERIES, strict=True)]
    rows[0][:, 1], rows[0][2, 5] = 0, 0  # a cached key, which every query sees; the first new one
    starts = torch.tensor([0, *torch.tensor([len(r.flatten()) for r in rows]).cumsum(0).tolist()])
    masked = {"mask": torch.cat([r.flatten() for r in rows]), "mask_indptr": starts}
    out, _ = extend_attention(**call | masked)
    q, keys, values = request(call, 0)
    kept = [0, 1, 2, 3, 4, 6, 7]
    one = attend(q[2:], keys[kept], values[kept], prefix_len=6, scale=SCALE)
    torch.testing.assert_close(out[2:3].double(), one, rtol=1e-5, atol=1e-5)
    first = attend(q[:1], keys, values, prefix_len=7, scale=SCALE)  # all ones: not causal
    torch.testing.assert_close(out[:1].double(), first, rtol=1e-5, atol=1e-5)


def test_a_window_leaves_out_what_the_mask_does(call: dict[str, Any]) -> None:
    rows = [torch.ones(queries, n + queries) for n, queries in zip(PREFIXES, QUERIES, strict=True)]
    rows[0][2, 6] = 0  # the new key in front of the last query's own
    starts = torch.tensor([0, *torch.tensor([len(r.flatten()) for r in rows]).cumsum(0).tolist()])
    masked = {"mask": torch.cat([r.flatten() for r in rows]), "mask_indptr": starts}
    out, _ = extend_attention(**call | masked | {"window_left": 3})
    q, keys, values = request(call, 0)
    kept = [4, 5, 7]  # the window is 4 … 7
    wanted = attend(q[2:], keys[kept], values[kept], prefix_len=2, scale=SCALE)
    rule = "a query sees the keys that both its window and its mask hold"
    torch.testing.assert_close(
        out[2:3].double(), wanted, rtol=1e-5, atol=1e-5, msg=lambda found: f"{rule}: {found}"
    )


def test_a_mask_of_keys_before_the_cached_ones_is_cut_where_these_begin(
    call: dict[str, Any],
) -> None:
    # A window's slots begin behind the first keys, whose entries the mask has all the same.
    starts, drawn = (4, 0, 9), torch.Generator().manual_seed(5)
    own = [
        torch.randint(0, 2, (queries, n + queries), generator=drawn)
        for n, queries in zip(PREFIXES, QUERIES, strict=True)
    ]
    for mask in own:
        mask[:, -mask.shape[0] :].fill_diagonal_(1)
    whole = [
        torch.cat((torch.zeros(len(mask), first, dtype=mask.dtype), mask), 1)
        for mask, first in zip(own, starts, strict=True)
    ]

    def masked(masks: list[torch.Tensor], first: torch.Tensor | None) -> torch.Tensor:
        lens = torch.tensor([mask.numel() for mask in masks])
        more = {
            "mask": torch.cat([mask.flatten() for mask in masks]),
            "mask_indptr": torch.cat((lens.new_zeros(1), lens.cumsum(0))),
            "mask_starts": first,
        }
        out, _ = extend_attention(**call | more)
        return out

    torch.testing.assert_close(masked(whole, torch.tensor(starts)), masked(own, None))


@pytest.mark.parametrize("broken", [torch.nan, torch.inf], ids=["nan", "inf"])
def test_a_broken_value_reaches_exactly_the_queries_that_see_it(
    call: dict[str, Any], broken: float
) -> None:
    clean, _ = extend_attention(**call)
    # Of the second new token of request 0, which its first query does not see.
    call["new_values"][1] = broken
    obtained, _ = extend_attention(**call)
    rows = obtained.isnan().flatten(1).any(1).nonzero().flatten().tolist()
    told = f"queries 1 and 2, which see {broken} in a value, are NaN, and no other: {rows} are"
    assert obtained[1:3].isnan().all(), told
    kept = [0, 3, 4, 5, 6, 7]
    assert torch.equal(obtained[kept], clean[kept]), told


def test_shapes_on_meta(call: dict[str, Any]) -> None:
    moved = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in call.items()}
    out, lse = extend_attention(**moved)
    assert (out.shape, out.dtype) == ((8, HEADS, VALUE_DIM), torch.float32)
    assert (lse.shape, lse.dtype) == ((8, HEADS), torch.float32)


def test_a_mask_that_is_too_short_is_refused(call: dict[str, Any]) -> None:
    short = {"mask": torch.ones(7), "mask_indptr": torch.tensor([0, 7, 7, 7])}
    with pytest.raises(KernelRefusal, match="custom_mask of a request = 7"):
        extend_attention(**call | short)
