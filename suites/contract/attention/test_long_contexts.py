"""What a kernel is handed for contexts to 128 K and batches to 64 is what a loop works out.

The kernel only takes its call down, so that no key is needed and lengths cost nothing.
"""

from __future__ import annotations

import random
from functools import cache
from itertools import accumulate, product
from typing import Any

import pytest
import torch

from fixtures.toys.toy_attention import PAGE, make_batch, mha_layer, mha_pool, mla_layer, mla_pool
from fixtures.toys.toy_scenes import phase_id
from harness.attention.multi_step_draft import (
    TRTLLMHAAttnMultiStepDraftBackend,
    TRTLLMMLAMultiStepDraftBackend,
)
from harness.attention.paged_backend import PagedBackend
from harness.attention.trtllm_mha import TRTLLMHAAttnBackend
from harness.attention.trtllm_mla import TRTLLMMLABackend
from harness.core.capability import REFERENCE
from harness.kernels.checked import CheckedKernel
from harness.kernels.interface import AttentionCall, ContextCall, DecodeCall
from harness.upstream.allocator import ReqToTokenPool
from harness.upstream.forward_batch_info import (
    EagleDraftExtendInput,
    EagleDraftInput,
    ForwardBatch,
    ForwardMode,
)

CONTEXT, WIDTH, STEPS = 131_072, 4, 3
# Requests of a batch by the keys that they have before the forward.
LENGTHS = {
    "longest": (CONTEXT - WIDTH, 1),
    "around_64k": (65_535, 65_536, 65_537, 7, 131_000),
    "32k": (32_767, 32_768, 32_769, 300),
    "64_requests": tuple(9_000 - 131 * i for i in range(64)),
}
CAPTURED = (
    ForwardMode.DECODE,
    ForwardMode.TARGET_VERIFY,
    ForwardMode.DRAFT_EXTEND,
    ForwardMode.DRAFT_EXTEND_V2,
)
PLANNED = [(ForwardMode.EXTEND, False), *product(CAPTURED, (False, True))]
FAMILIES: dict[type[PagedBackend], Any] = {
    TRTLLMHAAttnBackend: (mha_pool, mha_layer()),
    TRTLLMMLABackend: (mla_pool, mla_layer()),
}


class Taken(CheckedKernel):
    """Takes calls down and answers with zeros."""

    def __init__(self) -> None:
        self.taken: list[AttentionCall] = []
        entries = ("decode", "context", "mla_decode", "mla_context")
        super().__init__(REFERENCE, dict.fromkeys(entries, self._take))

    def _take(self, call: AttentionCall) -> torch.Tensor:
        self.taken.append(call)
        return call.q.new_zeros(*call.q.shape[:2], call.value_dim)


def refuse_write(*_: object, **__: object) -> None:
    """In the place of a pool's writes."""
    pytest.fail("with save_kv_cache=False a backend writes no keys: its caller has saved them")


