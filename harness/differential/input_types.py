"""Inputs of a trial as plain tensors: weights of the probe model, tokens, and a page layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from harness.core.case import Case

VOCAB = 96
ROPE_THETA = 10_000.0


@dataclass(frozen=True, eq=False)
class ProbeWeights:
    """Weights of the probe model: each token has its own query, key and value in each layer.

    L layers, V tokens, H query heads, K KV heads. All float32 holding values of the case's dtype.
    Equal to themselves alone.

    Args:
        q: [L, V, H, head_dim]; MLA: the absorbed part, head_dim = kv_lora_rank.
        k: [L, V, K, head_dim]; MLA: the latent, K = 1.
        v: [L, V, K, head_dim]; MLA: None, the latent again.
        q_rope: [L, V, H, qk_rope_head_dim], MLA only.
        k_rope: [L, V, 1, qk_rope_head_dim], MLA only.
        sinks: [L, H] float32, or None.
        lm_head: [L * H * head_dim, V].
        scaling: softmax scale.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor | None
    q_rope: torch.Tensor | None
    k_rope: torch.Tensor | None
    sinks: torch.Tensor | None
    lm_head: torch.Tensor
    scaling: float

    @property
    def hidden_size(self) -> int:
        """L * H * head_dim."""
        return self.lm_head.shape[0]

    def to(self, device: torch.device | str) -> ProbeWeights:
        """The same weights on a device."""
        tensors: dict[str, Any] = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor)
        }
        return replace(self, **tensors)


@dataclass(frozen=True)
class BatchInputs:
    """The requests of one case, and their places in the pools.

    Args:
        case: the row.
        history: [prefix_len] int64 per request, committed token ids.
        new_tokens: [q_len] int64 per request; in a multi-step draft only the first is fed, the
            others are the draft's own.
        hidden_in: [T, hidden] float32 holding values of the case's dtype, the hidden state before
            each query token (draft modes); [bs, hidden] for a multi-step draft; else None.
        req_pool_indices: row of the request-to-token table, one per request.
        pages: pages of the full pool per request, in token order, enough for total_len and one
            more round of draft tokens.
    """

    case: Case
    history: tuple[torch.Tensor, ...]
    new_tokens: tuple[torch.Tensor, ...]
    hidden_in: torch.Tensor | None
    req_pool_indices: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]

    def slots(self, request: int, start: int, stop: int) -> list[int]:
        """KV slots of tokens start … stop - 1 of a request."""
        size, pages = self.case.page_size, self.pages[request]
        return [pages[t // size] * size + t % size for t in range(start, stop)]

    @property
    def new_slots(self) -> list[list[int]]:
        """Slots that the forward writes, one list per request."""
        lens = zip(self.case.prefix_lens, self.case.total_lens, strict=True)
        return [self.slots(i, start, stop) for i, (start, stop) in enumerate(lens)]


@dataclass(frozen=True)
class TrialInputs:
    """Weights, and the requests of a case and of its decoys, all in one pool without overlap.

    Args:
        weights: of the probe model.
        tested: the batch under test.
        decoys: batches that are replayed before and after it.
        num_pages: pages of the full pool, padding page 0 and never-used pages included.
        swa_page_of: SWA page of each full page, 0 where unmapped; None without an SWA pool.
        num_swa_pages: pages of the SWA pool.
        req_pool_size: rows of the request-to-token table, the padding row not counted.
        stale_slots: garbage that fills req_to_token wherever no live token is.
        traced: (request, position) in the tested batch of the keys that outputs name; empty
            where inputs are random.
    """

    weights: ProbeWeights
    tested: BatchInputs
    decoys: tuple[BatchInputs, ...]
    num_pages: int
    swa_page_of: tuple[int, ...] | None
    num_swa_pages: int
    req_pool_size: int
    stale_slots: tuple[int, ...]
    traced: tuple[tuple[int, int], ...] = ()

    @property
    def case(self) -> Case:
        """The case under test."""
        return self.tested.case

    @property
    def batches(self) -> tuple[BatchInputs, ...]:
        """The tested batch and its decoys."""
        return (self.tested, *self.decoys)

    def swa_slots(self, slots: list[int]) -> list[int]:
        """Slots of the SWA pool that mirror these of the full pool."""
        assert self.swa_page_of is not None
        size = self.case.page_size
        return [self.swa_page_of[slot // size] * size + slot % size for slot in slots]
