"""Requests drawn from the server's schema, valid and invalid, cause no server error or leak."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

from fixtures.drivers.crowd import settled
from fixtures.pytest_plugin.servers import FreshServer

CONTEXT = 256
"""Long enough for the default of 128 new tokens, so that valid requests are served."""
EXAMPLES = int(os.environ.get("SPECGATE_FUZZ", "8"))
"""Requests of each kind; SPECGATE_FUZZ=500 sends more than 2,000 in all."""


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


def test_no_drawn_request_is_a_server_error(fresh_server: FreshServer) -> None:
    served = fresh_server(context_length=CONTEXT)
    answered: Counter[str] = Counter()
    for operation, mode in operations(served.url):
        strategy = operation.as_strategy(generation_mode=mode)

        @settings(
            max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=HealthCheck
        )
        @given(case=strategy)
        def ask(case: Any) -> None:
            response = case.call(timeout=30)
            answered[f"{response.status_code // 100}xx"] += 1
            if case.path == "/slow_down":
                served.client.slow_down(None)
            assert response.status_code < 500, f"{case.as_curl_command()}: {response.text}"

        with suppress(Unsatisfiable):  # Nothing about it can be wrong.
            ask()
    print(f"{sum(answered.values())} requests: {dict(sorted(answered.items()))}")
    assert sum(answered.values()) > 4 * EXAMPLES
    assert answered["2xx"] > EXAMPLES
    assert answered["4xx"] > EXAMPLES
    settled(served)
