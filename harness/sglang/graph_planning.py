"""Planning of a graph: in three phases, or by the pair of capture and replay that they replaced."""

from __future__ import annotations

from typing import Any

from harness.sglang.process import active


def plan_out_of_graph(theirs: Any, batch: Any, in_capture: bool) -> None:
    """The host side of planning, before a capture or a replay.

    Args:
        theirs: a backend of sglang, or its multi-step draft backend.
        batch: sglang's, padded.
        in_capture: whether a capture follows.
    """
    if active().plans_in_three_phases:
        theirs.init_forward_metadata_out_graph(batch, in_capture=in_capture)
    elif hasattr(theirs, "attn_backends"):
        if in_capture:
            theirs.init_forward_metadata_capture_cuda_graph(batch)
            for step in theirs.attn_backends:
                _fill_lengths(step, 1)
        else:
            theirs.init_forward_metadata_replay_cuda_graph(batch, batch.batch_size)
    elif in_capture:
        theirs.init_forward_metadata_capture_cuda_graph(
            batch.batch_size,
            len(batch.positions),
            batch.req_pool_indices,
            batch.seq_lens,
            None,
            batch.forward_mode,
            batch.spec_info,
        )
        _fill_lengths(theirs, len(batch.positions) // batch.batch_size)
    else:
        theirs.init_forward_metadata_replay_cuda_graph(
            batch.batch_size,
            batch.req_pool_indices,
            batch.seq_lens,
            batch.seq_lens_sum,
            None,
            batch.forward_mode,
            batch.spec_info,
            batch.seq_lens_cpu,
        )


def _fill_lengths(theirs: Any, least: int) -> None:
    """Lengths for the warm-up: the older capture leaves zeros, which the reference refuses."""
    plan = getattr(theirs, "forward_metadata", None)
    lens, bounds = (getattr(plan, name, None) for name in ("cache_seqlens_int32", "cu_seqlens_k"))
    if lens is not None and bounds is not None:
        lens.clamp_(min=least)
        bounds[1:].copy_(lens.cumsum(0))


def plan_in_graph(theirs: Any, batch: Any) -> None:
    """The device side of planning, recorded; the older pair has none."""
    if active().plans_in_three_phases:
        theirs.init_forward_metadata_in_graph(batch)


def needs_host_lens(theirs: Any) -> bool:
    """Whether a scheduler reads lengths back for this backend; without a word, it does."""
    return bool(getattr(theirs, "needs_cpu_seq_lens", True))


def undo_warmup(theirs: Any) -> None:
    """What follows a warm-up, where the backend has such a hook."""
    hook = getattr(theirs, "on_after_cuda_graph_warmup", None)
    if hook is not None:
        hook()
