"""The graph interface: recorded once, replayed on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Graph(Protocol):
    """Something recorded once and replayed on the same memory."""

    def warm_up(self, run: Callable[[], object]) -> None:
        """Run once, unrecorded, as a capture wants it."""
        ...

    def capture(self, run: Callable[[], T]) -> T:
        """Record ``run`` and return its outputs, whose storage every replay writes to."""
        ...

    def replay(self) -> None:
        """Run the recording on whatever its inputs hold now."""
        ...


GraphFactory = Callable[[], Graph]
