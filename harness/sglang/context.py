"""The process-wide context that sglang's backends read: server arguments, ranks, the GPU."""

from __future__ import annotations

from typing import Any

import torch

from harness.core.case import Case, Mode
from harness.sglang import module_globals, runtime_context
from harness.sglang.gpu import run_on
from harness.sglang.process import active
from harness.sglang.triton_attention import interpret

XQA = "xqa"
INTERPRETED = "interpreted"
SM90_KERNELS = frozenset({XQA, "flashinfer", "triton", INTERPRETED})


def server_arguments(case: Case, backend: str) -> dict[str, Any]:
    """What a server that runs this case on this backend was started with."""
    drafts = case.mode is Mode.MULTI_STEP_DRAFT
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
        # With topk 1 a server drafts one token less than it verifies.
        "speculative_num_steps": case.num_steps if drafts else case.num_draft_tokens - 1,
        "speculative_num_draft_tokens": case.num_draft_tokens,
    }


def publish(case: Case, backend: str, kernel: str, device: torch.device | str) -> Any:
    """Publish the context of one trial in place of the last one's; returns the server arguments.

    Which GPU it is, sglang asks CUDA where there is one.
    """
    release = active()
    if torch.device(device).type == "cpu":
        generation = "sm90" if kernel in SM90_KERNELS else "sm100"
        run_on(generation)
        interpret(kernel == INTERPRETED)
        if release.has_platform:
            runtime_context.publish_platform(generation)
    if release.has_parallel_context:
        runtime_context.publish_ranks()
    else:
        module_globals.publish_ranks()
    arguments = server_arguments(case, backend)
    if release.has_runtime_context:
        return runtime_context.publish_server_arguments(arguments)
    return module_globals.publish_server_arguments(arguments)
