"""Every metric has the number that its name says."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from harness.server.http.engine_client import Progress, Refused, WorkerLost
from harness.server.http.generate import GenerateHandler
from harness.server.http.prometheus import Metrics
from harness.server.http.protocol import GenerateRequest

STATE = {
    "running": 3,
    "waiting": 5,
    "free_pages": 7,
    "cached_pages": 11,
    "held_pages": 13,
    "total_pages": 31,
    "held_rows": 17,
}


def samples(metrics: Metrics) -> dict[str, float]:
    """Name, with labels, -> number; without the times at which counters were made."""
    rows = re.findall(r"^sglang:(\S+) (\S+)$", metrics.text(STATE).decode(), re.MULTILINE)
    return {name: float(number) for name, number in rows if "_created" not in name}


def test_counters_and_gauges() -> None:
    metrics = Metrics()
    for prompt, reason, generated, cached, verified in [
        (40, "stop", 9, 32, 4),
        (6, "abort", 2, 1, 0),
    ]:
        meta = {"finish_reason": {"type": reason}, "completion_tokens": generated}
        metrics.answered(prompt, meta | {"cached_tokens": cached, "spec_verify_ct": verified})
    for _ in range(3):
        metrics.failed()
    found = samples(metrics)
    expected = {
        'num_requests_total{outcome="stop"}': 1,
        'num_requests_total{outcome="abort"}': 1,
        'num_requests_total{outcome="failed"}': 3,
        "prompt_tokens_total": 46,
        "generation_tokens_total": 11,
        "cached_tokens_total": 33,
        "spec_verify_total": 4,
        "num_running_reqs": 3,
        "num_queue_reqs": 5,
        "pages_free": 7,
        "pages_cached": 11,
        "pages_held": 13,
    }
    differ = sorted(found.items() ^ expected.items())
    assert found == expected, f"a metric has the number that its name says: {differ} differ"


@pytest.mark.parametrize(
    ("tokens", "why", "counted"),
    [(9, Refused, {}), (5, WorkerLost, {'num_requests_total{outcome="failed"}': 1})],
)
def test_what_can_never_be_served_is_no_failure(
    tokens: int, why: type[Exception], counted: dict[str, int]
) -> None:
    async def lost(*_: object, **__: object) -> AsyncGenerator[Progress, None]:
        raise WorkerLost("the engine's process ended with -9")
        yield

    engine: Any = SimpleNamespace(context_length=8, new_detokenizer=lambda: None, generate=lost)
    metrics = Metrics()
    body = {"input_ids": [1] * tokens, "sampling_params": {"max_new_tokens": 2}}
    asked = GenerateRequest.model_validate(body).to_input()
    with pytest.RaisesGroup(why):
        asyncio.run(GenerateHandler(engine, metrics).response(asked))
    found = {name: n for name, n in samples(metrics).items() if name.startswith("num_requests")}
    told = "a server fails where it cannot answer what it accepts, not where it refuses"
    assert found == counted, f"{told}: {found}"


def test_a_flush_begins_the_accept_length_anew() -> None:
    metrics = Metrics()
    for tokens, verifies in ((90, 10), (8, 4)):
        reason = {"type": "length"}
        counts = {"completion_tokens": tokens, "spec_verify_ct": verifies, "cached_tokens": 0}
        metrics.flushed()
        metrics.answered(3, counts | {"finish_reason": reason})
    assert metrics.accept_length == 2.0, "8 tokens of 4 verifies since the flush"


def test_a_stream_that_loses_its_engine_ends_as_every_stream() -> None:
    async def lost() -> AsyncGenerator[dict[str, Any], None]:
        yield {"text": "a"}
        raise WorkerLost("the engine was lost")

    async def events() -> list[str]:
        engine: Any = None
        handler = GenerateHandler(engine, Metrics())
        return [event async for event in handler.events(lost())]

    _, fault, *end = asyncio.run(events())
    assert "the engine was lost" in fault
    assert end == ["data: [DONE]\n\n"], "clients wait for the end, behind an error too"


def test_a_batch_of_one_prompt_is_answered_by_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    async def last(self: object, asked: Any, index: int) -> dict[str, Any]:
        return {"text": asked.prompts[index]}

    engine: Any = None
    monkeypatch.setattr(GenerateHandler, "_last", last)
    asked = GenerateRequest.model_validate({"text": ["a"]}).to_input()
    answered = asyncio.run(GenerateHandler(engine, Metrics()).response(asked))
    assert answered == [{"text": "a"}], "a list of prompts is answered by a list, of one too"
