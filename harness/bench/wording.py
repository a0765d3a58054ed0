"""The wording of percent: a ratio as a change, a log effect as a size."""

from __future__ import annotations

import math


def percent(ratio: float | None, places: int = 1) -> str:
    """A ratio as a change, such as "+3.1 %"; "…" where it has no bound, "–" where there is none."""
    if ratio is None or math.isnan(ratio):
        return "–"
    return f"{100 * (ratio - 1):+.{places}f} %" if 0.0 < ratio < math.inf else "…"


def between(low: float, high: float, places: int = 1) -> str:
    """Bounds of a ratio as changes, such as "-1.1 to +6.9 %"; "–" where nothing is bounded."""
    ends = percent(low, places), percent(high, places)
    return "–" if ends == ("…", "…") else f"{ends[0].removesuffix(' %')} to {ends[1]}"


def size(log: float, places: int = 1) -> str:
    """A log effect of at least 0 as a share, such as "1.2 %"; "…" where it has no end."""
    return percent(math.exp(log), places).removeprefix("+")
