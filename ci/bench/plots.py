"""Plots of a night: every verdict with its margins, its evidence, its blocks and its requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import altair as alt

from ci.bench.case_report import CaseReport
from ci.bench.charts import (
    ARM_A,
    ARM_B,
    BAND,
    COLUMNS,
    PANEL,
    ROW,
    WIDTH,
    percent_axis,
    values,
    verdicts,
)

REACH = 1.6
"""A forest reaches so many times as far as its estimates and margins; longer intervals are cut."""


def forest(rows: Sequence[CaseReport]) -> Any:
    """A row a case: slowdown with its interval, the band from δ0 to δ1, a tick at the MDE."""
    far = [abs(x) for row in rows for x in (row.cost, row.bounds.delta1, row.finding.mde or 0.0)]
    reach = REACH * max(x for x in far if math.isfinite(x))
    table = [
        {
            "case": row.label,
            "cost": _bent(row.cost, reach),
            "low": _bent(row.interval[0], reach),
            "high": _bent(row.interval[1], reach),
            "delta0": math.expm1(row.bounds.delta0),
            "delta1": math.expm1(row.bounds.delta1),
            "mde": None if row.finding.mde is None else _bent(row.finding.mde, reach),
            "verdict": str(row.verdict),
            "bounded": all(map(math.isfinite, row.interval)),
        }
        for row in rows
    ]
    base = alt.Chart(values(table)).encode(
        y=alt.Y("case:N", title=None, sort=[row.label for row in rows])
    )
    band = base.mark_bar(opacity=0.2, color=BAND, height=ROW - 6).encode(
        x=alt.X("delta0:Q", **percent_axis("slowdown of B over A, positive is worse")),
        x2="delta1:Q",
    )
    colour = verdicts()
    interval = base.mark_rule(strokeWidth=2).encode(
        x="low:Q",
        x2="high:Q",
        color=colour["color"],
        opacity=alt.condition("datum.bounded", alt.value(1), alt.value(0.2)),
    )
    point = base.mark_point(filled=True, size=90, opacity=1).encode(x="cost:Q", **colour)
    mde = base.mark_tick(thickness=2, size=ROW - 8, color="currentColor").encode(x="mde:Q")
    zero = alt.Chart(values([{"x": 0}])).mark_rule(opacity=0.5).encode(x="x:Q")
    layers = alt.layer(band, zero, interval, mde, point)
    return layers.properties(width=WIDTH, height=ROW * len(rows))


def _bent(cost: float, reach: float) -> float:
    """A log cost as a relative one, cut at the reach of the plot."""
    return math.expm1(min(max(cost, -reach), reach))


def evidence(rows: Sequence[CaseReport]) -> Any:
    """A panel a case: the three e-values after every block, with the lines they must reach."""
    names = ("worse", "not worse", "better")
    table = [
        {"case": row.label, "block": block, "against": name, "e": max(e, 1e-3)}
        for row in rows
        for block, es in enumerate(row.evidence.path, start=1)
        for name, e in zip(names, es, strict=True)
    ]
    lines = [
        {"case": row.label, "line": line}
        for row in rows
        for line in (row.session.thresholds.clear, row.session.thresholds.reject_null)
    ]
    colour = alt.Color(
        "against:N",
        title="evidence that B is",
        scale=alt.Scale(domain=list(names), range=[*_SIDES]),
        legend=alt.Legend(orient="top"),
    )
    path = (
        alt.Chart()
        .mark_line(point=True)
        .encode(
            x=alt.X("block:Q", title="blocks", axis=alt.Axis(tickMinStep=1)),
            y=alt.Y(
                "e:Q", title="e-value", scale=alt.Scale(type="log"), axis=alt.Axis(format="~g")
            ),
            color=colour,
        )
    )
    threshold = alt.Chart().mark_rule(strokeDash=[4, 3], color="currentColor", opacity=0.6)
    height = threshold.encode(y="line:Q")
    merged = [*table, *lines]
    layered = alt.layer(path, height, data=values(merged)).properties(width=PANEL, height=120)
    return _panels(layered, rows)


_SIDES = ("#d1433d", "#2f9e6b", "#3f83d6")


def slopes(rows: Sequence[CaseReport]) -> Any:
    """A panel a case: both arms of every block in the order they ran, joined."""
    table = [
        {
            "case": row.label,
            "block": block.index + 1,
            "place": block.index + 1 + 0.5 * place / max(len(block.order) - 1, 1),
            "arm": arm,
            "value": value,
            "state": "dropped" if block.invalid else "used",
        }
        for row in rows
        for block in row.blocks
        for place, (arm, value) in enumerate(zip(block.order, block.values, strict=False))
    ]
    x = alt.X("place:Q", title="run order, by block", axis=alt.Axis(tickMinStep=1))
    # Digits enough for a panel whose values are all the same.
    axis = alt.Axis(format=".4~g")
    y = alt.Y("value:Q", title=None, axis=axis, scale=alt.Scale(zero=False))
    opacity = alt.Opacity(
        "state:N", scale=alt.Scale(domain=["used", "dropped"], range=[1, 0.25]), legend=None
    )
    line = (
        alt.Chart()
        .mark_line(color="currentColor", strokeWidth=1)
        .encode(x=x, y=y, detail="block:N", opacity=alt.value(0.5))
    )
    arms = alt.Scale(domain=["A", "B"], range=[ARM_A, ARM_B])
    shapes = alt.Scale(domain=["A", "B"], range=["circle", "square"])
    legend = alt.Legend(orient="top", title="arm")
    point = (
        alt.Chart()
        .mark_point(filled=True, size=45, aria=False)
        .encode(
            x=x,
            y=y,
            color=alt.Color("arm:N", scale=arms, legend=legend),
            shape=alt.Shape("arm:N", scale=shapes, legend=legend),
            opacity=opacity,
        )
    )
    layered = alt.layer(line, point, data=values(table)).properties(width=PANEL, height=120)
    return _panels(layered, rows).resolve_scale(y="independent")


def _panels(layered: Any, rows: Sequence[CaseReport]) -> Any:
    order = [row.label for row in rows]
    facet = alt.Facet("case:N", title=None, sort=order)
    return layered.facet(facet=facet, columns=COLUMNS).resolve_scale(x="independent")
