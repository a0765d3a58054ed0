"""Batches, layers and EAGLE inputs of sglang, built around tensors of ours without copying them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from harness.sglang.process import load
from harness.upstream.forward_batch_info import (
    EagleDraftExtendInput,
    EagleDraftInput,
    EagleVerifyInput,
    ForwardBatch,
    ForwardMode,
)
from harness.upstream.radix_attention import RadixAttention


def _made(kind: Any, **given: Any) -> Any:
    """An object of a dataclass, from those of the arguments that this release's has."""
    known = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in given.items() if name in known})


def new_batch(batch: ForwardBatch, runner: Any, out_cache_loc: torch.Tensor | None) -> Any:
    """The ``ForwardBatch`` of sglang for a batch that is being planned.

    Args:
        batch: ours.
        runner: the stand-in of the model runner.
        out_cache_loc: in the order that sglang's worker hands over.
    """
    # What we do to hand a batch over is no effect of the backend.
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return _new_batch(batch, runner, out_cache_loc)


def _new_batch(batch: ForwardBatch, runner: Any, out_cache_loc: torch.Tensor | None) -> Any:
    info = load("srt.model_executor.forward_batch_info")
    mode = info.ForwardMode[batch.forward_mode.name]
    made = _made(
        info.ForwardBatch,
        forward_mode=mode,
        batch_size=batch.batch_size,
        input_ids=batch.input_ids,
        positions=batch.positions,
        req_pool_indices=batch.req_pool_indices,
        seq_lens=batch.seq_lens,
        out_cache_loc=out_cache_loc,
        seq_lens_cpu=batch.seq_lens_cpu,
        seq_lens_sum=batch.seq_lens_sum,
        spec_info=_spec_info(batch, runner),
        spec_algorithm=runner.spec_algorithm,
        req_to_token_pool=runner.req_to_token_pool,
        token_to_kv_pool=runner.token_to_kv_pool,
        **_extend_lens(batch),
    )
    if runner.kv_index_translator is not None and batch.batch_size:
        _bind_plan(made, runner.kv_index_translator)
    return made


def with_host_lens(batch: ForwardBatch) -> ForwardBatch:
    """The batch of a capture, whose lengths are all padding and therefore known to the host."""
    on_host = batch.seq_lens.to("cpu", torch.int64, copy=True)
    return batch.with_changes(seq_lens_cpu=on_host, seq_lens_sum=int(on_host.sum()))


def at_full_width(batch: ForwardBatch) -> ForwardBatch:
    """A draft extend v1 as ``EAGLEDraftExtendCudaGraphRunner`` captures it: all are accepted."""
    spec = batch.spec_info
    if batch.forward_mode is not ForwardMode.DRAFT_EXTEND:
        return batch
    assert isinstance(spec, EagleDraftExtendInput)
    lens = torch.full_like(spec.num_accept_tokens, spec.num_tokens_per_req)
    return batch.with_changes(spec_info=replace(spec, num_accept_tokens=lens), extend_seq_lens=lens)


def _extend_lens(batch: ForwardBatch) -> dict[str, Any]:
    """Lengths of an extend, on the device and on the host, as the worker hands them over."""
    spec = batch.spec_info
    if batch.extend_seq_lens is not None and batch.extend_seq_lens_cpu is not None:
        lens, on_host = batch.extend_seq_lens, list(batch.extend_seq_lens_cpu)
    elif isinstance(spec, EagleDraftExtendInput):
        on_host = [spec.num_tokens_per_req] * batch.batch_size
        lens = torch.full_like(batch.seq_lens, spec.num_tokens_per_req, dtype=torch.int32)
    else:
        return {}
    prefix = batch.seq_lens - lens
    return {
        "extend_seq_lens": lens,
        "extend_seq_lens_cpu": on_host,
        "extend_prefix_lens": prefix,
        "extend_prefix_lens_cpu": prefix.tolist(),
        "extend_num_tokens": sum(on_host),
    }


