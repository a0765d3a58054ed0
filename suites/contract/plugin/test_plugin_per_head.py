"""A prefill per head, merged over its chunks as sglang merges them, attends to every key once."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from harness.attention.geometry import Geometry
from harness.core.capability import FLASH_MLA
from harness.errors import UsageError
from harness.plugin import register
from harness.plugin.per_head_prefill import PerHeadPrefill, per_head_prefill, runs_per_head
from harness.plugin.register import PREFILL_GRAPHS
from harness.upstream.forward_batch_info import ForwardMode

HEADS, QK, V, SCALE = 3, 24, 16, 0.17
NEW, CACHED, CHUNK = (5, 1, 8), (7, 0, 12), 8
"""Tokens of three requests; one has nothing cached, one a chunk and a half."""


def attend(
    q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal
):
    """What the kernel answers, request by request."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert cu_seqlens_q.diff().max() == max_seqlen_q
    said = "a chunk of cached keys is cut by prefix_chunk_cu_seq_lens, not as the new tokens"
    assert cu_seqlens_k.diff().max() == max_seqlen_k, said
    assert softmax_scale == SCALE
    outs, sums = [], []
    for i in range(len(cu_seqlens_q) - 1):
        own = q[cu_seqlens_q[i] : cu_seqlens_q[i + 1]]
        keys, values = (x[cu_seqlens_k[i] : cu_seqlens_k[i + 1]] for x in (k, v))
        scores = torch.einsum("thd,nhd->htn", own, keys) * softmax_scale
        if causal:
            seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(len(keys) - len(own))
            scores = scores.masked_fill(~seen, -torch.inf)
        log_sums = scores.logsumexp(-1)
        weights = (scores - log_sums[..., None]).exp().nan_to_num()
        outs.append(torch.einsum("htn,nhd->thd", weights, values))
        sums.append(log_sums)
    return torch.cat(outs), torch.cat(sums, 1), torch.empty(0), torch.empty(0)


def merged(first, second):
    """Two answers to the same queries, as ``merge_state`` of sgl_kernel makes them one."""
    weights = torch.stack((first[1], second[1])).softmax(0)[..., None]
    total = torch.logaddexp(first[1], second[1])
    return weights[0] * first[0] + weights[1] * second[0], total


def ends(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.fixture
def rows():
    torch.manual_seed(3)
    draw = torch.float64
    return [
        (torch.randn(n, HEADS, QK, dtype=draw), torch.randn(c + n, HEADS, QK, dtype=draw),
         torch.randn(c + n, HEADS, V, dtype=draw))
        for n, c in zip(NEW, CACHED, strict=True)
    ]  # fmt: skip


def batch(**changes):
    fields = {"attn_attend_prefix_cache": False, "mha_return_lse": True}
    return SimpleNamespace(**fields | changes)


PLANNED = SimpleNamespace(
    cu_seqlens_q=ends(NEW),
    geometry=Geometry(
        forward_mode=ForwardMode.EXTEND,
        bs=3,
        num_tokens=sum(NEW),
        max_q_len=max(NEW),
        is_ragged=True,
    ),
)
LAYER = SimpleNamespace(tp_q_head_num=HEADS, head_dim=QK, v_head_dim=V, scaling=SCALE)


def test_chunks_and_new_tokens_make_the_whole(rows):
    is_causal = []

    def noted(*args, causal, **options):
        is_causal.append(causal)
        return attend(*args, causal=causal, **options)

    prefill = PerHeadPrefill(noted)
    queries = torch.cat([q for q, _, _ in rows])

    def answer(spans, **changes):
        k, v = (
            torch.cat([row[at][a:b] for row, (a, b) in zip(rows, spans, strict=True)])
            for at in (1, 2)
        )
        # As projections leave them: flat rows.
        return prefill(queries.flatten(1), k.flatten(1), v, LAYER, batch(**changes), PLANNED)

    new = [(c, c + n) for n, c in zip(NEW, CACHED, strict=True)]
    out, log_sums = answer(new)
    said = "log-sum-exps are [tokens, heads], as merge_state reads them: each of its own token"
    assert log_sums.shape == (sum(NEW), HEADS), said
    assert log_sums.is_contiguous()
    found = out, log_sums
    for chunk in range(2):
        spans = [(min(chunk * CHUNK, c), min((chunk + 1) * CHUNK, c)) for c in CACHED]
        lengths = [[min((j + 1) * CHUNK, c) - min(j * CHUNK, c) for c in CACHED] for j in range(2)]
        part = answer(
            spans,
            attn_attend_prefix_cache=True,
            prefix_chunk_idx=chunk,
            prefix_chunk_cu_seq_lens=torch.stack([ends(each) for each in lengths]),
            prefix_chunk_max_seq_lens=[max(each) for each in lengths],
        )
        found = merged(found, part)
    said = "new tokens attend causally among themselves, and to all cached tokens of each chunk"
    assert is_causal == [True, False, False], said
    expected, *_ = attend(
        queries,
        *(torch.cat([row[at] for row in rows]) for at in (1, 2)),
        cu_seqlens_q=ends(NEW),
        cu_seqlens_k=ends([c + n for n, c in zip(NEW, CACHED, strict=True)]),
        max_seqlen_q=max(NEW),
        max_seqlen_k=max(c + n for n, c in zip(NEW, CACHED, strict=True)),
        softmax_scale=SCALE,
        causal=True,
    )
    torch.testing.assert_close(found[0], expected)


def test_what_sglang_does_not_merge_comes_alone(rows):
    args = [torch.cat([row[0] for row in rows]).flatten(1)] * 2
    values = torch.randn(sum(NEW), HEADS, V, dtype=torch.float64)
    out = PerHeadPrefill(attend)(*args, values, LAYER, batch(mha_return_lse=False), PLANNED)
    assert out.shape == (sum(NEW), HEADS, V)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float8_e4m3fn])
