"""Plots of the history: every series with its epochs, and every case by kind of machine."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import altair as alt

from ci.bench.case_report import relative
from ci.bench.charts import (
    HEIGHT,
    ROW,
    WIDTH,
    WORSE,
    Drawing,
    LegendKey,
    Panel,
    percent_axis,
    values,
    verdict_keys,
    verdicts,
)
from ci.bench.history import Series
from harness.bench.wording import percent

EVENT_MARKS = {"epoch": ("┊", [2, 3]), "suspected change": ("╎", [6, 3]), "alarm": ("│", [1, 0])}
"""Glyph and dashes of the vertical line at an event."""
COLUMN = 110
"""Width of a kind of machine, px."""


def history(found: Mapping[tuple[str, str], Series]) -> Drawing:
    """One panel per series: the change of each night, with epochs, suspected changes and alarms."""
    panels = tuple(Panel(" @ ".join(key), _history(series)) for key, series in found.items())
    marked = {mark["mark"]: mark["mark"] for one in found.values() for mark in _marks(one)}
    keys = [
        LegendKey(glyph, WORSE if name == "alarm" else "currentColor", name)
        for name, (glyph, _) in EVENT_MARKS.items()
        if name in marked
    ]
    seen = (entry.verdict for series in found.values() for entry in series.entries)
    return Drawing(panels, (*verdict_keys(seen), *keys))


def _history(series: Series) -> Any:
    table = [
        {
            "night": entry.night,
            "change": entry.change,
            "low": None if entry.low is None else relative(entry.low, entry.higher_is_better),
            "high": None if entry.high is None else relative(entry.high, entry.higher_is_better),
            "verdict": str(entry.verdict),
            "epoch": sum(start <= place for start in series.epochs),
        }
        for place, entry in enumerate(series.entries)
    ]
    x = alt.X("night:T", title=None, axis=alt.Axis(format="%d %b", tickCount=4))
    y = alt.Y("change:Q", **percent_axis("change from A to B"))
    base = alt.Chart(values(table))
    line = base.mark_line(opacity=0.6, color="currentColor", strokeWidth=1)
    ends = base.mark_rule(opacity=0.5, color="currentColor")
    point = base.mark_point(filled=True, size=45, opacity=1).encode(x=x, y=y, **verdicts())
    layers = [
        line.encode(x=x, y=y, detail="epoch:N"),
        ends.encode(x=x, y="low:Q", y2="high:Q"),
        point,
    ]
    if marks := _marks(series):
        dashes = alt.Scale(domain=[*EVENT_MARKS], range=[dash for _, dash in EVENT_MARKS.values()])
        rule = alt.Chart(values(marks)).mark_rule(strokeWidth=1.5)
        colour = alt.condition("datum.mark == 'alarm'", alt.value(WORSE), alt.value("currentColor"))
        begun = alt.StrokeDash("mark:N", scale=dashes)
        layers.append(rule.encode(x="at:T", strokeDash=begun, color=colour))
    return alt.layer(*layers).properties(width=WIDTH, height=HEIGHT)


def _marks(series: Series) -> list[dict[str, Any]]:
    marks = [{"mark": "epoch", "at": series.entries[place].night} for place in series.epochs[1:]]
    if series.change:
        marks.append({"mark": "suspected change", "at": series.change.night})
    for start, end in pairwise([*series.epochs, len(series.entries)]):
        if alarms := [n for n in series.alarms if start <= n < end]:
            marks.append({"mark": "alarm", "at": series.entries[alarms[0]].night})
    return marks


def heat_map(found: Mapping[tuple[str, str], Series]) -> Drawing:
    """One panel per workload, metric × kind of machine: verdict and change of the last night."""
    panels: dict[str, list[dict[str, Any]]] = {}
    for (case, sku), series in found.items():
        workload, _, metric = case.rpartition("/")
        last = series.entries[-1]
        cell = {
            "metric": metric,
            "sku": sku,
            "verdict": str(last.verdict),
            "change": percent(1 + last.change),
        }
        panels.setdefault(workload, []).append(cell)
    drawn = tuple(Panel(workload, _heat_map(cells)) for workload, cells in panels.items())
    return Drawing(drawn, verdict_keys(series.entries[-1].verdict for series in found.values()))


def _heat_map(cells: list[dict[str, Any]]) -> Any:
    skus, metrics = {cell["sku"] for cell in cells}, {cell["metric"] for cell in cells}
    base = alt.Chart(values(cells)).encode(
        x=alt.X("sku:N", title=None, axis=alt.Axis(labelAngle=0, orient="top", labelOverlap=False)),
        y=alt.Y("metric:N", title=None),
    )
    layers = alt.layer(
        base.mark_rect(opacity=0.45, cornerRadius=4).encode(color=verdicts()["color"]),
        base.mark_text().encode(text="change:N"),
    )
    width = max(WIDTH, WIDTH - 2 * COLUMN + COLUMN * len(skus))
    return layers.properties(width=width, height=ROW * len(metrics) + 30)
