"""Charts as SVG for a page: no script, no network, readable on dark and light backgrounds.

A figure is a list of panels. Each is an SVG of its own, so that the page can lay out as many side
by side as fit; the legend is text above them.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import altair as alt
import vl_convert
from altair.utils import schemapi

from harness.bench.stats.bench_verdict import BenchVerdict

schemapi.disable_debug_mode()  # a chart is validated once, as a whole, and not each of its parts

WORSE, BETTER = "#d1433d", "#3f83d6"
VERDICT_COLOURS = {
    BenchVerdict.REGRESSED: WORSE,
    BenchVerdict.OK: "#2f9e6b",
    BenchVerdict.IMPROVED: BETTER,
    BenchVerdict.BLIND: "#6b6f76",
    BenchVerdict.INCONCLUSIVE: "#c08a1e",
    BenchVerdict.INVALID: "#8b8f96",
}
VERDICT_SHAPES = {
    BenchVerdict.REGRESSED: "triangle-up",
    BenchVerdict.OK: "circle",
    BenchVerdict.IMPROVED: "diamond",
    BenchVerdict.BLIND: "triangle-down",
    BenchVerdict.INCONCLUSIVE: "square",
    BenchVerdict.INVALID: "cross",
}
GLYPHS = {
    "triangle-up": "▲",
    "triangle-down": "▼",
    "circle": "●",
    "diamond": "◆",
    "square": "■",
    "cross": "✚",
}
ARMS = {"A": ("#a06fd0", "circle"), "B": ("#1b9aaa", "square")}
"""Colour and shape; no verdict has these colours."""
WIDTH, HEIGHT, ROW = 284, 180, 26
"""Of a panel with its axes, and of one of its rows, in pixels: one panel fits on a telephone."""
FONT_SIZE = 12
MOST_TICKS = 5
_TEXT = {"labelColor": "currentColor", "titleColor": "currentColor", "titleFontWeight": 600,
         "labelFontSize": FONT_SIZE, "titleFontSize": FONT_SIZE}  # fmt: skip
CONFIG: dict[str, Any] = {
    "aria": False,
    "background": None,
    # The first three are equally wide, so that a label measured here fits there.
    "font": "Liberation Sans, Arial, Helvetica, sans-serif",
    "view": {"stroke": "currentColor", "strokeOpacity": 0.15},
    "axis": _TEXT | {"gridColor": "currentColor", "gridOpacity": 0.1, "domainOpacity": 0.3,
                     "domainColor": "currentColor", "tickColor": "currentColor", "tickOpacity": 0.3,
                     "labelLimit": 0, "labelOverlap": "greedy", "labelSeparation": 6},
    "legend": {"disable": True},
    "text": {"color": "currentColor", "fontSize": FONT_SIZE},
}  # fmt: skip


@dataclass(frozen=True)
class LegendKey:
    """One entry of a legend: a glyph in its colour, and its name."""

    glyph: str
    colour: str
    name: str


@lru_cache(maxsize=256)
def _drawn(chart: str) -> str:
    """SVG of a chart's JSON; the same one stands on a page and in a file."""
    return str(vl_convert.vegalite_to_svg(chart))


@dataclass(frozen=True)
class Panel:
    """One chart under its title."""

    title: str
    chart: Any

    def svg(self, label: str) -> str:
        """The chart as one SVG element, coloured by the page around it.

        Args:
            label: for screen readers.
        """
        fitted = {"autosize": {"type": "fit", "contains": "padding"}, "config": CONFIG}
        chart = self.chart.to_dict() | fitted
        drawn = _drawn(json.dumps(chart))
        told = f'role="img" aria-label="{html.escape(label)}"'
        return drawn.replace("<svg ", f'<svg {told} style="--natural: {chart["width"]}px" ', 1)


@dataclass(frozen=True)
class Drawing:
    """Panels with one legend.

    Args:
        panels: none of them empty.
        keys: of the legend.
        notes: a sentence about each group that needs no chart.
    """

    panels: tuple[Panel, ...]
    keys: tuple[LegendKey, ...] = ()
    notes: tuple[str, ...] = ()


def values(rows: Sequence[dict[str, Any]]) -> alt.InlineData:
    """Rows of a chart; a chart without rows must not be drawn."""
    return alt.InlineData(values=list(rows))


def verdicts(field: str = "verdict") -> dict[str, Any]:
    """Colour and shape of a verdict, distinct without colours too."""
    names = [str(verdict) for verdict in BenchVerdict]
    colours = alt.Scale(domain=names, range=list(VERDICT_COLOURS.values()))
    shapes = alt.Scale(domain=names, range=list(VERDICT_SHAPES.values()))
    return {
        "color": alt.Color(f"{field}:N", scale=colours),
        "shape": alt.Shape(f"{field}:N", scale=shapes),
    }


def verdict_keys(seen: Iterable[BenchVerdict]) -> tuple[LegendKey, ...]:
    """Of the verdicts that are there."""
    known = set(seen)
    return tuple(
        LegendKey(GLYPHS[VERDICT_SHAPES[r]], VERDICT_COLOURS[r], str(r))
        for r in BenchVerdict
        if r in known
    )


def arms() -> dict[str, Any]:
    """Colour and shape of the field "arm"."""
    colours, shapes = zip(*ARMS.values(), strict=True)
    return {
        "color": alt.Color("arm:N", scale=alt.Scale(domain=[*ARMS], range=[*colours])),
        "shape": alt.Shape("arm:N", scale=alt.Scale(domain=[*ARMS], range=[*shapes])),
    }


def arm_keys() -> tuple[LegendKey, ...]:
    """Of both arms."""
    return tuple(
        LegendKey(GLYPHS[shape], colour, f"arm {a}") for a, (colour, shape) in ARMS.items()
    )


def percent_axis(title: str, domain: tuple[float, float] | None = None) -> dict[str, Any]:
    """A scale that need not hold zero, and a few ticks in signed percent."""
    if domain is None:
        axis = alt.Axis(format="+.1%", tickCount=5)
        return {"title": title, "axis": axis, "scale": alt.Scale(zero=False)}
    low, high = domain
    least = (high - low) / MOST_TICKS
    decade = 10.0 ** math.floor(math.log10(least))
    step = next(decade * n for n in (1, 2, 2.5, 5, 10) if decade * n >= least)
    ticks = [round(n * step, 9) for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
    decimals = len(f"{100 * step:.9f}".rstrip("0").partition(".")[2])
    axis = alt.Axis(format=f"+.{decimals}%", values=ticks)
    return {"title": title, "axis": axis, "scale": alt.Scale(domain=[low, high], nice=False)}


def reach(numbers: Iterable[float | None], room: float = 1.1) -> tuple[float, float]:
    """A domain of all finite numbers and zero, with a margin."""
    known = [n for n in numbers if n is not None and math.isfinite(n)]
    low, high = min(0.0, *known), max(0.0, *known)
    spare = (room - 1) * (high - low) or 0.01
    return low - spare, high + spare


def split(
    rows: Iterable[Mapping[str, Any]], field: str, value: str
) -> tuple[dict[str, list[dict[str, Any]]], tuple[str, ...]]:
    """Rows by a field, and a sentence on each group whose value never changes."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row[field], []).append(dict(row))
    level = {name: here for name, here in groups.items() if len({row[value] for row in here}) == 1}
    notes = tuple(f"{name}: {here[0][value]:.4g} in every trial." for name, here in level.items())
    return {name: here for name, here in groups.items() if name not in level}, notes
