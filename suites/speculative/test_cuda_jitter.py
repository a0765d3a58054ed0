"""An overlapping engine says the same however late its streams are around records and waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from fixtures.fakes.jitter import METHODS, jittered
from fixtures.models import shipped
from fixtures.models.shipped import Setup
from fixtures.pytest_plugin.goldens import prompts
from harness.core.case import Execution
from harness.engine.plan_stream import CudaStreams, Shared

SEEDS = (1, 2, 3)
# Fewer requests at a time than prompts, so that some are admitted in the midst of others.
SETUPS = [
    Setup(pair=pair, kernel=kernel, page_size=64, overlap=True, execution=execution, max_bs=3)
    for pair, kernel in (("gqa", "xqa"), ("mla", "flash_mla"))
    for execution in Execution
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.id)
def test_jitter_changes_nothing(setup: Setup, seed: int, cuda: torch.device) -> None:
    due = shipped.run(replace(setup, overlap=False), cuda)
    with jittered(seed) as called:
        late = shipped.decode(setup, prompts(setup.pair)[: setup.prompts], cuda)
        torch.cuda.synchronize(cuda)
    assert late.texts == due.texts
    assert (late.hazards, late.lost_pages) == ((), 0)
    assert all(called[name] > len(due.texts) for name in METHODS)


class SchedulerForgets(CudaStreams):
    """The scheduler waits for nobody."""

    def schedule(self, name: str, work: Callable[[], None], *, writes: Shared) -> None:
        """Launch on the scheduler's stream."""
        with torch.cuda.stream(self._scheduler):
            work()


def planned_before(streams: CudaStreams, seed: int, device: torch.device) -> bool:
    """Whether a plan, jittered, read a table as it was before the scheduler wrote it."""
    table, metadata = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))

    def plan() -> None:
        metadata.copy_(table)

    def admit() -> None:
        table.fill_(1)

    torch.cuda.synchronize(device)
    with jittered(seed):
        streams.plan_waits()
        streams.plan("plan", plan, reads=("table",))
        streams.main_waits()
        streams.schedule("admit", admit, writes={"table": table})
    torch.cuda.synchronize(device)
    return not metadata.any()


@pytest.mark.parametrize(("kind", "is_right"), [(CudaStreams, True), (SchedulerForgets, False)])
def test_jitter_reveals_a_scheduler_that_does_not_wait(
    kind: type[CudaStreams], is_right: bool, cuda: torch.device
) -> None:
    streams = kind(cuda)
    assert all(planned_before(streams, seed, cuda) for seed in range(20)) is is_right
