"""Accesses of queues in no certain order are reported by name, ordered ones are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from harness.engine.hazards import Hazard, Queue
from harness.engine.plan_stream import CudaStreams, PlanStream, RecordedStreams, SameStream
from harness.errors import ContractError

TABLE = {"table": torch.zeros(2)}


def nothing() -> None:
    """The work of an operation whose order alone matters."""


def produce_then_cast(streams: RecordedStreams) -> None:
    streams.main("accept", nothing, writes=("accept_lens",))
    streams.plan("cast accept_lens", nothing, reads=("accept_lens",))


def cast_then_produce(streams: RecordedStreams) -> None:
    streams.plan("cast accept_lens", nothing, reads=("accept_lens",))
    streams.main_waits()
    streams.main("accept", nothing, writes=("accept_lens",))


def cast_before_two_that_produce(streams: RecordedStreams) -> None:
    cast_then_produce(streams)
    streams.main("accept once more", nothing, writes=("accept_lens",))


def update_what_nobody_wrote(streams: RecordedStreams) -> None:
    streams.main("accept", nothing, reads=("lens",), writes=("lens",))
    streams.main("accept again", nothing, reads=("lens",), writes=("lens",))


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


def schedule_ahead_of_a_reader(streams: RecordedStreams) -> None:
    streams.main("draft", nothing, reads=("table",), reads_ended=True)
    streams.schedule("reserve", nothing, writes=TABLE)


def schedule_ahead_of_a_reader_between(streams: RecordedStreams) -> None:
    streams.main("plan extend", nothing)
    streams.main("extend", nothing, reads_ended=True)
    streams.main("next", nothing, reads=("table",), reads_ended=True)
    streams.schedule("reserve", nothing, writes=TABLE)


RACES: dict[Callable[[RecordedStreams], None], list[Hazard]] = {
    produce_then_cast: [Hazard("RAW", "accept", "cast accept_lens", "accept_lens")],
    cast_then_produce: [Hazard("RAW", "accept", "cast accept_lens", "accept_lens")],
    cast_before_two_that_produce: [Hazard("RAW", "accept", "cast accept_lens", "accept_lens")],
    update_what_nobody_wrote: [Hazard("RAW", "accept", "accept", "lens")],
    rewrite_what_is_being_read: [
        Hazard("RAW", "reserve", "plan verify", "req_to_token"),
        Hazard("WAR", "plan verify", "reserve", "req_to_token"),
    ],
    write_twice: [Hazard("WAW", "plan verify", "plan extend", "metadata")],
    forget_to_wait_for_the_plan: [Hazard("RAW", "plan verify", "verify", "metadata")],
    schedule_ahead_of_a_reader: [
        Hazard("RAW", "reserve", "draft", "table"),
        Hazard("WAR", "draft", "reserve", "table"),
    ],
    schedule_ahead_of_a_reader_between: [
        Hazard("RAW", "reserve", "next", "table"),
        Hazard("WAR", "next", "reserve", "table"),
    ],
    wait_too_early: [Hazard("RAW", "accept", "cast accept_lens", "accept_lens")],
}


@pytest.mark.parametrize("race", RACES, ids=lambda race: race.__name__)
def test_a_race_is_reported_by_name(race: Callable[[RecordedStreams], None]) -> None:
    streams = RecordedStreams()
    race(streams)
    found = streams.hazards()
    false = [str(hazard) for hazard in found if hazard not in RACES[race]]
    assert not false, f"no race is reported where one operation waits for another: {false}"
    missed = [str(hazard) for hazard in RACES[race] if hazard not in found]
    assert not missed, f"accesses that no wait puts in order are reported as races: missed {missed}"
    said = "each race is reported once, in the order of its later operation"
    assert found == RACES[race], f"{said}: {[str(hazard) for hazard in found]}"


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


def test_the_scheduler_waits_for_the_last_main_operation_that_may_read() -> None:
    streams, waited = RecordedStreams(), []
    for name, reads_ended in (("a", False), ("b", True), ("c", True), ("d", False), ("e", True)):
        streams.main(name, nothing, reads_ended=reads_ended)
        streams.schedule(f"after {name}", nothing, writes=TABLE)
        waited.append(streams.issued[-1].after[Queue.MAIN])
    # Waits add up, so the third need not be told again of the first.
    said = "a wait for shared reads is one for the last operation that may read, for none after it"
    assert waited == [1, 1, 1, 4, 4], f"{said}: a scheduler that runs ahead must not seem to wait"
    main = [operation for operation in streams.issued if operation.queue is Queue.MAIN]
    assert [operation.after.get(Queue.SCHEDULE, 0) for operation in main] == [0, 1, 2, 3, 4]


def test_a_wait_is_for_what_was_waited_for_too() -> None:
    streams = RecordedStreams()
    streams.schedule("reserve", nothing, writes=TABLE)
    streams.main("lay out", nothing)
    streams.plan_waits()
    streams.plan("plan", nothing, reads=("table",))
    streams.main_waits()
    streams.main("verify", nothing)
    streams.schedule("reserve", nothing, writes=TABLE)
    after = streams.issued[2].after
    assert Queue.MAIN in after, "that the plan queue waits for the main one is recorded"
    said = "a wait is for the operations of the other queue: a queue's own are not counted as such"
    assert after[Queue.MAIN] == 1, said
    assert streams.hazards() == []
    assert after == {Queue.MAIN: 1, Queue.SCHEDULE: 1}
    assert streams.issued[-1].after == {Queue.MAIN: 2, Queue.PLAN: 1, Queue.SCHEDULE: 1}


def test_a_wait_for_a_queue_that_waited_long_ago_forgets_no_later_wait() -> None:
    """The scheduler has seen the first plan alone; the main queue, which it holds up, both."""
    streams = RecordedStreams()
    streams.plan("plan verify", nothing)
    streams.main_waits()
    streams.main("verify", nothing)
    streams.plan("plan next", nothing, writes=("metadata",))
    streams.main_waits()
    streams.schedule("reserve", nothing, writes=TABLE)
    streams.main("next", nothing, reads=("metadata",))
    assert streams.issued[-2].after == {Queue.MAIN: 1, Queue.PLAN: 1}
    said = "the main queue has waited for two plans, whatever the scheduler waited for"
    assert streams.issued[-1].after[Queue.PLAN] == 2, said
    assert streams.hazards() == [], said


each_on_the_host = pytest.mark.parametrize(
    "kind", [RecordedStreams, SameStream], ids=["recorded", "same"]
)


@each_on_the_host
def test_a_round_whose_plan_failed_leaves_no_plan_to_the_next(
    kind: type[RecordedStreams | SameStream],
) -> None:
    streams, ran = kind(), list[str]()

    def refuse() -> None:
        ran.append("fails")
        raise ContractError("refused")

    streams.plan("fails", refuse)
    streams.plan("follows", lambda: ran.append("follows"))
    with pytest.raises(ContractError, match="refused"):
        streams.main_waits()
    streams.plan("next", lambda: ran.append("next"))
    streams.main_waits()
    assert ran == ["fails", "next"], "a plan of a round that failed runs in no later round"


@each_on_the_host
def test_a_round_whose_draft_failed_leaves_no_plan_to_the_next(
    kind: type[RecordedStreams | SameStream],
) -> None:
    streams, ran = kind(), list[str]()

    def refuse() -> None:
        raise ContractError("refused")

    streams.plan("plan verify", lambda: ran.append("first"))
    with pytest.raises(ContractError, match="refused"):
        streams.main("draft", refuse)
    streams.plan("plan verify", lambda: ran.append("second"))
    streams.main("draft", lambda: ran.append("draft"))
    streams.main_waits()
    said = "a plan that was deferred in a round whose draft failed runs in no later round"
    assert ran == ["draft", "second"], f"{said}: {ran}"


@each_on_the_host
def test_reads_of_scheduled_memory_are_observed_wherever_the_work_runs(
    kind: type[RecordedStreams | SameStream],
) -> None:
    streams, table, seen = kind(), torch.zeros(3), []
    streams.schedule("reserve", lambda: seen.append(table.fill_(1).sum()), writes={"table": table})
    streams.main("lay out", lambda: seen.append(table.sum()), reads=("lens",))
    streams.plan_waits()
    streams.plan("plan", lambda: seen.append(table.sum()))
    streams.main_waits()
    streams.main("verify", lambda: seen.append(seen[0] + 1))
    assert seen == [3, 3, 3, 4]
    if isinstance(streams, RecordedStreams):
        reads = {operation.name: operation.reads for operation in streams.issued}
        assert reads == {
            "reserve": set(),
            "lay out": {"lens", "table"},
            "plan": {"table"},
            "verify": set(),
        }
        assert streams.ran == ["reserve", "lay out", "plan", "verify"]


def test_what_was_scheduled_once_stays_observed() -> None:
    streams, table, mapping = RecordedStreams(), torch.zeros(3), torch.zeros(2)
    streams.schedule("reserve", lambda: None, writes={"table": table})
    streams.schedule("release", lambda: None, writes={"mapping": mapping})
    streams.main("draft", lambda: table + 1)
    streams.schedule("idle", lambda: None, writes={})
    streams.main("verify", lambda: table.sum() + mapping.sum())
    reads = {operation.name: operation.reads for operation in streams.issued}
    said = "what an operation reads counts, though nobody declared it"
    assert reads["draft"] == {"table"}, said
    assert reads["verify"] == {"table", "mapping"}


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
    said = "a plan runs once, before the main queue goes on from its wait for it"
    assert ran.count("plan") == 1, f"{said}: {ran}"
    said = "a plan runs as late, or as early, as its waits allow"
    assert ran == order, f"{said}: {order}, not {ran}"
    if isinstance(streams, RecordedStreams):
        assert streams.ran == order, (
            f"ran records the order of the work: {order}, not {streams.ran}"
        )


class FakeStream:
    """Records which stream waits for which, or for which event."""

    def __init__(self, name: str) -> None:
        self.name, self.device, self.waited = name, "cuda:0", list[str]()
        self.events = 0

    def wait_stream(self, other: FakeStream) -> None:
        """Record the wait."""
        self.waited.append(other.name)

    def record_event(self) -> str:
        """The name of an event of this stream."""
        self.events += 1
        return f"event {self.events} of {self.name}"

    def wait_event(self, event: str) -> None:
        """Record the wait."""
        self.waited.append(event)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[FakeStream]:
    """Streams in place of CUDA's: the main one, that of plans and the scheduler's."""
    main, *others = made = [FakeStream(name) for name in ("main", "plan", "scheduler")]
    entered: list[FakeStream] = [main]

    @contextmanager
    def inside(stream: FakeStream) -> Iterator[None]:
        entered.append(stream)
        yield
        entered.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: others.pop(0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: entered[-1])
    monkeypatch.setattr(torch.cuda, "stream", inside)
    return made


def current() -> str:
    stream: Any = torch.cuda.current_stream("cuda:0")
    return str(stream.name)


def test_cuda_streams_wait_for_each_other_the_right_way_round(fakes: list[FakeStream]) -> None:
    main, plan, _ = fakes
    streams, ran = CudaStreams("cuda:0"), list[str]()
    streams.plan_waits()
    said = "plan_waits makes the plan stream, and no other, wait for the main stream"
    assert plan.waited == ["main"], f"{said}: it waits for {plan.waited}"
    assert main.waited == [], f"{said}: the main stream waits for {main.waited}"
    streams.plan("plan", lambda: ran.append(current()))
    assert streams.main("draft", current) == "main", "forwards run on the main stream"
    streams.main_waits()
    said = "main_waits makes the main stream, and no other, wait for the plan stream"
    assert main.waited == ["plan"], f"{said}: it waits for {main.waited}"
    assert plan.waited == ["main"], f"{said}: the plan stream waits for {plan.waited}"
    assert ran == ["plan"], "plans run on the plan stream, not on the forward's"


def test_the_cuda_scheduler_waits_for_shared_reads_alone(fakes: list[FakeStream]) -> None:
    main, _, scheduler = fakes
    streams, ran = CudaStreams("cuda:0"), list[str]()
    for name, reads_ended in (("a", False), ("b", True), ("c", True), ("d", False), ("e", True)):
        streams.main(name, nothing, reads_ended=reads_ended)
        streams.schedule(f"after {name}", lambda: ran.append(current()), writes=TABLE)
    # An event lies before the first of the operations whose shared reads have ended.
    due = ["main", *["event 1 of main"] * 2, "main", "event 2 of main"]
    said = "the scheduler's stream waits for the last forward that may read what it writes"
    count = len(scheduler.waited)
    assert count == len(due), f"{said}, before each of {len(due)} writes, not {count}"
    said = f"{said}, and not for those after it whose reads have ended"
    assert scheduler.waited == due, f"{said}: {due}, not {scheduler.waited}"
    assert main.waited == ["scheduler"] * 5, "a forward waits for the scheduler's writes"
    assert ran == ["scheduler"] * 5, f"the scheduler writes on its own stream, not on {ran}"
    assert streams.hazards() == [], "CUDA streams record no hazards"
