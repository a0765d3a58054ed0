"""A body that is too large or too slow is refused before the app sees the request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from harness.server.http.middleware import BodyLimit

PART = {"type": "http.request", "body": b"1234", "more_body": True}
LAST = PART | {"more_body": False}
GONE = {"type": "http.disconnect"}


def asked(
    messages: Sequence[dict[str, Any]], pause_s: float = 0.0
) -> tuple[list[bytes], list[int], list[str]]:
    """Bodies that the app got, statuses and error types that the client got."""
    bodies: list[bytes] = []
    sent: list[Any] = []
    waiting = list(messages)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        bodies.append((await receive())["body"])

    async def receive() -> Any:
        await asyncio.sleep(pause_s if waiting else 10)
        return waiting.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    limit = BodyLimit(app, max_bytes=8, patience_s=0.05)
    asyncio.run(limit({"type": "http", "method": "POST", "headers": []}, receive, send))
    statuses = [one["status"] for one in sent if one["type"] == "http.response.start"]
    errors = [json.loads(one["body"])["error"]["type"] for one in sent if one.get("body")]
    return bodies, statuses, errors


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        ([PART, LAST], ([b"12341234"], [], [])),
        ([PART, PART, LAST], ([], [413], ["PayloadTooLarge"])),
        ([PART], ([], [408], ["RequestTimeout"])),
        ([PART, GONE], ([b"1234"], [], [])),
    ],
    ids=["whole", "too large", "too slow", "left"],
)
def test_a_body_is_whole_or_refused(messages: Any, found: Any) -> None:
    assert asked(messages) == found


def test_a_body_that_trickles_in_is_too_slow_as_a_whole() -> None:
    trickling = [PART | {"body": b"1"}] * 4 + [LAST | {"body": b"1"}]
    refused = ([], [408], ["RequestTimeout"])
    assert asked(trickling, pause_s=0.03) == refused, "the time is the whole body's, not a part's"
