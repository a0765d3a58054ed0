"""Requests drawn from the server's schema, valid and invalid, cause no server error or leak."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, given, seed, settings
from hypothesis.errors import Unsatisfiable

from fixtures.drivers.crowd import settled
from fixtures.pytest_plugin.servers import FreshServer, Served
from fixtures.tables.past_examples import HTTPRequest, PastExample, written

pytestmark = pytest.mark.untraced
CONTEXT = 192
"""Long enough for the default of 128 new tokens, so that valid requests are served."""
EXAMPLES = 8
"""Requests of each kind and seed."""


def operations(url: str) -> Iterator[tuple[Any, Any]]:
    """Operation and mode of everything the schema offers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import schemathesis
        from schemathesis import GenerationMode

    for found in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations():
        operation = found.ok()
        for mode in GenerationMode:
            yield operation, mode


def test_no_drawn_request_is_a_server_error(
    fresh_server: FreshServer, seeds: Iterator[int], past: list[PastExample]
) -> None:
    served = fresh_server(context_length=CONTEXT)
    for known in past:
        response = sent(served, known.example)
        assert response.status_code < 500, f"{known.found}: {response.text}"
    for number in seeds:
        answered = Counter(
            status // 100
            for operation, mode in operations(served.url)
            for status in statuses(served, operation, mode, number)
        )
        print(f"{answered.total()} requests: {dict(sorted(answered.items()))}")
        assert answered.total() > 4 * EXAMPLES
        assert answered[2] > EXAMPLES
        assert answered[4] > EXAMPLES
    settled(served)


def statuses(served: Served, operation: Any, mode: Any, number: int) -> list[int]:
    """Of the answers to what a seed draws, none of which is a server error."""
    answered = []

    @seed(number)
    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=HealthCheck
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        response = case.call(timeout=30)
        answered.append(response.status_code)
        if case.path == "/slow_down":
            served.client.slow_down(None)
        assert response.status_code < 500, f"{told(response.request)}: {response.text}"

    with suppress(Unsatisfiable):  # Nothing about it can be wrong.
        ask()
    return answered


def told(request: requests.PreparedRequest) -> str:
    """A request as a row of the table has it."""
    body = request.body or b""
    example = HTTPRequest(
        method=str(request.method),
        path=request.path_url,
        body=body.encode() if isinstance(body, str) else body,
        headers=tuple(request.headers.items()),
    )
    return f"example={written(example)}"


def sent(served: Served, request: HTTPRequest) -> requests.Response:
    """The answer to a request of the table."""
    return requests.request(
        request.method,
        served.url + request.path,
        data=request.body,
        headers=dict(request.headers),
        timeout=30,
    )
