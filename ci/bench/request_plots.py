"""Plots of requests, of TPOT's parts and of the machine's conditions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import altair as alt
import numpy as np

from ci.bench.case_report import CaseReport
from ci.bench.charts import (
    BETTER,
    HEIGHT,
    ROW,
    WIDTH,
    WORSE,
    Drawing,
    LegendKey,
    Panel,
    arm_keys,
    arms,
    percent_axis,
    reach,
    split,
    values,
)
from harness.bench.analysis_blocks import complete
from harness.bench.session_records import Sample, Session, Trial
from harness.bench.stats.decomposition import decompose
from harness.bench.wording import percent

DECILES = tuple(range(10, 100, 10))
HALVES = ("tpot", "step_time", "accept_length")
PARTS = ("step time", "accept length", "rest", "TPOT")
WAYS = {"slower": WORSE, "faster": BETTER}


def ttft(sample: Sample) -> float | None:
    """Time to the first chunk, ms."""
    return sample.ttft_ms


def tpot(sample: Sample) -> float | None:
    """Time per output token after the first, ms; None where there is only one token."""
    rest = sample.completion_tokens - 1
    return (sample.latency_ms - sample.ttft_ms) / rest if rest > 0 else None


REQUEST_TIMES: tuple[tuple[str, Callable[[Sample], float | None]], ...] = (
    ("TTFT", ttft),
    ("TPOT", tpot),
)


def shifts(session: Session, trials: Iterable[Trial]) -> list[dict[str, Any]]:
    """Relative shift from A to B of every decile: median, least and largest over the blocks.

    Requests of one launch are not independent, so a block is one observation; blocks with an
    invalid trial, and those that an interruption cut off, are left out.
    """
    by_workload: defaultdict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        if trial.session == session.id:
            by_workload[trial.workload].append(trial)
    rows: list[dict[str, Any]] = []
    for workload, mine in by_workload.items():
        whole = complete(session, mine).values()
        blocks = [block for block in whole if not any(trial.invalid for trial in block)]
        for name, time in REQUEST_TIMES:
            found = [shift for block in blocks if (shift := _shift(block, time)) is not None]
            rows += _spread(workload, name, np.array(found)) if found else []
    return rows


def _shift(block: Sequence[Trial], time: Callable[[Sample], float | None]) -> Any:
    def deciles(arm: str) -> Any:
        seen = [time(sample) for trial in block if trial.arm == arm for sample in trial.samples]
        known = [one for one in seen if one is not None and one > 0]
        return np.percentile(known, DECILES) if known else None

    a, b = deciles("A"), deciles("B")
    return None if a is None or b is None else b / a - 1


def _spread(workload: str, name: str, found: Any) -> Iterator[dict[str, Any]]:
    for place, decile in enumerate(DECILES):
        column = found[:, place]
        yield {
            "panel": f"{workload}: {name}",
            "decile": decile,
            "shift": float(np.median(column)),
            "low": float(column.min()),
            "high": float(column.max()),
        }


def shift_plot(rows: Sequence[dict[str, Any]]) -> Drawing:
    """One panel per workload and time: the shift of every decile, and its range over the blocks."""
    ends = reach(row[end] for row in rows for end in ("low", "high"))
    places = groupby(rows, key=lambda row: row["panel"])
    return Drawing(tuple(Panel(place, _shift_plot([*here], ends)) for place, here in places))


def _shift_plot(rows: Sequence[dict[str, Any]], ends: tuple[float, float]) -> Any:
    axis = alt.Axis(values=[10, 30, 50, 70, 90], format="d")
    x = alt.X("decile:Q", title="percentile of requests", axis=axis)
    shift = percent_axis("change from A to B", ends)
    band = alt.Chart().mark_area(opacity=0.2, color="currentColor")
    line = alt.Chart().mark_line(point={"color": "currentColor"}, color="currentColor")
    zero = alt.Chart().mark_rule(color="currentColor", opacity=0.5).encode(y=alt.datum(0))
    layers = alt.layer(
        band.encode(x=x, y=alt.Y("low:Q", **shift), y2="high:Q"),
        zero,
        line.encode(x=x, y=alt.Y("shift:Q", **shift)),
        data=values(rows),
    )
    return layers.properties(width=WIDTH, height=HEIGHT)


FACTS = (("mhz", "SM clock, MHz"), ("celsius", "GPU, °C"), ("load", "host load / cores"))


def conditions(trials: Iterable[Trial]) -> list[dict[str, Any]]:
    """Conditions of the machine in every trial, in run order; unknown facts are absent."""
    return [
        {"fact": title, "trial": place, "arm": trial.arm, "value": value}
        for place, trial in enumerate(trials, start=1)
        for name, title in FACTS
        if (value := getattr(trial.conditions, name)) is not None
    ]


def conditions_plot(rows: Sequence[dict[str, Any]]) -> Drawing:
    """One panel per fact: its value in every trial of the run, in run order."""
    panels, notes = split(rows, "fact", "value")
    drawn = tuple(Panel(fact, _conditions(here)) for fact, here in panels.items())
    return Drawing(drawn, arm_keys() if drawn else (), notes)


def _conditions(rows: Sequence[dict[str, Any]]) -> Any:
    trials = alt.Axis(tickMinStep=1, tickCount=5, format="d")
    axis = alt.Axis(format=".4~g", tickCount=5)
    return (
        alt.Chart(values(rows))
        .mark_point(filled=True, size=20, opacity=0.9)
        .encode(
            x=alt.X("trial:Q", title="trials, in run order", axis=trials),
            y=alt.Y("value:Q", title=None, axis=axis, scale=alt.Scale(zero=False)),
            **arms(),
        )
        .properties(width=WIDTH, height=HEIGHT)
    )


def halves(rows: Sequence[CaseReport]) -> list[dict[str, Any]]:
    """Steps of every workload's waterfall, in log units of TPOT: where each bar starts and ends."""
    by_case = {(row.session.id, row.workload.id, row.metric): row for row in rows}
    steps = []
    for session, workload in dict.fromkeys((row.session.id, row.workload.id) for row in rows):
        found = [by_case.get((session, workload, metric)) for metric in HALVES]
        if any(row is None or not row.evidence.blocks for row in found):
            continue
        evidence = [row.evidence for row in found if row is not None]
        parts = decompose(*evidence)
        level = 0.0
        for name, size in zip(PARTS, (parts.step, parts.accept, parts.rest), strict=False):
            steps.append(_bar(workload, name, level, level + size))
            level += size
        steps.append(_bar(workload, "TPOT", 0.0, level) | {"cause": parts.cause})
    return steps


