"""Prometheus metrics of an app, under sglang's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

GAUGES = {
    "num_running_reqs": "running",
    "num_queue_reqs": "waiting",
    "pages_free": "free_pages",
    "pages_cached": "cached_pages",
    "pages_held": "held_pages",
}
"""Names of gauges and of counts in the engine's state."""


class Metrics:
    """Counters since the start of the app, and gauges of the engine's state."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = self._counter("num_requests", "Prompts answered, by outcome.", "outcome")
        self._prompt = self._counter("prompt_tokens", "Tokens of answered prompts.")
        self._generated = self._counter("generation_tokens", "Tokens generated.")
        self._cached = self._counter("cached_tokens", "Prompt tokens found in the cache.")
        self._verified = self._counter("spec_verify", "Verify steps.")
        self._gauges = {
            name: Gauge(f"sglang:{name}", name.replace("_", " "), registry=self._registry)
            for name in GAUGES
        }
        self.totals = {"completion_tokens": 0, "spec_verify_ct": 0}

    def answered(self, prompt_tokens: int, meta: Mapping[str, Any]) -> None:
        """Count a prompt that was answered, by its ``meta_info``."""
        self._requests.labels(meta["finish_reason"]["type"]).inc()
        self._prompt.inc(prompt_tokens)
        self._generated.inc(meta["completion_tokens"])
        self._cached.inc(meta["cached_tokens"])
        self._verified.inc(meta["spec_verify_ct"])
        for name in self.totals:
            self.totals[name] += meta[name]

    def failed(self) -> None:
        """Count a prompt that was not answered."""
        self._requests.labels("failed").inc()

    def flushed(self) -> None:
        """Begin the accept length anew, as sglang does; counters go on."""
        self.totals = dict.fromkeys(self.totals, 0)

    @property
    def accept_length(self) -> float | None:
        """Completion tokens per verify step since the last flush, None before the first."""
        steps = self.totals["spec_verify_ct"]
        return self.totals["completion_tokens"] / steps if steps else None

    def text(self, state: Mapping[str, Any]) -> bytes:
        """All metrics, the gauges from this state of the engine."""
        for name, key in GAUGES.items():
            self._gauges[name].set(state[key])
        return bytes(generate_latest(self._registry))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"sglang:{name}", text, labels, registry=self._registry)
