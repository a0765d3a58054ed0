"""What a scheduler drives, speculative or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from harness.engine.batch_state import BatchState, StepOutput
from harness.engine.plan_stream import PlanStream


class Worker(Protocol):
    """Computes prompts and rounds; every request of a state takes part in a round."""

    @property
    def headroom(self) -> int:
        """Tokens a round may write behind the committed ones."""
        ...

    @property
    def streams(self) -> PlanStream:
        """The queues the worker issues to."""
        ...

    def prefill(
        self, prompts: Sequence[Sequence[int]], rows: list[int], cached: Sequence[int] = ()
    ) -> BatchState:
        """Compute prompts into reserved pages of request rows; without prompts, run idle."""
        ...

    def step(self, state: BatchState) -> tuple[BatchState, StepOutput]:
        """One round of every request; without requests, run idle."""
        ...
