"""Server-sent events of a streamed response, with the times of their arrival."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import requests

from harness.errors import ServerError

DONE = "[DONE]"
SNIPPET = 300
"""Characters of a body that an error message shows."""


def events(answer: requests.Response) -> Iterator[tuple[float, Any]]:
    """Seconds of ``time.perf_counter`` at which each event came, and its JSON.

    Raises:
        ServerError: an event is an error or no JSON, or the stream ended before it was done.
    """
    for at, data in _lines(answer):
        if data == DONE:
            return
        yield at, _parse(answer.url, data)
    raise ServerError(f"{answer.url}: the stream ended before it was done")


def _lines(answer: requests.Response) -> Iterator[tuple[float, str]]:
    try:
        for line in answer.iter_lines():
            at = time.perf_counter()
            if data := line.decode().removeprefix("data:").strip():
                yield at, data
    except requests.RequestException as error:
        raise ServerError(f"{answer.url}: the stream broke: {error}") from error


def _parse(url: str, data: str) -> Any:
    try:
        event = json.loads(data)
    except ValueError as error:
        raise ServerError(f"{url}: no JSON: {data[:SNIPPET]}") from error
    if isinstance(event, dict) and (fault := event.get("error")):
        status = fault.get("code") if isinstance(fault, dict) else None
        raise ServerError(f"{url}: {str(fault)[:SNIPPET]}", status)
    return event
