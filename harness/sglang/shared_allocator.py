"""The allocator that a draft worker shares with its target, whose layers may have another pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from harness.core.case import Case, Family
from harness.sglang.process import load


def new_allocator(case: Case, pool: Any, is_draft_worker: bool) -> Any:
    """The target's allocator: with an SWA pool where the model has one, or has a target with one.

    Every second draft with full attention has such a target.

    Args:
        case: its seed decides.
        pool: of the model that runs.
        is_draft_worker: whether that is the draft model.
    """
    if case.window_left >= 0:
        return _with_swa(case, pool)
    if is_draft_worker and case.family is Family.MHA and case.seed % 2:
        return _with_swa(case, _target_pool(case, pool))
    return SimpleNamespace(page_size=case.page_size, get_kvcache=lambda: pool)


def _target_pool(case: Case, pool: Any) -> Any:
    """The pool of a target with SWA layers, whose mapping is no identity."""
    module = load("srt.mem_cache.swa_memory_pool")
    target = module.SWAKVPool.__new__(module.SWAKVPool)
    target.full_to_swa_index_mapping = torch.arange(
        pool.size + case.page_size, device=pool.device
    ).flip(0)
    target.layers_mapping = {i: (i // 2, bool(i % 2)) for i in range(case.num_layers)}
    target.page_size = case.page_size
    return target


def _with_swa(case: Case, pool: Any) -> Any:
    """The allocator of an SWA pool."""
    module = load("srt.mem_cache.swa_memory_pool")
    if not hasattr(module, "SWATokenToKVPoolAllocator"):  # moved in 0.5.13
        module = load("srt.mem_cache.allocator.swa")
    allocator = module.SWATokenToKVPoolAllocator
    made = allocator.__new__(allocator)
    made._kvcache, made.page_size = pool, case.page_size
    return made
