"""An overlapping worker generates the same, however late a stream is; a missing wait is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from fixtures.fakes.delays import LONG, SHORT, DelayedStreams, MainForgets, PlanForgets, draw_delays
from fixtures.models import shipped
from fixtures.models.shipped import Run, Setup
from fixtures.pytest_plugin.goldens import prompts
from harness.core.case import Execution

SIDES = (("plan",), ("main",), ("plan", "main"))
SETUPS = [
    Setup(pair=pair, kernel=kernel, page_size=64, overlap=True, execution=execution)
    for pair, kernel in (("gqa", "xqa"), ("mla", "flash_mla"))
    for execution in Execution
]
each_setup = pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.id)


def decode(setup: Setup, streams: DelayedStreams, device: torch.device) -> Run:
    return shipped.decode(setup, prompts(setup.pair)[: setup.prompts], device, streams)


@pytest.mark.parametrize("sides", SIDES, ids="+".join)
@each_setup
def test_delays_change_nothing(setup: Setup, sides: tuple[str, ...], cuda: torch.device) -> None:
    due = shipped.run(replace(setup, overlap=False), cuda)
    late = decode(setup, DelayedStreams(cuda, draw_delays(7, sides)), cuda)
    assert late.texts == due.texts
    assert late.hazards == ()
    assert late.lost_pages == 0


def test_a_main_stream_that_forgets_to_wait_says_something_else(cuda: torch.device) -> None:
    setup = SETUPS[1]
    due = shipped.run(replace(setup, overlap=False), cuda)
    streams = MainForgets(cuda, late_plan)
    forgot = decode(setup, streams, cuda)
    torch.cuda.synchronize(cuda)
    assert "'verify' is not ordered after 'plan verify'" in forgot.hazards[0]
    assert forgot.generations != due.texts


def late_plan(side: str) -> int:
    return 4 * LONG if side == "plan" else 0


def late_main(side: str) -> int:
    return 4 * LONG if side == "main" else 0


@pytest.mark.parametrize(
    ("kind", "delay", "seen"),
    [
        (DelayedStreams, late_plan, [1, 2, 3]),
        (DelayedStreams, late_main, [1, 2, 3]),
        (MainForgets, late_plan, [0, 1, 2]),
        (PlanForgets, late_main, [0, 1, 2]),
    ],
)
def test_every_wait_is_needed(
    kind: type[DelayedStreams], delay: Callable[[str], int], seen: list[int], cuda: torch.device
) -> None:
    lengths, metadata = (torch.zeros(1, dtype=torch.int64, device=cuda) for _ in range(2))
    streams, found = kind(cuda, delay), []
    torch.cuda.synchronize(cuda)
    for turn in (1, 2, 3):
        streams.main("accept", lambda turn=turn: lengths.fill_(turn), writes=("lengths",))
        streams.plan_waits()
        streams.plan(
            "plan", lambda: metadata.copy_(lengths), reads=("lengths",), writes=("metadata",)
        )
        streams.main_waits()
        found.append(streams.main("verify", metadata.clone, reads=("metadata",)))
        torch.cuda.synchronize(cuda)
    assert torch.cat(found).tolist() == seen
    assert bool(streams.hazards()) is (kind is not DelayedStreams)


def test_delays_are_drawn_for_the_sides_that_are_late() -> None:
    for sides in SIDES:
        delay, again = draw_delays(3, sides), draw_delays(3, sides)
        turns = [(side, delay(side)) for _ in range(40) for side in ("main", "plan")]
        assert turns == [(side, again(side)) for _ in range(40) for side in ("main", "plan")]
        for side in ("main", "plan"):
            drawn = {cycles for name, cycles in turns if name == side}
            assert drawn == ({0, SHORT, LONG} if side in sides else {0})