def _spec_info(batch: ForwardBatch, runner: Any) -> Any:
    spec, info = batch.spec_info, load("srt.speculative.eagle_info")
    modes = load("srt.model_executor.forward_batch_info").CaptureHiddenMode
    match spec:
        case EagleDraftInput():
            return _made(
                info.EagleDraftInput,
                topk_p=spec.topk_p,
                topk_index=spec.topk_index,
                hidden_states=spec.hidden_states,
                capture_hidden_mode=modes.LAST,
                num_tokens_per_req=1,
                num_tokens_per_batch=1,
                num_tokens_for_logprob_per_req=1,
                num_tokens_for_logprob_per_batch=1,
            )
        case EagleVerifyInput():
            return _made(
                info.EagleVerifyInput,
                draft_token=spec.draft_token,
                custom_mask=chain_mask(batch) if runner.masks_verify else None,
                positions=batch.positions,
                retrieve_index=None,
                retrieve_next_token=None,
                retrieve_next_sibling=None,
                retrieve_cum_len=None,
                retrive_index=None,
                retrive_next_token=None,
                retrive_next_sibling=None,
                retrive_cum_len=None,
                spec_steps=spec.draft_token_num - 1,
                topk=1,
                draft_token_num=spec.draft_token_num,
                capture_hidden_mode=modes.FULL,
                seq_lens_sum=batch.seq_lens_sum,
                seq_lens_cpu=batch.seq_lens_cpu,
            )
        case EagleDraftExtendInput():
            kind = getattr(info, "EagleDraftExtendInput", info.EagleDraftInput)
            accepted = spec.num_accept_tokens
            made = _made(
                kind,
                hidden_states=spec.hidden_states,
                num_accept_tokens=accepted,
                num_correct_drafts=accepted - 1,
                accept_length=accepted,
                num_accept_tokens_cpu=spec.num_accept_tokens_cpu,
                accept_length_cpu=spec.num_accept_tokens_cpu,
                seq_lens=batch.seq_lens,
                seq_lens_cpu=batch.seq_lens_cpu,
                req_pool_indices=batch.req_pool_indices,
                positions=batch.positions,
                num_tokens_per_req=spec.num_tokens_per_req or -1,
                num_tokens_per_batch=spec.num_tokens_per_req or -1,
            )
            # The runner of the graph sets it, and only Triton's backend reads it.
            made.extend_seq_lens_tensor = _extend_lens(batch).get("extend_seq_lens")
            return made
        case _:
            return None


def chain_mask(batch: ForwardBatch) -> torch.Tensor:
    """The mask of a draft that is a chain, as the worker hands it over.

    Returns:
        bool, the masks [draft tokens, seq_len + draft tokens] of all requests one after the other.
    """
    assert isinstance(batch.spec_info, EagleVerifyInput)
    width = batch.spec_info.draft_token_num
    query = torch.arange(width)[:, None]
    masks = [torch.arange(n + width) <= n + query for n in batch.seq_lens.tolist()]
    flat = torch.cat([torch.zeros(0, dtype=torch.bool), *(mask.flatten() for mask in masks)])
    return flat.to(batch.seq_lens.device)


def _bind_plan(made: Any, translator: Any) -> None:
    """The write plan of one iteration, as ``ForwardBatch.init_new`` binds it."""
    if hasattr(translator, "own_plan"):
        translator.own_plan(made).bind(made, translator)


def served_batch(planned: Any, batch: ForwardBatch) -> Any:
    """The planned batch with the tensors that one forward runs on; nothing is copied."""
    served = load("srt.model_executor.forward_batch_info").ForwardBatch.__new__(type(planned))
    served.__dict__.update(planned.__dict__)
    served.input_ids = batch.input_ids
    served.positions = batch.positions
    served.out_cache_loc = batch.out_cache_loc
    served.seq_lens = batch.seq_lens
    served.req_pool_indices = batch.req_pool_indices
    served.batch_size = batch.batch_size
    return served


def new_layer(layer: RadixAttention, device: torch.device | str) -> Any:
    """The ``RadixAttention`` of sglang, its scales on the device."""
    made = load("srt.layers.radix_attention").RadixAttention(
        num_heads=layer.tp_q_head_num,
        head_dim=layer.head_dim,
        scaling=layer.scaling,
        num_kv_heads=layer.tp_k_head_num,
        layer_id=layer.layer_id,
        v_head_dim=layer.v_head_dim,
        sliding_window_size=layer.sliding_window_size,
    )
    if layer.k_scale != 1 or layer.v_scale != 1:
        scales = torch.tensor([[layer.k_scale], [layer.v_scale]], device=device)
        made.k_scale, made.v_scale = scales
        made.k_scale_float, made.v_scale_float = layer.k_scale, layer.v_scale
    return made


__all__ = ["ForwardMode", "new_batch", "new_layer", "served_batch"]
