"""The context as newer releases keep it: ``sglang.srt.runtime_context``."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from harness.sglang.process import load

RANKS = {"attn_tp_size": 1, "attn_cp_size": 1, "attn_dcp_rank": 0}
# An override of ranks undoes itself when it is collected.
_ranks: list[AbstractContextManager[Any]] = []
_platform: list[Any] = []
_arguments: list[Any] = []


def publish_ranks() -> None:
    """One rank in every group that this release has."""
    if not _ranks:
        parallel = load("srt.runtime_context").get_parallel()
        known = {name: rank for name, rank in RANKS.items() if hasattr(type(parallel), name)}
        _ranks.append(parallel.override(**known))
        _ranks[0].__enter__()


def publish_platform(generation: str) -> None:
    """The GPU that ``get_platform`` tells of."""
    facts = {f"is_{name}": name == generation for name in ("sm90", "sm100", "sm120")}
    _replace(_platform, load("srt.runtime_context").override_platform(**facts))


def publish_server_arguments(arguments: dict[str, Any]) -> Any:
    """The published arguments."""
    override = load("srt.runtime_context").get_context().override_server_args
    return _replace(_arguments, override(**arguments))


def _replace(held: list[Any], override: Any) -> Any:
    while held:
        held.pop().restore()
    held.append(override)
    return override.install()
