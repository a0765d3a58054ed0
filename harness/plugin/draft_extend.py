"""Draft extend under a CUDA graph, on sglang's own runner for it.

sglang captures draft extend for backends that it lists (``EagleDraftWorker._capture_cuda_graphs``),
and records a choice of tokens after it that ``execute`` drops.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from harness.plugin.backend import PluginBackend


class WithoutArgmax(TorchFunctionMode):
    """Leaves out ``torch.argmax`` over the vocabulary; its result is undefined."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.argmax:
            logits = args[0]
            return logits.new_empty((*logits.shape[:-1], 1), dtype=torch.int64)
        return func(*args, **(kwargs or {}))


def capture_draft_extend(original: Callable[..., None], worker: Any) -> None:
    """Around ``EagleDraftWorker._capture_cuda_graphs``: capture draft extend for ours, too."""
    original(worker)
    ours = isinstance(worker.draft_extend_attn_backend, PluginBackend)
    if (
        not ours
        or worker.server_args.disable_cuda_graph
        or worker.cuda_graph_runner_for_draft_extend is not None
    ):
        return
    from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import (
        EAGLEDraftExtendCudaGraphRunner,
    )

    worker.cuda_graph_runner_for_draft_extend = EAGLEDraftExtendCudaGraphRunner(worker)


def capture_one_shape(
    original: Callable[..., None], runner: Any, *args: Any, **kwargs: Any
) -> None:
    """Around the capture of one batch size: without the choice that nobody reads."""
    backend = runner.attn_backend
    needless = isinstance(backend, PluginBackend) and not backend.has_dead_topk
    with WithoutArgmax() if needless else nullcontext():
        original(runner, *args, **kwargs)
