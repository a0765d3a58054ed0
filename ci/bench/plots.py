"""Plots of a run: every verdict with its margins, its evidence and its blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import altair as alt

from ci.bench.case_report import CaseReport, relative
from ci.bench.charts import (
    HEIGHT,
    ROW,
    VERDICT_COLOURS,
    WIDTH,
    Drawing,
    LegendKey,
    Panel,
    arm_keys,
    arms,
    percent_axis,
    split,
    values,
    verdict_keys,
    verdicts,
)
from harness.bench.stats.bench_verdict import BenchVerdict

REACH = 1.6
"""Range of a forest in units of its largest estimate or margin; longer intervals are cut."""
AGAINST = {
    "worse": VERDICT_COLOURS[BenchVerdict.REGRESSED],
    "not worse": VERDICT_COLOURS[BenchVerdict.OK],
    "better": VERDICT_COLOURS[BenchVerdict.IMPROVED],
}
LEAST_E = 1e-3


def forest(rows: Sequence[CaseReport]) -> Drawing:
    """One panel per session and workload, one row per metric: B / A, its interval, δ0 to δ1, MDE.

    Every panel has the same scale.
    """
    far = [abs(x) for row in rows for x in (row.cost, row.bounds.delta1, row.finding.mde or 0.0)]
    reach = REACH * max(x for x in far if math.isfinite(x))
    ends = math.expm1(-reach), math.expm1(reach)
    places: dict[str, list[CaseReport]] = {}
    for row in rows:
        places.setdefault(f"{row.session.id}: {row.workload.id}", []).append(row)
    panels = tuple(Panel(place, _forest(here, reach, ends)) for place, here in places.items())
    return Drawing(panels, verdict_keys(row.verdict for row in rows))


def _forest(rows: Sequence[CaseReport], reach: float, ends: tuple[float, float]) -> Any:
    table = [
        {
            "metric": row.metric_and_direction,
            "change": _bent(row, row.cost, reach),
            "low": min(_bent(row, bound, reach) for bound in row.interval),
            "high": max(_bent(row, bound, reach) for bound in row.interval),
            "delta0": relative(row.bounds.delta0, row.higher_is_better),
            "delta1": relative(row.bounds.delta1, row.higher_is_better),
            "mde": None if row.finding.mde is None else _bent(row, row.finding.mde, reach),
            "verdict": str(row.verdict),
            "bounded": all(map(math.isfinite, row.interval)),
        }
        for row in rows
    ]
    base = alt.Chart(values(table)).encode(
        y=alt.Y("metric:N", title=None, sort=[row.metric_and_direction for row in rows])
    )
    band = base.mark_bar(opacity=0.2, color="currentColor", height=ROW - 6).encode(
        x=alt.X("delta0:Q", **percent_axis("change from A to B", ends)), x2="delta1:Q"
    )
    colour = verdicts()
    interval = base.mark_rule(strokeWidth=2).encode(
        x="low:Q",
        x2="high:Q",
        color=colour["color"],
        opacity=alt.condition("datum.bounded", alt.value(1), alt.value(0.2)),
    )
    point = base.mark_point(filled=True, size=90, opacity=1).encode(x="change:Q", **colour)
    mde = base.mark_tick(thickness=2, size=ROW - 8, color="currentColor").encode(x="mde:Q")
    zero = alt.Chart(values([{"x": 0}])).mark_rule(opacity=0.5, color="currentColor")
    layers = alt.layer(band, zero.encode(x="x:Q"), interval, mde, point)
    return layers.properties(width=WIDTH, height=ROW * len(rows) + 56)


def _bent(row: CaseReport, cost: float, reach: float) -> float:
    """A log cost as a change of the metric, cut at the reach of the plot."""
    return relative(min(max(cost, -reach), reach), row.higher_is_better)


def evidence(rows: Sequence[CaseReport]) -> Drawing:
    """One panel per case: the three e-values after every block, with their thresholds."""
    lines = {x for row in rows for x in _thresholds(row)}
    most = max(*lines, *(e for row in rows for es in row.evidence.path for e in es))
    decades = [10.0**power for power in range(-3, math.ceil(math.log10(most)) + 1)]
    panels = tuple(Panel(row.label, _evidence(row, decades)) for row in rows)
    return Drawing(panels, tuple(LegendKey("●", colour, name) for name, colour in AGAINST.items()))


def _thresholds(row: CaseReport) -> tuple[float, float]:
    return row.session.thresholds.accept_equivalence, row.session.thresholds.reject_null


def _evidence(row: CaseReport, decades: Sequence[float]) -> Any:
    table = [
        {"block": block, "against": name, "e": max(e, LEAST_E)}
        for block, es in enumerate(row.evidence.path, start=1)
        for name, e in zip(AGAINST, es, strict=True)
    ]
    scale = alt.Scale(type="log", domain=[decades[0], decades[-1]], nice=False)
    axis = alt.Axis(format="~g", values=decades[:: 1 + len(decades) // 9])
    colours = alt.Scale(domain=[*AGAINST], range=[*AGAINST.values()])
    path = (
        alt.Chart(values(table))
        .mark_line(point=True)
        .encode(
            x=alt.X("block:Q", title="blocks", axis=alt.Axis(tickMinStep=1, format="d")),
            y=alt.Y("e:Q", title="e-value", scale=scale, axis=axis),
            color=alt.Color("against:N", scale=colours),
        )
    )
    line = alt.Chart(values([{"line": line} for line in _thresholds(row)])).mark_rule(
        strokeDash=[4, 3], color="currentColor", opacity=0.6
    )
    return alt.layer(path, line.encode(y="line:Q")).properties(width=WIDTH, height=HEIGHT)


def slopes(rows: Sequence[CaseReport]) -> Drawing:
    """One panel per case: both arms of every block in the order they ran, joined.

    A block in which a trial left no number is not drawn.
    """
    table = [
        {
            "case": f"{row.label}, {row.unit}" if row.unit else row.label,
            "block": block.index + 1,
            "place": block.index + 1 + 0.5 * place / max(len(block.order) - 1, 1),
            "arm": arm,
            "value": value,
            "state": "dropped" if block.invalid else "used",
        }
        for row in rows
        for block in row.blocks
        if len(block.values) == len(block.order)  # else nobody knows whose they are
        for place, (arm, value) in enumerate(zip(block.order, block.values, strict=True))
    ]
    panels, notes = split(table, "case", "value")
    drawn = tuple(Panel(case, _slopes(here)) for case, here in panels.items())
    return Drawing(drawn, arm_keys(), notes)


def _slopes(table: Sequence[dict[str, Any]]) -> Any:
    x = alt.X("place:Q", title="blocks, in run order", axis=alt.Axis(tickMinStep=1, format="d"))
    axis = alt.Axis(format=".4~g", tickCount=5)
    y = alt.Y("value:Q", title=None, axis=axis, scale=alt.Scale(zero=False))
    states = alt.Scale(domain=["used", "dropped"], range=[1, 0.25])
    line = (
        alt.Chart()
        .mark_line(color="currentColor", strokeWidth=1)
        .encode(x=x, y=y, detail="block:N", opacity=alt.value(0.5))
    )
    point = (
        alt.Chart()
        .mark_point(filled=True, size=30)
        .encode(x=x, y=y, opacity=alt.Opacity("state:N", scale=states), **arms())
    )
    layers = alt.layer(line, point, data=values(table))
    return layers.properties(width=WIDTH, height=HEIGHT)
