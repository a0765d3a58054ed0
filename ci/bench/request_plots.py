"""Plots of requests and of TPOT's halves: which part of a distribution moved, and why."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import altair as alt
import numpy as np

from ci.bench.case_report import CaseReport
from ci.bench.charts import (
    ARM_A,
    ARM_B,
    BETTER,
    COLUMNS,
    PANEL,
    WORSE,
    percent_axis,
    values,
)
from harness.bench.session_records import Sample, Session, Trial
from harness.bench.stats.decomposition import decompose

DECILES = tuple(range(10, 100, 10))
HALVES = ("tpot", "step_time", "accept_length")
PARTS = ("step time", "accept length", "rest", "TPOT")


def ttft(sample: Sample) -> float | None:
    """Time to the first chunk, ms."""
    return sample.ttft_ms


def tpot(sample: Sample) -> float | None:
    """Time per token behind the first chunk's first, ms; None where there is but one token."""
    rest = sample.completion_tokens - 1
    return (sample.latency_ms - sample.ttft_ms) / rest if rest > 0 else None


TIMES: tuple[tuple[str, Callable[[Sample], float | None]], ...] = (("TTFT", ttft), ("TPOT", tpot))


def shifts(session: Session, trials: Iterable[Trial]) -> list[dict[str, Any]]:
    """Relative shift from A to B of every decile: median, least and largest over the blocks.

    Requests of one launch share its luck, so a block is one observation; blocks with an invalid
    trial or without both arms are left out.
    """
    pairs: defaultdict[tuple[str, int], dict[str, list[Trial]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for trial in trials:
        if trial.session == session.id:
            pairs[trial.workload, trial.block][trial.arm].append(trial)
    rows: list[dict[str, Any]] = []
    for workload in dict.fromkeys(name for name, _ in pairs):
        blocks = [arms for (name, _), arms in pairs.items() if name == workload and _whole(arms)]
        for name, time in TIMES:
            found = [shift for arms in blocks if (shift := _shift(arms, time)) is not None]
            rows += _spread(workload, name, np.array(found)) if found else []
    return rows


def _whole(arms: dict[str, list[Trial]]) -> bool:
    trials = [trial for arm in ("A", "B") for trial in arms.get(arm, [])]
    return set(arms) == {"A", "B"} and not any(trial.invalid for trial in trials)


def _shift(arms: dict[str, list[Trial]], time: Callable[[Sample], float | None]) -> Any:
    def deciles(arm: str) -> Any:
        seen = [time(sample) for trial in arms[arm] for sample in trial.samples]
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


def shift_plot(rows: Sequence[dict[str, Any]]) -> Any:
    """A panel a workload and time: the shift of every decile, its range over the blocks behind."""
    x = alt.X("decile:Q", title="decile of requests", axis=alt.Axis(values=[10, 30, 50, 70, 90]))
    shift = percent_axis("shift from A to B")
    band = alt.Chart().mark_area(opacity=0.2).encode(x=x, y=alt.Y("low:Q", **shift), y2="high:Q")
    line = alt.Chart().mark_line(point=True).encode(x=x, y=alt.Y("shift:Q", **shift))
    zero = alt.Chart().mark_rule(color="currentColor", opacity=0.5).encode(y=alt.datum(0))
    layered = alt.layer(band, zero, line, data=values(rows)).properties(width=PANEL, height=120)
    return layered.facet(facet=alt.Facet("panel:N", title=None, sort=None), columns=COLUMNS)


FACTS = (("mhz", "SM clock, MHz"), ("celsius", "GPU, °C"), ("load", "host load / cores"))


def conditions(trials: Iterable[Trial]) -> list[dict[str, Any]]:
    """What the machine did during every trial, in run order; facts that nobody asked are absent."""
    return [
        {"fact": title, "trial": place, "arm": trial.arm, "value": value}
        for place, trial in enumerate(trials, start=1)
        for name, title in FACTS
        if (value := getattr(trial.conditions, name)) is not None
    ]


def conditions_plot(rows: Sequence[dict[str, Any]]) -> Any:
    """A panel a fact: its value in every trial of the night, both arms in the order they ran."""
    arms = alt.Scale(domain=["A", "B"], range=[ARM_A, ARM_B])
    point = (
        alt.Chart(values(rows))
        .mark_point(filled=True, size=30, opacity=0.9, aria=False)
        .encode(
            x=alt.X("trial:Q", title="trials, in run order", axis=alt.Axis(tickMinStep=1)),
            y=alt.Y("value:Q", title=None, scale=alt.Scale(zero=False)),
            color=alt.Color("arm:N", title="arm", scale=arms, legend=alt.Legend(orient="top")),
        )
        .properties(width=PANEL, height=110)
    )
    facet = alt.Facet("fact:N", title=None, sort=None)
    return point.facet(facet=facet, columns=COLUMNS).resolve_scale(y="independent")


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
    return {"workload": workload, "part": part, "way": way, "cause": ""} | ends


def waterfall(steps: Sequence[dict[str, Any]]) -> Any:
    """A panel a workload: step time, accept length and the rest add up to TPOT."""
    colour = alt.Color(
        "way:N",
        title=None,
        scale=alt.Scale(domain=["slower", "faster"], range=[WORSE, BETTER]),
        legend=alt.Legend(orient="top"),
    )
    bar = (
        alt.Chart(values(steps))
        .mark_bar(size=26)
        .encode(
            x=alt.X("part:N", title=None, sort=PARTS, axis=alt.Axis(labelAngle=-30)),
            y=alt.Y("start:Q", **percent_axis("effect on TPOT")),
            y2="end:Q",
            color=colour,
            opacity=alt.condition("datum.part == 'TPOT'", alt.value(1), alt.value(0.6)),
        )
    )
    panel = bar.properties(width=PANEL, height=130)
    return panel.facet(facet=alt.Facet("workload:N", title=None, sort=None), columns=COLUMNS)
