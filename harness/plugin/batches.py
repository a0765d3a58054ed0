"""A server's batches and layers in our terms; no tensor is copied."""

from __future__ import annotations

from typing import Any

import torch

from harness.errors import UsageError, rejected
from harness.upstream.forward_batch_info import (
    EagleDraftExtendInput,
    EagleDraftInput,
    EagleVerifyInput,
    ForwardBatch,
    ForwardMode,
    SpecInput,
)
from harness.upstream.radix_attention import RadixAttention


def our_batch(theirs: Any, *, req_to_token_pool: Any, token_to_kv_pool: Any) -> ForwardBatch:
    """A ``ForwardBatch`` of sglang, or the view of one that its graph runners plan from.

    Args:
        theirs: its tensors may be longer than its batch, which is what padding leaves.
        req_to_token_pool: the server's.
        token_to_kv_pool: ours, of the model that runs.

    Raises:
        UsageError: its mode is none that these backends serve.
    """
    bs, name = theirs.batch_size, theirs.forward_mode.name
    if name not in ForwardMode.__members__:
        raise UsageError(rejected("forward_mode", name, ", ".join(ForwardMode.__members__)))
    lens = getattr(theirs, "extend_seq_lens_cpu", None)
    return ForwardBatch(
        forward_mode=ForwardMode[name],
        batch_size=bs,
        input_ids=theirs.input_ids,
        positions=getattr(theirs, "positions", theirs.seq_lens),
        req_pool_indices=theirs.req_pool_indices[:bs],
        seq_lens=theirs.seq_lens[:bs],
        out_cache_loc=theirs.out_cache_loc,
        req_to_token_pool=req_to_token_pool,
        token_to_kv_pool=token_to_kv_pool,
        seq_lens_cpu=None if theirs.seq_lens_cpu is None else theirs.seq_lens_cpu[:bs],
        extend_seq_lens=getattr(theirs, "extend_seq_lens", None),
        extend_seq_lens_cpu=None if lens is None else list(lens),
        spec_info=_spec_info(theirs),
    )


def _spec_info(theirs: Any) -> SpecInput | None:
    spec, mode = theirs.spec_info, theirs.forward_mode
    if spec is None or not mode.name.startswith(("TARGET_VERIFY", "DRAFT_EXTEND", "DECODE")):
        return None
    if mode.name == "DECODE":
        return EagleDraftInput(spec.topk_index, spec.topk_p, spec.hidden_states, num_steps=0)
    if mode.name == "TARGET_VERIFY":
        return EagleVerifyInput(spec.draft_token, spec.draft_token_num, spec.custom_mask)
    return EagleDraftExtendInput(
        hidden_states=None,
        num_accept_tokens=spec.num_accept_tokens,
        num_tokens_per_req=_stride(theirs),
    )


def _stride(theirs: Any) -> int:
    """Uniform rows per request of a draft extend; a graph's is fixed when it is captured."""
    known = getattr(theirs.spec_info, "num_tokens_per_req", -1)
    if known > 0:
        return int(known)
    return int(theirs.input_ids.shape[0] // max(1, theirs.seq_lens.shape[0]))


def our_layer(theirs: Any, sinks: torch.Tensor | None) -> RadixAttention:
    """A ``RadixAttention`` of sglang.

    Raises:
        UsageError: it computes what no kernel of ours does.
    """
    if theirs.logit_cap:
        raise UsageError(rejected("logit_cap", theirs.logit_cap, "0"))
    kind = getattr(theirs.attn_type, "value", theirs.attn_type)
    if kind != "decoder" or theirs.is_cross_attention:
        raise UsageError(rejected("attn_type", kind, "decoder, over its own keys"))
    return RadixAttention(
        layer_id=theirs.layer_id,
        tp_q_head_num=theirs.tp_q_head_num,
        tp_k_head_num=theirs.tp_k_head_num,
        head_dim=theirs.head_dim,
        v_head_dim=theirs.v_head_dim,
        scaling=theirs.scaling,
        sliding_window_size=theirs.sliding_window_size,
        k_scale=theirs.k_scale_float or 1.0,
        v_scale=theirs.v_scale_float or 1.0,
        sinks=sinks,
    )
