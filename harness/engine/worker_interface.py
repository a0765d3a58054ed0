"""The interface of workers, speculative or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from harness.engine.batch_state import BatchState, StepOutput
from harness.engine.plan_stream import PlanStream


class Worker(Protocol):
    """Prefills prompts and runs rounds over all requests of a batch state."""

    @property
    def headroom(self) -> int:
        """Most tokens that a round writes after the committed ones."""
        ...

    @property
    def streams(self) -> PlanStream:
        """The queues of the worker's operations."""
        ...

    def prefill(
        self, prompts: Sequence[Sequence[int]], rows: list[int], cached: Sequence[int]
    ) -> BatchState:
        """Compute prompts into reserved pages of request rows; without prompts, run idle."""
        ...

    def step(self, state: BatchState) -> tuple[BatchState, StepOutput]:
        """One round of every request; without requests, run idle."""
        ...
