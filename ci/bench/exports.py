"""Numbers for other tools: github-action-benchmark's JSON and OpenMetrics text."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.openmetrics.exposition import generate_latest

from ci.bench.case_report import CaseReport
from ci.bench.latency_table import LatencyFigure
from harness.bench.console import e_value
from harness.bench.wording import percent

LABELS = ("session", "workload", "metric", "sku", "a", "b")
BENCH_GAUGES: tuple[tuple[str, str, Callable[[CaseReport], float | None]], ...] = (
    ("ratio", "B / A in the metric's own direction", lambda row: row.numbers.get("ratio")),
    ("ratio_low", "Lower 95 % bound of the ratio", lambda row: row.numbers.get("low")),
    ("ratio_high", "Upper 95 % bound of the ratio", lambda row: row.numbers.get("high")),
    ("slowdown", "ln of the ratio, positive is worse", lambda row: row.numbers.get("cost")),
    ("e_regressed", "Evidence for a regression", lambda row: row.evidence.e_regressed),
    ("e_equivalence", "Evidence against a regression", lambda row: row.evidence.e_equivalence),
    ("e_improved", "Evidence for an improvement", lambda row: row.evidence.e_improved),
    ("mde", "Least slowdown that this noise would show, log units", lambda row: row.finding.mde),
    ("blocks", "Valid blocks used", lambda row: row.evidence.blocks),
    ("dropped_blocks", "Invalid blocks", lambda row: row.evidence.dropped),
    ("valid", "1 where the measurement is valid", lambda row: row.is_valid),
    ("red", "1 where a gate fails", lambda row: row.is_red),
)
LATENCY_LABELS = ("what", "point", "arm", "sku")
LATENCIES: tuple[tuple[str, str, Callable[[LatencyFigure], float]], ...] = (
    ("microseconds", "Median of interleaved blocks", lambda figure: figure.value),
    ("microseconds_low", "Lower 95 % bound of the median", lambda figure: figure.low),
    ("microseconds_high", "Upper 95 % bound of the median", lambda figure: figure.high),
)


def smaller_is_better(rows: Sequence[CaseReport], figures: Sequence[LatencyFigure] = ()) -> str:
    """A JSON list for charts: cost of B over A, so that 1 is unchanged and more is worse.

    Cases without a number are left out. Latencies follow, in microseconds.
    """
    entries: list[dict[str, object]] = [
        {
            "name": f"{row.case} @ {row.sku}",
            "unit": "× reference",
            "value": round(math.exp(row.cost), 6),
            "range": f"± {_half_width(row)}",
            "extra": f"{row.verdict}, e = {e_value(row.evidence)}, "
            f"{row.evidence.blocks} blocks, B / A {percent(row.evidence.ratio)}, "
            f"{row.session.environment.commit[:12]}",
        }
        for row in rows
        if row.evidence.blocks and not row.is_control
    ]
    entries += [
        {
            "name": figure.name,
            "unit": "µs",
            "value": round(figure.value, 3),
            "range": f"{figure.low:.3f} to {figure.high:.3f}",
            "extra": f"median of {figure.blocks} blocks",
        }
        for figure in figures
    ]
    return json.dumps(entries, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _half_width(row: CaseReport) -> str:
    ends = (row.evidence.low, row.evidence.high)
    if not all(map(math.isfinite, row.interval)):
        return "∞"
    return f"{max(abs(bound / row.evidence.ratio - 1) for bound in ends):.4f}"


def openmetrics(rows: Sequence[CaseReport], figures: Sequence[LatencyFigure] = ()) -> str:
    """Gauges of every finding, controls too, and of latencies; unknown numbers are left out."""
    registry = CollectorRegistry()
    for name, help_text, value in BENCH_GAUGES:
        gauge = Gauge(f"specgate_bench_{name}", help_text, LABELS, registry=registry)
        for row in rows:
            found = value(row)
            if found is not None:
                session = row.session
                labels = (session.id, row.workload.id, row.metric, row.sku)
                gauge.labels(*labels, session.a.name, session.b.name).set(float(found))
    for name, help_text, measured in LATENCIES:
        gauge = Gauge(f"specgate_latency_{name}", help_text, LATENCY_LABELS, registry=registry)
        for figure in figures:
            labels = (figure.what, figure.point, figure.arm, figure.sku)
            gauge.labels(*labels).set(measured(figure))
    text: bytes = generate_latest(registry)  # type: ignore[no-untyped-call]
    return text.decode()
