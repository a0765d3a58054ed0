"""From a chart to SVG that stands in a page: no script, no network, readable on dark and light."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import vl_convert

from harness.bench.stats.bench_verdict import BenchVerdict

Chart = alt.TopLevelMixin
COLOURS = {
    BenchVerdict.REGRESSED: "#d1433d",
    BenchVerdict.OK: "#2f9e6b",
    BenchVerdict.IMPROVED: "#3f83d6",
    BenchVerdict.INCONCLUSIVE: "#c08a1e",
    BenchVerdict.INVALID: "#8b8f96",
}
SHAPES = {
    BenchVerdict.REGRESSED: "triangle-up",
    BenchVerdict.OK: "circle",
    BenchVerdict.IMPROVED: "triangle-down",
    BenchVerdict.INCONCLUSIVE: "square",
    BenchVerdict.INVALID: "cross",
}
ARM_A, ARM_B = "#8b8f96", "#3f83d6"
WORSE, BETTER, BAND = "#d1433d", "#2f9e6b", "#c08a1e"
WIDTH, ROW, PANEL = 620, 26, 190
COLUMNS = 3
_TEXT = {"labelColor": "currentColor", "titleColor": "currentColor", "titleFontWeight": 600}
CONFIG: dict[str, Any] = {
    "background": None,
    "font": "system-ui, sans-serif",
    "view": {"stroke": "currentColor", "strokeOpacity": 0.15},
    "axis": _TEXT | {"gridColor": "currentColor", "gridOpacity": 0.1, "domainOpacity": 0.3,
                     "domainColor": "currentColor", "tickColor": "currentColor", "tickOpacity": 0.3,
                     "labelLimit": 320},
    "legend": _TEXT | {"symbolSize": 90},
    "header": _TEXT | {"titleOpacity": 0, "labelFontWeight": 600},
    "title": {"color": "currentColor"},
    "text": {"color": "currentColor"},
}  # fmt: skip


def values(rows: Sequence[dict[str, Any]]) -> alt.InlineData:
    """Rows of a chart; a chart without rows must not be drawn."""
    return alt.InlineData(values=list(rows))


def verdicts(field: str = "verdict", **options: Any) -> dict[str, Any]:
    """Colour and shape of a verdict: told apart without seeing colours."""
    names = [str(verdict) for verdict in BenchVerdict]
    colours = alt.Scale(domain=names, range=list(COLOURS.values()))
    shapes = alt.Scale(domain=names, range=list(SHAPES.values()))
    legend = alt.Legend(orient="top", title=None)
    return {
        "color": alt.Color(f"{field}:N", scale=colours, legend=legend, **options),
        "shape": alt.Shape(f"{field}:N", scale=shapes, legend=legend, **options),
    }


def percent_axis(title: str) -> dict[str, Any]:
    """Scale that need not hold zero, and ticks in signed percent."""
    return {"title": title, "axis": alt.Axis(format="+.1%"), "scale": alt.Scale(zero=False)}


def svg(chart: Any) -> str:
    """The chart as one SVG element, coloured by the page around it."""
    drawn: str = vl_convert.vegalite_to_svg(chart.to_dict() | {"config": CONFIG})
    return drawn
