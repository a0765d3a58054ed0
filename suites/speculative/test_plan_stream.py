"""Accesses of two queues in no certain order are reported by name, ordered ones are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from harness.engine.hazards import Hazard
from harness.engine.plan_stream import CudaStreams, PlanStream, RecordedStreams, SameStream


def nothing() -> None:
    """The work of an operation whose order alone matters."""


def produce_then_cast(streams: RecordedStreams) -> None:
    streams.main("accept", nothing, writes=("accept_lens",))
    streams.plan("cast accept_lens", nothing, reads=("accept_lens",))


def cast_then_produce(streams: RecordedStreams) -> None:
    streams.plan("cast accept_lens", nothing, reads=("accept_lens",))
    streams.main_waits()
    streams.main("accept", nothing, writes=("accept_lens",))


def rewrite_what_is_being_read(streams: RecordedStreams) -> None:
    streams.plan("plan verify", nothing, reads=("req_to_token",))
    streams.main("reserve", nothing, writes=("req_to_token",))


def write_twice(streams: RecordedStreams) -> None:
    streams.plan("plan verify", nothing, writes=("metadata",))
    streams.main("plan extend", nothing, writes=("metadata",))


def forget_to_wait_for_the_plan(streams: RecordedStreams) -> None:
    streams.plan("plan verify", nothing, writes=("metadata",))
    streams.main("verify", nothing, reads=("metadata",))


def wait_too_early(streams: RecordedStreams) -> None:
    streams.plan_waits()
    streams.main("accept", nothing, writes=("accept_lens",))
    streams.plan("cast accept_lens", nothing, reads=("accept_lens",))


RACES: dict[Callable[[RecordedStreams], None], list[Hazard]] = {
    produce_then_cast: [Hazard("RAW", "accept", "cast accept_lens", "accept_lens")],
    cast_then_produce: [Hazard("RAW", "accept", "cast accept_lens", "accept_lens")],
    rewrite_what_is_being_read: [
        Hazard("RAW", "reserve", "plan verify", "req_to_token"),
        Hazard("WAR", "plan verify", "reserve", "req_to_token"),
    ],
    write_twice: [Hazard("WAW", "plan verify", "plan extend", "metadata")],
    forget_to_wait_for_the_plan: [Hazard("RAW", "plan verify", "verify", "metadata")],
    wait_too_early: [Hazard("RAW", "accept", "cast accept_lens", "accept_lens")],
}


@pytest.mark.parametrize("race", RACES, ids=lambda race: race.__name__)
def test_a_race_is_reported_by_name(race: Callable[[RecordedStreams], None]) -> None:
    streams = RecordedStreams()
    race(streams)
    assert streams.hazards() == RACES[race]


def test_a_hazard_reads_as_a_sentence() -> None:
    streams = RecordedStreams()
    produce_then_cast(streams)
    said = "RAW on accept_lens: 'cast accept_lens' is not ordered after 'accept'"
    assert [str(hazard) for hazard in streams.hazards()] == [said]


def test_waits_order_both_ways() -> None:
    streams = RecordedStreams()
    streams.main("prefill", nothing, writes=("lens",))
    for _ in range(2):
        streams.main("lay out", nothing, reads=("lens",), writes=("batch",))
        streams.plan_waits()
        streams.plan("plan", nothing, reads=("batch",), writes=("metadata",))
        streams.main("draft", nothing, reads=("lens",), writes=("chain",))
        streams.main_waits()
        streams.main("verify", nothing, reads=("metadata", "chain"), writes=("lens",))
    assert streams.hazards() == []


def test_a_queue_needs_no_wait_for_itself() -> None:
    streams = RecordedStreams()
    for queue in (streams.main, streams.plan):
        queue("write", nothing, writes=(queue.__name__,))
        queue("read", nothing, reads=(queue.__name__,))
    assert streams.hazards() == []


@pytest.mark.parametrize(
    ("streams", "order"),
    [
        (RecordedStreams(late=True), ["draft", "plan", "verify"]),
        (RecordedStreams(late=False), ["plan", "draft", "verify"]),
        (SameStream(), ["draft", "plan", "verify"]),
    ],
    ids=["late", "early", "same"],
)
def test_the_plan_runs_as_late_or_as_early_as_its_waits_allow(
    streams: PlanStream, order: list[str]
) -> None:
    ran: list[str] = []
    streams.plan_waits()
    streams.plan("plan", lambda: ran.append("plan"))
    assert streams.main("draft", lambda: ran.append("draft") or 7) == 7
    streams.main_waits()
    streams.main("verify", lambda: ran.append("verify"))
    streams.main_waits()
    assert ran == order
    if isinstance(streams, RecordedStreams):
        assert streams.ran == order


class FakeStream:
    """Records which stream waits for which."""

    def __init__(self, name: str) -> None:
        self.name, self.device, self.waited = name, "cuda:0", list[str]()

    def wait_stream(self, other: FakeStream) -> None:
        """Record the wait."""
        self.waited.append(other.name)


def test_cuda_streams_wait_for_each_other_the_right_way_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    main, plan = FakeStream("main"), FakeStream("plan")
    entered: list[FakeStream] = [main]

    @contextmanager
    def inside(stream: FakeStream) -> Iterator[None]:
        entered.append(stream)
        yield
        entered.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: plan)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: entered[-1])
    monkeypatch.setattr(torch.cuda, "stream", inside)
    streams, ran = CudaStreams("cuda:0"), list[str]()
    streams.plan_waits()
    assert (main.waited, plan.waited) == ([], ["main"])
    streams.plan("plan", lambda: ran.append(entered[-1].name))
    assert streams.main("draft", lambda: entered[-1].name) == "main"
    streams.main_waits()
    assert (main.waited, plan.waited) == (["plan"], ["main"])
    assert ran == ["plan"]
