"""Plots over many nights: every series with its epochs, and every case on every kind of machine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import altair as alt

from ci.bench.charts import PANEL, ROW, WORSE, percent_axis, values, verdicts
from ci.bench.history import Entry, Series

WIDE = 2 * PANEL
SeriesKey = tuple[str, str]


def history(found: Mapping[SeriesKey, Series]) -> Any:
    """A panel a series: slowdown a night; a rule where an epoch or a suspected change begins."""
    table = [
        {
            "series": _name(key),
            "night": entry.night,
            "cost": math.expm1(entry.cost),
            "low": None if entry.low is None else math.expm1(entry.low),
            "high": None if entry.high is None else math.expm1(entry.high),
            "verdict": str(entry.verdict),
            "epoch": sum(start <= place for start in series.epochs),
        }
        for key, series in found.items()
        for place, entry in enumerate(series.entries)
    ]
    marks = [mark for key, series in found.items() for mark in _marks(_name(key), series)]
    x = alt.X("night:T", title=None, axis=alt.Axis(format="%d %b"))
    y = alt.Y("cost:Q", **percent_axis("slowdown of B over A"))
    colour = verdicts()
    line = (
        alt.Chart()
        .mark_line(opacity=0.6, color="currentColor", strokeWidth=1)
        .encode(x=x, y=y, detail="epoch:N")
    )
    ends = alt.Chart().mark_rule(opacity=0.5).encode(x=x, y="low:Q", y2="high:Q")
    point = alt.Chart().mark_point(filled=True, size=45, opacity=1).encode(x=x, y=y, **colour)
    names = ["epoch", "suspected change", "alarm"]
    rule = (
        alt.Chart()
        .mark_rule(strokeWidth=1.5)
        .encode(
            x="at:T",
            strokeDash=alt.StrokeDash(
                "mark:N",
                title=None,
                scale=alt.Scale(domain=names, range=[[2, 3], [6, 3], [1, 0]]),
                legend=alt.Legend(orient="top", symbolStrokeColor="currentColor"),
            ),
            color=alt.condition(
                "datum.mark == 'alarm'", alt.value(WORSE), alt.value("currentColor")
            ),
        )
    )
    layers = alt.layer(line, ends, point, rule, data=values([*table, *marks]))
    panel = layers.properties(width=WIDE, height=130)
    return panel.facet(facet=alt.Facet("series:N", title=None, sort=None), columns=2).resolve_scale(
        y="independent"
    )


def _marks(name: str, series: Series) -> Iterable[dict[str, Any]]:
    for start in series.epochs[1:]:
        yield {"series": name, "mark": "epoch", "at": series.entries[start].night}
    if series.change:
        yield {"series": name, "mark": "suspected change", "at": series.change.night}
    if series.alarms:
        yield {"series": name, "mark": "alarm", "at": series.entries[series.alarms[0]].night}


def _name(key: SeriesKey) -> str:
    return " @ ".join(key)


def heat_map(found: Mapping[SeriesKey, Series]) -> Any:
    """Case × kind of machine: the verdict of its last night, and its slowdown."""
    table = [
        {
            "case": case,
            "sku": sku,
            "verdict": str(series.entries[-1].verdict),
            "cost": f"{math.expm1(series.entries[-1].cost):+.1%}",
        }
        for (case, sku), series in found.items()
    ]
    skus = {row["sku"] for row in table}
    base = alt.Chart(values(table)).encode(
        x=alt.X("sku:N", title=None, axis=alt.Axis(labelAngle=0, orient="top")),
        y=alt.Y("case:N", title=None),
    )
    cell = base.mark_rect(opacity=0.45, cornerRadius=4).encode(color=verdicts()["color"])
    text = base.mark_text(fontSize=11).encode(text="cost:N")
    cases = {row["case"] for row in table}
    return (cell + text).properties(width=max(120 * len(skus), 160), height=ROW * len(cases))


def last_nights(entries: Iterable[Entry], most: int = 90) -> list[Entry]:
    """The entries of the last nights, so that a plot stays readable."""
    known = list(entries)
    nights = sorted({entry.night for entry in known})[-most:]
    return [entry for entry in known if entry.night in set(nights)]
