"""Inputs of a trial, drawn from the case's seed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import lru_cache

import torch

from harness.core.case import Case, Family, Inputs, Layout, Mode
from harness.differential.input_types import VOCAB, BatchInputs, ProbeWeights, TrialInputs
from harness.differential.traced_inputs import by_distance_from_the_end, capacity, with_tracers
from harness.upstream.allocator import PADDING_ROW

Tokens = tuple[torch.Tensor, ...]


def make_trial_inputs(case: Case, *decoys: Case) -> TrialInputs:
    """Inputs of a case and of decoys that have its geometry; the case's seed decides everything.

    Args:
        case: under test; its ``inputs`` say whether keys are random or traced.
        decoys: cases to replay before and after it.
    """
    inputs = _drawn(case, *decoys)
    if case.inputs is not Inputs.RANDOM and case.bs:
        return with_tracers(inputs, by_distance_from_the_end(case)[: capacity(case)])
    return inputs


def _drawn(*cases: Case) -> TrialInputs:
    first = cases[0]
    rng = random.Random(first.seed)
    weights = _weights(first)
    wanted = [_num_pages(case) for case in cases]
    unused = 3
    num_pages = 1 + sum(map(sum, wanted)) + unused
    pages = _lay_out([n for batch in wanted for n in batch], num_pages, first.layout, rng)
    req_pool_size = sum(case.bs for case in cases) + 3
    rows = rng.sample(range(PADDING_ROW + 1, req_pool_size + 1), sum(case.bs for case in cases))
    batches = []
    for case in cases:
        own_pages, pages = pages[: case.bs], pages[case.bs :]
        own_rows, rows = rows[: case.bs], rows[case.bs :]
        batches.append(_batch(case, own_pages, own_rows, weights.hidden_size))
    swa_page_of = None
    if first.window_left >= 0:
        swa_page_of = _swa_mapping(batches, num_pages, rng)
    used = {page for batch in batches for own in batch.pages for page in own}
    idle = sorted(set(range(1, num_pages)) - used)
    return TrialInputs(
        weights=weights,
        tested=batches[0],
        decoys=tuple(batches[1:]),
        num_pages=num_pages,
        swa_page_of=swa_page_of,
        num_swa_pages=num_pages,
        req_pool_size=req_pool_size,
        stale_slots=tuple(page * first.page_size + 1 for page in idle),
    )


def _num_pages(case: Case) -> list[int]:
    """Pages per request for a whole round: a worker allocates before it knows what is accepted."""
    lens = case.total_lens
    if case.mode is Mode.DRAFT_EXTEND:
        lens = tuple(prefix + case.num_draft_tokens for prefix in case.prefix_lens)
    return [max(1, math.ceil(total / case.page_size)) for total in lens]


def _lay_out(
    wanted: Sequence[int], num_pages: int, layout: Layout, rng: random.Random
) -> list[tuple[int, ...]]:
    ids = list(range(1, num_pages))
    if layout is Layout.SHUFFLED:
        rng.shuffle(ids)
    if layout is not Layout.INTERLEAVED:
        starts = [sum(wanted[:i]) for i in range(len(wanted))]
        return [tuple(ids[s : s + n]) for s, n in zip(starts, wanted, strict=True)]
    taken: list[list[int]] = [[] for _ in wanted]
    while any(len(own) < n for own, n in zip(taken, wanted, strict=True)):
        for own, n in zip(taken, wanted, strict=True):
            if len(own) < n:
                own.append(ids.pop(0))
    return [tuple(own) for own in taken]


def _swa_mapping(
    batches: Sequence[BatchInputs], num_pages: int, rng: random.Random
) -> tuple[int, ...]:
    """Pages wholly left of every window are evicted (mapped to 0), the others are permuted."""
    mapping = [0] * num_pages
    targets = list(range(1, num_pages))
    rng.shuffle(targets)
    for batch in batches:
        case = batch.case
        for prefix, own in zip(case.prefix_lens, batch.pages, strict=True):
            for j, page in enumerate(own):
                if (j + 1) * case.page_size > prefix - case.window_left:
                    mapping[page] = targets.pop()
    return tuple(mapping)


def _batch(
    case: Case,
    pages: Sequence[tuple[int, ...]],
    rows: Sequence[int],
    hidden_size: int,
) -> BatchInputs:
    history, new_tokens, hidden_in = _requests(case, hidden_size)
    return BatchInputs(
        case=case,
        history=history,
        new_tokens=new_tokens,
        hidden_in=hidden_in,
        req_pool_indices=tuple(rows),
        pages=tuple(pages),
    )


# Trials of a row follow each other; a replayed one has two decoys. What was computed from these
# tensors is found again by them, and nobody writes to them.
@lru_cache(maxsize=3)
def _requests(case: Case, hidden_size: int) -> tuple[Tokens, Tokens, torch.Tensor | None]:
    """History, new tokens and incoming hidden states of a batch."""
    generator = torch.Generator().manual_seed(case.seed)

    def tokens(counts: Sequence[int]) -> Tokens:
        return tuple(torch.randint(1, VOCAB, (n,), generator=generator) for n in counts)

    rows_in = {
        Mode.MULTI_STEP_DRAFT: case.bs,
        Mode.DRAFT_EXTEND: case.num_tokens,
        Mode.DRAFT_EXTEND_V2: case.num_tokens,
    }.get(case.mode)
    hidden_in = None
    if rows_in is not None:
        hidden_in = _rounded(torch.randn(rows_in, hidden_size, generator=generator), case)
    return tokens(case.prefix_lens), tokens(case.q_lens), hidden_in


def _rounded(x: torch.Tensor, case: Case) -> torch.Tensor:
    return x.to(getattr(torch, case.dtype)).float()


# Every trial of a row has the same weights, and trials of a row follow each other.
@lru_cache(maxsize=1)
def _weights(case: Case) -> ProbeWeights:
    generator = torch.Generator().manual_seed(case.seed + 1)
    layers, heads = case.num_layers, case.num_q_heads
    mla = case.family is Family.MLA
    kv_heads, dim = (1, case.kv_lora_rank) if mla else (case.num_kv_heads, case.head_dim)
    rope = case.qk_rope_head_dim if mla else 0

    def table(*shape: int) -> torch.Tensor:
        return _rounded(torch.randn(layers, VOCAB, *shape, generator=generator), case)

    hidden = layers * heads * dim
    return ProbeWeights(
        q=table(heads, dim),
        k=table(kv_heads, dim),
        v=None if mla else table(kv_heads, dim),
        q_rope=table(heads, rope) if mla else None,
        k_rope=table(1, rope) if mla else None,
        sinks=torch.randn(layers, heads, generator=generator) + 1 if case.sinks else None,
        lm_head=_rounded(torch.randn(hidden, VOCAB, generator=generator) / hidden**0.5, case),
        scaling=case.scaling,
    )