@cache
def scattered(rows: int) -> tuple[torch.Tensor, ReqToTokenPool]:
    """Pages of requests, each of which lies anywhere, and the table of them, which is only read."""
    torch.manual_seed(rows)
    columns = CONTEXT + 2 * WIDTH
    pages = torch.randint(1, 2**20, (rows + 1, columns // PAGE), dtype=torch.int32)
    table = ReqToTokenPool(rows, columns)
    slots = pages[:, :, None] * PAGE + torch.arange(PAGE, dtype=torch.int32)
    table.req_to_token.copy_(slots.flatten(1))
    return pages, table


class Requests:
    """Requests of long contexts, and arguments of their backends."""

    def __init__(self, kind: type[PagedBackend], rows: int) -> None:
        random.seed(rows)
        make_pool, self.layer = FAMILIES[kind]
        self.pages, self.table = scattered(rows)
        self.rows = tuple(random.sample(range(1, rows + 1), rows))
        self.pool, self.kernel = make_pool(), Taken()
        for write in ("set_kv_buffer", "set_mla_kv_buffer"):
            setattr(self.pool, write, refuse_write)
        self.arguments: dict[str, Any] = {
            "kernel": self.kernel,
            "req_to_token_pool": self.table,
            "token_to_kv_pool": self.pool,
            "max_context_len": CONTEXT,
            "num_draft_tokens": WIDTH,
        }

    def batch(self, mode: ForwardMode, seq_lens: list[int], tokens: int, **kw: Any) -> ForwardBatch:
        loc = torch.arange(tokens) % 40 + 4
        return make_batch(mode, self.table, self.pool, seq_lens, loc, rows=self.rows, **kw)

    def attend(self, backend: PagedBackend, batch: ForwardBatch, tokens: int) -> AttentionCall:
        layer, heads = self.layer, (tokens, self.layer.tp_q_head_num)
        rope = torch.zeros(*heads, layer.head_dim - layer.v_head_dim)
        latent = {"q_rope": rope, "k_rope": rope}
        is_mla = isinstance(backend, TRTLLMMLABackend)
        q = torch.zeros(*heads, layer.v_head_dim if is_mla else layer.head_dim)
        q += torch.arange(tokens)[:, None, None]  # so that a query row tells which it is
        carried: dict[str, Any] = latent if is_mla else {}
        backend.forward(q, q, q, layer, batch, save_kv_cache=False, **carried)
        return self.kernel.taken[-1]

    def check(self, call: AttentionCall, keys: list[int], seen: int = 0) -> None:
        """Lengths and pages of these many keys; a table may hold those of ``seen`` more."""
        assert call.seq_lens.tolist() == keys
        enough = "max_seq_len of a kernel call is no less than the longest context"
        assert call.max_seq_len >= CONTEXT, enough
        assert call.max_seq_len <= CONTEXT + 2 * WIDTH
        for row, table, n in zip(self.rows, call.block_tables, keys, strict=True):
            used, most = -(-n // PAGE), -(-(n + seen) // PAGE)
            assert torch.equal(table[:used], self.pages[row, :used])
            assert not table[most:].any()
        assert call.block_tables.shape[1] == -(-(CONTEXT + WIDTH) // PAGE)


def plan(backend: Any, batch: ForwardBatch, tokens: int, is_graph: bool) -> None:
    if not is_graph:
        backend.init_forward_metadata(batch)
        return
    backend.init_cuda_graph_state(batch.batch_size, tokens)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata_out_graph(batch)
    backend.init_forward_metadata_in_graph(batch)


@pytest.mark.parametrize("prefixes", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize(("mode", "is_graph"), PLANNED, ids=phase_id)
@pytest.mark.parametrize("kind", FAMILIES, ids=lambda kind: kind.__name__)
def test_lengths_pages_and_queries(
    kind: type[PagedBackend], mode: ForwardMode, is_graph: bool, prefixes: tuple[int, ...]
) -> None:
    requests, bs = Requests(kind, len(prefixes)), len(prefixes)
    new = [1 if mode.is_decode() else WIDTH] * bs
    carried: dict[str, Any] = {}
    if mode in (ForwardMode.EXTEND, ForwardMode.DRAFT_EXTEND):
        new = [i % WIDTH + 1 for i in range(bs)]
        new[0] = WIDTH
    if mode.is_extend():
        carried["extend_seq_lens"] = torch.tensor(new, dtype=torch.int32)
    if mode.is_draft_extend(include_v2=True):
        counts = torch.tensor(new, dtype=torch.int32)
        width = WIDTH if mode.is_draft_extend_v2() else 0
        carried["spec_info"] = EagleDraftExtendInput(None, counts, num_tokens_per_req=width)
    keys = [prefix + n for prefix, n in zip(prefixes, new, strict=True)]
    seq_lens = list(prefixes) if mode.is_target_verify() else keys
    # A captured batch of ragged queries has as many rows as its bucket.
    tokens = bs * WIDTH if is_graph and mode.is_draft_extend() else sum(new)
    batch = requests.batch(mode, seq_lens, tokens, **carried)
    backend = kind(**requests.arguments)
    plan(backend, batch, tokens, is_graph)
    if kind is TRTLLMMLABackend and mode.is_draft_extend():
        after = set(backend.forward_metadata.unpad_rows[sum(new) :].tolist())
        assert after <= {bs * WIDTH}, "rows after the last query take the zero row, no request's"
    call = requests.attend(backend, batch, tokens)
    if kind is TRTLLMMLABackend and mode.is_draft_extend():
        starts = [0, *accumulate(new)]
        requests_own = zip(starts, new, strict=False)
        own = [start + min(i, n - 1) for start, n in requests_own for i in range(WIDTH)]
        rule = "MLA pads a request's draft-extend queries with its own last query, not another's"
        assert call.q[:, 0, 0].tolist() == own, rule
        # Its kernel has as many queries for each request: those after a request's own see more.
        keys = [n + WIDTH - m for n, m in zip(keys, new, strict=True)]
        requests.check(call, keys, seen=WIDTH)
    else:
        requests.check(call, keys)
    if isinstance(call, ContextCall):
        assert call.cu_seqlens_q.tolist() == [0, *accumulate(new)]
        assert call.cu_seqlens_k.tolist() == [0, *accumulate(keys)]
        assert call.max_q_len >= max(new)
    else:
        assert isinstance(call, DecodeCall)
        assert call.q_len_per_req == max(new)


@pytest.mark.parametrize("prefixes", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("is_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(
    ("kind", "steps_of"),
    [
        (TRTLLMHAAttnBackend, TRTLLMHAAttnMultiStepDraftBackend),
        (TRTLLMMLABackend, TRTLLMMLAMultiStepDraftBackend),
    ],
    ids=["mha", "mla"],
)
def test_steps_of_a_draft(
    kind: type[PagedBackend], steps_of: Any, is_graph: bool, prefixes: tuple[int, ...]
) -> None:
    requests, bs = Requests(kind, len(prefixes)), len(prefixes)
    multi_step = steps_of(**requests.arguments, speculative_num_steps=STEPS)
    start = torch.zeros(bs, 1, dtype=torch.int64)
    spec = EagleDraftInput(start, torch.ones(bs, 1), None, STEPS)
    seq_lens = list(prefixes)
    batch = requests.batch(ForwardMode.DECODE, seq_lens, bs * (STEPS - 1), spec_info=spec)
    plan(multi_step, batch, bs, is_graph)
    for step, backend in enumerate(multi_step.attn_backends):
        call = requests.attend(backend, batch, bs)
        # Captured steps read one table, as far as the last sees.
        requests.check(call, [n + step + 1 for n in prefixes], seen=STEPS if is_graph else 0)
        assert isinstance(call, DecodeCall)
        assert call.q_len_per_req == 1
