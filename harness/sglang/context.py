"""The process-wide context that sglang's backends read: server arguments, ranks, the platform."""

from __future__ import annotations

from typing import Any

from harness.core.case import Case
from harness.sglang.process import load

SM90_KERNELS = frozenset({"xqa", "flashinfer", "triton"})
_held: list[Any] = []


def server_arguments(case: Case, backend: str) -> dict[str, Any]:
    """What a server that runs this case on this backend was started with."""
    return {
        "attention_backend": backend,
        "chunked_prefill_size": -1,
        "disable_chunked_prefix_cache": True,
        # Absorbed MLA, which our rows are, in every prefill.
        "flashinfer_mla_disable_ragged": True,
        "triton_attention_num_kv_splits": 2,
        "kv_cache_dtype": "auto",
        "page_size": case.page_size,
        "speculative_algorithm": "EAGLE",
        "speculative_eagle_topk": 1,
        "speculative_num_steps": case.num_steps,
        "speculative_num_draft_tokens": case.num_draft_tokens,
    }


def publish(case: Case, backend: str, kernel: str) -> Any:
    """Publish the context of one trial in place of the last one's; returns the server arguments."""
    runtime = load("srt.runtime_context")
    if not _held:
        ranks = runtime.get_parallel().override(attn_tp_size=1, attn_dcp_rank=0)
        # Kept: the override undoes itself when it is collected.
        ranks.__enter__()
        _held.append(ranks)
    while len(_held) > 1:
        _held.pop().restore()
    on_sm90 = kernel in SM90_KERNELS
    platform = runtime.override_platform(is_sm90=on_sm90, is_sm100=not on_sm90, is_sm120=False)
    platform.install()
    arguments = runtime.get_context().override_server_args(**server_arguments(case, backend))
    published = arguments.install()
    _held.extend((platform, arguments))
    return published
