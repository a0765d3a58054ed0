"""Forward batches as a worker hands them to a backend, with DP padding where the case has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from harness.core.case import Mode
from harness.differential.input_types import BatchInputs
from harness.differential.pool_state import PoolState
from harness.upstream.forward_batch_info import (
    EagleDraftExtendInput,
    EagleDraftInput,
    EagleVerifyInput,
    ForwardBatch,
    ForwardMode,
    SpecInput,
)

FORWARD_MODES = {
    Mode.EXTEND: ForwardMode.EXTEND,
    Mode.DECODE: ForwardMode.DECODE,
    Mode.MULTI_STEP_DRAFT: ForwardMode.DECODE,
    Mode.TARGET_VERIFY: ForwardMode.TARGET_VERIFY,
    Mode.DRAFT_EXTEND: ForwardMode.DRAFT_EXTEND,
    Mode.DRAFT_EXTEND_V2: ForwardMode.DRAFT_EXTEND_V2,
    Mode.IDLE: ForwardMode.IDLE,
}


def make_batch(
    pool_state: PoolState, batch_inputs: BatchInputs, *, host_lengths: bool = False
) -> ForwardBatch:
    """The batch of these requests.

    Args:
        pool_state: pools it reads and writes.
        batch_inputs: its requests.
        host_lengths: whether it carries lengths on the host too.
    """
    case, device = batch_inputs.case, pool_state.device
    advanced = case.mode not in (Mode.TARGET_VERIFY, Mode.MULTI_STEP_DRAFT)
    seq_lens = torch.tensor(case.total_lens if advanced else case.prefix_lens, dtype=torch.int64)
    ranges = [torch.arange(s, e) for s, e in zip(case.prefix_lens, case.total_lens, strict=True)]
    new_slots = batch_inputs.new_slots
    if case.mode is Mode.MULTI_STEP_DRAFT:
        new_slots = [list(step) for step in zip(*new_slots, strict=True)]
    ragged = case.mode in (Mode.EXTEND, Mode.DRAFT_EXTEND)
    return ForwardBatch(
        forward_mode=FORWARD_MODES[case.mode],
        batch_size=case.bs,
        input_ids=_cat(batch_inputs.new_tokens, device),
        positions=_cat(ranges, device),
        req_pool_indices=torch.tensor(
            batch_inputs.req_pool_indices, dtype=torch.int64, device=device
        ),
        seq_lens=seq_lens.to(device),
        out_cache_loc=_cat([torch.tensor(own, dtype=torch.int64) for own in new_slots], device),
        req_to_token_pool=pool_state.req_to_token_pool,
        token_to_kv_pool=pool_state.token_to_kv_pool,
        seq_lens_cpu=seq_lens if host_lengths else None,
        seq_lens_sum=int(seq_lens.sum()) if host_lengths else None,
        extend_seq_lens=torch.tensor(case.q_lens, dtype=torch.int32, device=device)
        if ragged
        else None,
        extend_seq_lens_cpu=list(case.q_lens) if ragged else None,
        spec_info=_spec_info(pool_state, batch_inputs),
    )


def _cat(parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts]).to(device)


def _spec_info(pool_state: PoolState, batch_inputs: BatchInputs) -> SpecInput | None:
    case, device = batch_inputs.case, pool_state.device
    hidden = None
    if batch_inputs.hidden_in is not None:
        # A copy: a backend may write to it, and trials of a row share what was drawn.
        dtype = getattr(torch, case.dtype)
        hidden = batch_inputs.hidden_in.to(device=device, dtype=dtype, copy=True)
    match case.mode:
        case Mode.MULTI_STEP_DRAFT:
            first = torch.stack([tokens[:1] for tokens in batch_inputs.new_tokens]).to(device)
            return EagleDraftInput(
                first, torch.ones_like(first, dtype=torch.float32), hidden, case.num_steps
            )
        case Mode.TARGET_VERIFY:
            return EagleVerifyInput(_cat(batch_inputs.new_tokens, device), case.num_draft_tokens)
        case Mode.DRAFT_EXTEND | Mode.DRAFT_EXTEND_V2:
            v2 = case.mode is Mode.DRAFT_EXTEND_V2
            return EagleDraftExtendInput(
                hidden_states=hidden,
                num_accept_tokens=torch.tensor(case.accept_lens, dtype=torch.int32, device=device),
                num_accept_tokens_cpu=None if v2 else list(case.accept_lens),
                num_tokens_per_req=case.num_draft_tokens if v2 else 0,
            )
        case _:
            return None


def pad_batch(batch: ForwardBatch, rows: int, width: int) -> ForwardBatch:
    """The batch after DP padding: ``rows`` query tokens after the planned ones.

    Args:
        batch: a planned batch.
        rows: query tokens to add; not necessarily a multiple of ``width``.
        width: query tokens per request in one forward.
    """
    padded_requests = -(-rows // width)
    spec, cache_loc = batch.spec_info, _longer(batch.out_cache_loc, rows)
    if isinstance(spec, EagleDraftExtendInput) and spec.hidden_states is not None:
        spec = replace(spec, hidden_states=_longer(spec.hidden_states, rows))
    if isinstance(spec, EagleVerifyInput):
        spec = replace(spec, draft_token=_longer(spec.draft_token, rows))
    if isinstance(spec, EagleDraftInput):
        steps = batch.out_cache_loc.view(-1, batch.batch_size)
        cache_loc = torch.cat((steps, steps.new_zeros(len(steps), rows)), 1).flatten()
        spec = replace(
            spec,
            topk_index=_longer(spec.topk_index, rows),
            topk_p=_longer(spec.topk_p, rows),
            hidden_states=None if spec.hidden_states is None else _longer(spec.hidden_states, rows),
        )
    return batch.with_changes(
        batch_size=batch.batch_size + padded_requests,
        input_ids=_longer(batch.input_ids, rows),
        positions=_longer(batch.positions, rows),
        out_cache_loc=cache_loc,
        req_pool_indices=_longer(batch.req_pool_indices, padded_requests),
        seq_lens=_longer(batch.seq_lens, padded_requests),
        spec_info=spec,
    )


def _longer(x: torch.Tensor, count: int) -> torch.Tensor:
    return torch.cat((x, x.new_zeros(count, *x.shape[1:])))
