"""The context as releases before ``runtime_context`` keep it: globals of several modules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from harness.sglang.process import load


def publish_ranks() -> None:
    """One rank in every group."""
    groups = load("srt.distributed.parallel_state")
    for name in ("_TP", "_ATTN_TP", "_ATTN_CP"):
        setattr(groups, name, SimpleNamespace(world_size=1, rank_in_group=0))


def publish_server_arguments(arguments: dict[str, Any]) -> Any:
    """The published arguments; those of a "dummy" model are taken as they are."""
    module = load("srt.server_args")
    published = module.ServerArgs(model_path="dummy")
    vars(published).update(arguments)
    module.set_global_server_args_for_scheduler(published)
    return published
