"""Operations behind ``torch.library`` that a capture need not compute, as CUDA's does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SHAPES: dict[object, Callable[..., Any]] = {}
"""Of each such operation: makes results of its shapes, uninitialised."""
