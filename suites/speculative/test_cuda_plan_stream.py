"""An overlapping worker generates the same, however late a stream is; a missing wait is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from fixtures.fakes.delays import LONG, SHORT, DelayedStreams, MainForgets, PlanForgets, draw_delays
from fixtures.fakes.jitter import METHODS, jittered
from fixtures.models import shipped
from fixtures.models.shipped import Run, Setup
from fixtures.pytest_plugin.goldens import prompts
from harness.core.case import Execution
from harness.engine.plan_stream import CudaStreams, Shared

SIDES = (("plan",), ("main",), ("plan", "main"))
SEEDS = (1, 2, 3)
SETUPS = [
    Setup(pair=pair, kernel=kernel, page_size=64, overlap=True, execution=execution)
    for pair, kernel in shipped.ON_HOPPER
    for execution in Execution
]
each_setup = pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.id)


def decode(setup: Setup, streams: DelayedStreams, device: torch.device) -> Run:
    return shipped.decode(setup, prompts(setup.pair)[: setup.prompts], device, streams)


@pytest.mark.parametrize("sides", SIDES, ids="+".join)
@each_setup
def test_delays_change_nothing(setup: Setup, sides: tuple[str, ...], cuda: torch.device) -> None:
    due = shipped.run(replace(setup, overlap=False), cuda)
    found = decode(setup, DelayedStreams(cuda, draw_delays(7, sides)), cuda)
    assert found.texts == due.texts
    assert found.hazards == ()
    assert found.lost_pages == 0


def test_a_main_stream_that_forgets_to_wait_says_something_else(cuda: torch.device) -> None:
    setup = SETUPS[1]
    due = shipped.run(replace(setup, overlap=False), cuda)
    streams = MainForgets(cuda, late("plan"))
    forgot = decode(setup, streams, cuda)
    torch.cuda.synchronize(cuda)
    assert "'verify' is not ordered after 'plan verify'" in forgot.hazards[0]
    assert forgot.generations != due.texts


def late(side: str, cycles: int = 4 * LONG) -> Callable[[str], int]:
    return lambda other: cycles if other == side else 0


def turns(streams: DelayedStreams, device: torch.device) -> list[int]:
    """Of three rounds, the length that verify sees. Each adds one to it."""
    lengths, metadata = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
    found = []
    torch.cuda.synchronize(device)
    for turn in (1, 2, 3):
        streams.main("accept", lambda turn=turn: lengths.fill_(turn), writes=("lengths",))
        streams.plan_waits()
        streams.plan(
            "plan", lambda: metadata.copy_(lengths), reads=("lengths",), writes=("metadata",)
        )
        streams.main_waits()
        found.append(streams.main("verify", metadata.clone, reads=("metadata",)))
        torch.cuda.synchronize(device)
    return [int(seen) for seen in found]


@pytest.mark.parametrize("side", ["plan", "main"])
def test_whatever_is_late_is_waited_for(side: str, cuda: torch.device) -> None:
    streams = DelayedStreams(cuda, late(side))
    assert turns(streams, cuda) == [1, 2, 3]
    assert not streams.hazards()


@pytest.mark.parametrize(("kind", "side"), [(MainForgets, "plan"), (PlanForgets, "main")])
def test_every_wait_is_needed(kind: type[DelayedStreams], side: str, cuda: torch.device) -> None:
    seen = []
    for cycles in (4 * LONG, 32 * LONG, 256 * LONG):  # a busy host is late itself, and sees 1, 2, 3
        streams = kind(cuda, late(side, cycles))
        seen.append(turns(streams, cuda))
        assert streams.hazards()
        if seen[-1] == [0, 1, 2]:
            return
    pytest.fail(f"nothing was late: {seen}")


def test_delays_are_drawn_for_the_sides_that_are_late() -> None:
    for sides in SIDES:
        delay, again = draw_delays(3, sides), draw_delays(3, sides)
        turns = [(side, delay(side)) for _ in range(40) for side in ("main", "plan")]
        assert turns == [(side, again(side)) for _ in range(40) for side in ("main", "plan")]
        for side in ("main", "plan"):
            drawn = {cycles for name, cycles in turns if name == side}
            assert drawn == ({0, SHORT, LONG} if side in sides else {0})


@pytest.mark.parametrize("seed", SEEDS)
@each_setup
def test_jitter_changes_nothing(setup: Setup, seed: int, cuda: torch.device) -> None:
    # Fewer requests at a time than prompts, so that some are admitted in the midst of others.
    setup = replace(setup, max_bs=3)
    due = shipped.run(replace(setup, overlap=False), cuda)
    with jittered(seed) as called:
        found = shipped.decode(setup, prompts(setup.pair)[: setup.prompts], cuda)
        torch.cuda.synchronize(cuda)
    assert found.texts == due.texts
    assert (found.hazards, found.lost_pages) == ((), 0)
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