def test_keys_and_values_of_a_narrower_cache_are_widened_to_the_query(rows, narrow):
    dtypes = []

    def noted(q, k, v, **_):
        dtypes.extend(x.dtype for x in (q, k, v))
        return v, torch.zeros(HEADS, len(q))

    queries = torch.cat([q for q, _, _ in rows]).float()
    k, v = (torch.cat([row[at][-len(row[0]) :] for row in rows]).to(narrow) for at in (1, 2))
    PerHeadPrefill(noted)(queries, k, v, LAYER, batch(), PLANNED)
    said = "the kernel takes one dtype: what a chunk read from the cache has the query's"
    assert dtypes == [torch.float32] * 3, f"{said}, not {dtypes}"


@pytest.mark.parametrize(
    ("speculative", "cached", "disabled", "expected"),
    [
        (False, [0, 0], False, True),
        (False, None, False, True),
        (False, [4000, 5000], False, True),
        (False, [4000, 4192], False, True),
        (False, [4000, 4191], False, False),
        (False, [4000, 5000], True, False),
        (True, [0, 0], False, False),
    ],
)
def test_a_prefill_runs_per_head_where_it_pays(speculative, cached, disabled, expected):
    attention = SimpleNamespace(
        chunked_prefix_cache_threshold=8192, disable_chunked_prefix_cache=disabled
    )
    mode = SimpleNamespace(is_extend_without_speculative=lambda: not speculative)
    forward_batch = SimpleNamespace(forward_mode=mode, extend_prefix_lens_cpu=cached)
    rule = "a prefill, none of speculation, runs per head with no cached tokens or 8192 and more"
    told = f"{speculative=}, {cached=}, disable_chunked_prefix_cache={disabled}"
    found = runs_per_head(attention, forward_batch)
    assert found is expected, f"{rule} where chunks are not disabled: {told}: {found}"


@pytest.mark.parametrize("replayed", [None, *PREFILL_GRAPHS])
def test_a_prefill_in_a_graph_of_either_kind_is_absorbed(replayed, monkeypatch):
    handlers, methods = ModuleType("handlers"), ModuleType("methods")
    for name in PREFILL_GRAPHS:
        setattr(handlers, name, lambda name=name: name == replayed)
    methods.AttnForwardMethod = SimpleNamespace(MHA_CHUNKED_KV="per head", MLA="absorbed")
    package = "sglang.srt.models.deepseek_common"
    parent = ModuleType(package)
    parent.attention_backend_handler = handlers
    for name, module in (
        (package, parent),
        (f"{package}.attention_backend_handler", handlers),
        (f"{package}.attention_forward_methods.forward_methods", methods),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(register, "runs_per_head", lambda *_: True)
    served = SimpleNamespace(capability=lambda _: FLASH_MLA)
    found = register.forward_method(served, None, SimpleNamespace(seq_lens=torch.zeros(1)))
    told = "a graph has one way for all its batches; an eager prefill beside FlashMLA runs per head"
    assert found == ("absorbed" if replayed else "per head"), f"{told}: {replayed}: {found}"


def test_a_missing_kernel_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sgl_kernel", None)
    with pytest.raises(UsageError, match="FlashAttention 3 needs sglang-kernel"):
        per_head_prefill()
