"""The GPU that sglang believes to run on, which decides the kernels that it chooses."""

from __future__ import annotations

from collections.abc import Callable

# Of each trial: its kernel says on which GPU a server would have chosen it.
_generation = "sm100"


def run_on(generation: str) -> None:
    """Answer every question from now on as that GPU does: ``sm90`` or ``sm100``."""
    global _generation
    _generation = generation


def is_supported(generation: str) -> Callable[..., bool]:
    """What stands in for ``is_sm90_supported`` and its like."""
    return lambda *_: generation == _generation
