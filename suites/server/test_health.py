"""The health check of sglang's own launchers succeeds."""

from __future__ import annotations

import pytest
import requests

POLLED = {"Content-Type": "application/json; charset=utf-8", "Authorization": "Bearer None"}
"""What ``sglang.test.test_utils.popen_launch_server`` sends while it waits."""


@pytest.mark.parametrize("path", ["/health", "/health_generate"])
@pytest.mark.parametrize("headers", [None, POLLED], ids=["bare", "popen_launch_server"])
def test_a_poll_is_answered(server, path, headers):
    status = requests.get(server.url + path, headers=headers, timeout=5).status_code
    assert status == 200, f"GET {path}, which has no body, is answered 200, not {status}"
