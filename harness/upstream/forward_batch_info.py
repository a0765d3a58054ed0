"""Forward modes, batches and the three EAGLE inputs, by their names in SGLang 0.5.23.

Two things are older: the mode DRAFT_EXTEND, which 0.5.13 was the last to have, and the pools and
the backend on a batch, which 0.5.12 was the last to put there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum, auto
from typing import Any, Protocol

import torch

from harness.upstream.allocator import ReqToTokenPool
from harness.upstream.memory_pool import KVPool
from harness.upstream.radix_attention import RadixAttention


class ForwardMode(IntEnum):
    """The phase that a forward serves."""

    EXTEND = auto()
    DECODE = auto()
    IDLE = auto()
    TARGET_VERIFY = auto()
    DRAFT_EXTEND = auto()
    DRAFT_EXTEND_V2 = auto()

    def is_extend(self) -> bool:
        """Plain prefill only."""
        return self is ForwardMode.EXTEND

    def is_decode(self) -> bool:
        """One query per request: plain decode and each step of a multi-step draft."""
        return self is ForwardMode.DECODE

    def is_idle(self) -> bool:
        """No request at all."""
        return self is ForwardMode.IDLE

    def is_target_verify(self) -> bool:
        """num_draft_tokens queries per request, after seq_lens committed tokens."""
        return self is ForwardMode.TARGET_VERIFY

    def is_draft_extend(self, include_v2: bool = False) -> bool:
        """The draft model catching up with the verified tokens."""
        return self is ForwardMode.DRAFT_EXTEND or (include_v2 and self.is_draft_extend_v2())

    def is_draft_extend_v2(self) -> bool:
        """Draft extend over num_draft_tokens uniform rows."""
        return self is ForwardMode.DRAFT_EXTEND_V2


@dataclass
class EagleDraftInput:
    """Input of a multi-step draft, batch size bs.

    Args:
        topk_index: [bs, topk] int64, first draft token of each request.
        topk_p: [bs, topk] float32, its probability.
        hidden_states: [bs, hidden] of the token before it.
        num_steps: speculative steps of the round.
        kv_indptr: [num_steps - 1, bs + 1] int32, written by a baseline's parent only.
        kv_indices: [num_steps - 1, …] int32, likewise.
    """

    topk_index: torch.Tensor
    topk_p: torch.Tensor
    hidden_states: torch.Tensor | None
    num_steps: int
    kv_indptr: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None


@dataclass
class EagleVerifyInput:
    """Input of a target verify over a chain, batch size bs.

    Args:
        draft_token: [bs * draft_token_num] int64; the first of each request is the bonus token.
        draft_token_num: query tokens per request.
        custom_mask: flat bool FULL_MASK (sum over requests of draft_token_num * (seq_len +
            draft_token_num) entries), or None where the kernel is causal by itself.
    """

    draft_token: torch.Tensor
    draft_token_num: int
    custom_mask: torch.Tensor | None = None


@dataclass
class EagleDraftExtendInput:
    """Input of a draft extend, batch size bs.

    Args:
        hidden_states: [tokens, hidden] of the target, one per query token, or None.
        num_accept_tokens: [bs] int32, accepted tokens including the bonus token.
        num_accept_tokens_cpu: the same on the host where it is known there.
        num_tokens_per_req: uniform rows per request (v2, and any captured graph); 0 where unset.
    """

    hidden_states: torch.Tensor | None
    num_accept_tokens: torch.Tensor
    num_accept_tokens_cpu: list[int] | None = None
    num_tokens_per_req: int = 0


SpecInput = EagleDraftInput | EagleVerifyInput | EagleDraftExtendInput


class Attention(Protocol):
    """Whatever runs attention for a forward; a backend's other methods are in its own module."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention of one layer, [T, heads * v_head_dim]."""
        ...


@dataclass
class ForwardBatch:
    """One forward of bs requests and T query tokens.

    Args:
        forward_mode: the phase.
        batch_size: bs; may exceed the planned rows after DP padding.
        input_ids: [T] int64.
        positions: [T] int64.
        req_pool_indices: [bs] int64, rows of the request-to-token table.
        seq_lens: [bs] int64 on the device. extend: prefix + new. decode: including the current
            token. draft steps and target_verify: committed tokens only. draft_extend v1 and v2:
            already advanced over the query tokens.
        out_cache_loc: [T] int64, slots the new keys and values go to. A multi-step draft has
            [(num_steps - 1) * bs], step-major.
        seq_lens_cpu: [bs] int64 copy on the host, None where the worker skips the copy.
        seq_lens_sum: its sum, or None likewise.
        extend_seq_lens: [bs] int32, query tokens per request (extend and draft_extend v1).
        extend_seq_lens_cpu: the same on the host; known there without a copy.
        spec_info: the EAGLE input of the phase, if any.
        attn_backend: whoever runs attention for this forward.
        req_to_token_pool: the request-to-token table.
        token_to_kv_pool: the KV pool of the model that runs.
    """

    forward_mode: ForwardMode
    batch_size: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    out_cache_loc: torch.Tensor
    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool: KVPool
    attn_backend: Attention | None = None
    seq_lens_cpu: torch.Tensor | None = None
    seq_lens_sum: int | None = None
    extend_seq_lens: torch.Tensor | None = None
    extend_seq_lens_cpu: list[int] | None = None
    spec_info: SpecInput | None = None

    def with_changes(self, **changes: Any) -> ForwardBatch:
        """A shallow copy; tensors are shared."""
        return replace(self, **changes)


@dataclass
class LogitsProcessorOutput:
    """The output of a forward.

    Args:
        next_token_logits: [rows, vocab] float32, one row per query token.
        hidden_states: [rows, hidden] that the draft model continues from.
        topk_p: [bs, topk] probabilities of selected rows; draft_extend v1 graphs only.
        topk_index: [bs, topk] int64, likewise.
    """

    next_token_logits: torch.Tensor
    hidden_states: torch.Tensor
    topk_p: torch.Tensor | None = None
    topk_index: torch.Tensor | None = None


@dataclass
class DraftOutput:
    """The output of a multi-step draft, batch size bs.

    Args:
        draft_tokens: [bs, num_steps] int64, the first one given, the others drafted.
        next_token_logits: [bs, num_steps - 1, vocab] float32, one slice per step.
        hidden_states: [bs, num_steps - 1, hidden].
    """

    draft_tokens: torch.Tensor
    next_token_logits: torch.Tensor
    hidden_states: torch.Tensor