def _bar(workload: str, part: str, start: float, end: float) -> dict[str, Any]:
    way = "slower" if end > start else "faster"
    ends = {"start": math.expm1(start), "end": math.expm1(end)}
    told = {"right": max(ends.values()), "size": percent(math.exp(end - start))}
    return {"workload": workload, "part": part, "way": way, "cause": ""} | ends | told


def waterfall(steps: Sequence[dict[str, Any]]) -> Drawing:
    """One panel per workload: step time, accept length and the rest add up to TPOT."""
    ends = reach((row[end] for row in steps for end in ("start", "end")), room=1.45)
    places = groupby(steps, key=lambda row: row["workload"])
    panels = tuple(Panel(place, _waterfall([*here], ends)) for place, here in places)
    return Drawing(panels, tuple(LegendKey("■", colour, way) for way, colour in WAYS.items()))


def _waterfall(steps: Sequence[dict[str, Any]], ends: tuple[float, float]) -> Any:
    ways = alt.Scale(domain=[*WAYS], range=[*WAYS.values()])
    base = alt.Chart(values(steps)).encode(y=alt.Y("part:N", title=None, sort=PARTS))
    bar = base.mark_bar(size=ROW - 8).encode(
        x=alt.X("start:Q", **percent_axis("effect on TPOT", ends)),
        x2="end:Q",
        color=alt.Color("way:N", scale=ways),
        opacity=alt.condition("datum.part == 'TPOT'", alt.value(1), alt.value(0.6)),
    )
    size = base.mark_text(align="left", dx=5).encode(x="right:Q", text="size:N")
    return alt.layer(bar, size).properties(width=WIDTH, height=ROW * len(PARTS) + 56)
