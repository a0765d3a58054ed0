"""The engine's process takes every command that came before a step, and ends with its server."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from harness.server.engine_process import loop
from harness.server.engine_process.loop import ActiveRequest, EngineLoop
from harness.server.engine_process.messages import EngineCommand, Query, Ready, Reply, Submit

VOCAB_SIZE, EOS = 100, 2
OPTIONS: Any = SimpleNamespace(slowdown=0.0, spec="none")


@dataclass
class Usage:
    """Of pages, as a scheduler tells it."""

    free_pages: int


class Scheduler:
    """Ends with its server after one step.

    Args:
        server: the other end of the engine's pipe.
    """

    def __init__(self, server: Connection) -> None:
        self._server = server
        self.waiting: list[tuple[int, ...]] = []
        self.steps: list[int] = []

    @property
    def idle(self) -> bool:
        return not self.waiting

    def submit(self, prompt: tuple[int, ...], most: int, *, eos: int | None) -> object:
        self.waiting.append(prompt)
        generation = SimpleNamespace(token_ids=[])
        return SimpleNamespace(generation=generation, max_new_tokens=most, finished=False)

    def step(self) -> None:
        self.steps.append(len(self.waiting))
        self._server.close()


def served(
    monkeypatch: pytest.MonkeyPatch, *commands: EngineCommand, is_read: bool = True
) -> list[int]:
    """Requests at each step of an engine whose server closes its end of the pipe."""
    server, engine = Pipe()
    scheduler = Scheduler(server)
    monkeypatch.setattr(loop, "build", lambda options: (scheduler, VOCAB_SIZE, EOS))
    running = EngineLoop(engine, OPTIONS)
    for command in commands:
        server.send(command)
    send = engine.send

    def told(event: object) -> None:
        send(event)
        if is_read:
            assert server.recv() == Ready()
        if not commands:
            server.close()

    monkeypatch.setattr(engine, "send", told, raising=False)
    running.serve()
    return scheduler.steps


def test_requests_that_came_together_begin_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [Submit(rid, (7, n), 5, ignore_eos=True, stream=False) for n, rid in enumerate("abc")]
    steps = served(monkeypatch, *asked)
    assert steps[:1] == [3], f"the first step has all three requests that wait, not {steps}"


def test_the_state_of_an_engine_counts_who_waits_apart_from_who_runs() -> None:
    sent: list[Reply] = []
    scheduler = SimpleNamespace(running=["a"], waiting=["b", "c"], usage=Usage(free_pages=5))
    engine: Any = SimpleNamespace(
        _scheduler=scheduler,
        _active=dict.fromkeys("abc"),
        _pipe=SimpleNamespace(send=sent.append),
    )
    EngineLoop._answer(engine, Query(7, "state"))
    told = "of three requests that the server waits for one runs and two wait"
    assert sent == [Reply(7, {"free_pages": 5, "running": 1, "waiting": 2})], told


@pytest.mark.parametrize("is_read", [True, False], ids=["all_read", "something_unread"])
def test_an_engine_ends_with_its_server(monkeypatch: pytest.MonkeyPatch, is_read: bool) -> None:
    assert served(monkeypatch, is_read=is_read) == []


def active(*ids: int, most: int, finished: bool = True) -> ActiveRequest:
    """A request with these tokens, of which the end token is one."""
    generation = SimpleNamespace(token_ids=list(ids), cached_tokens=0, spec_verify_ct=2)
    request: Any = SimpleNamespace(
        generation=generation, max_new_tokens=most, finished=finished, eos=EOS
    )
    return ActiveRequest("a", request, started=5.0, stream=False)


@pytest.mark.parametrize(
    ("most", "finished", "reason"),
    [(3, True, "stop"), (2, True, "length"), (3, False, "")],
    ids=["before_the_limit", "at_the_limit", "in_the_middle"],
)
def test_an_answer_of_the_most_tokens_ends_by_its_length(
    most: int, finished: bool, reason: str
) -> None:
    found = active(7, EOS, most=most, finished=finished).finish_reason
    assert found == reason, "sglang asks for the length before it asks for the end token"


def test_the_latency_of_the_engine_is_the_time_since_it_got_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop.time, "perf_counter", lambda: 7.5)
    told = active(7, most=1).progress("length", speculative=True).engine_s
    assert told == 2.5, "seconds from the request at 5.0 to its progress at 7.5"


@pytest.mark.parametrize("part", [0.0, 0.05, 0.5])
def test_a_slowdown_is_a_part_of_each_step(monkeypatch: pytest.MonkeyPatch, part: float) -> None:
    slept: list[float] = []
    now = iter([10.0, 12.0, 20.0, 26.0])
    monkeypatch.setattr(loop.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(loop.time, "sleep", slept.append)
    engine: Any = SimpleNamespace(
        _slowdown=part, _sleep_s=0.0, _active={}, _scheduler=SimpleNamespace(step=lambda: None)
    )
    for _ in range(2 if part else 1):
        EngineLoop._step(engine)
    due = [2.0 * part, 6.0 * part] if part else []
    assert slept == due, f"steps of 2 and of 6 s are longer by {part:g} of their time"
