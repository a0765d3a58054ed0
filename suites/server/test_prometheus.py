"""Every metric has the number that its name says."""

from __future__ import annotations

import re

from harness.server.http.prometheus import Metrics

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
