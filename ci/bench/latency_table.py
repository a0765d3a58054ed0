"""Figures of the latency suite, which times kernels and metadata without a server."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import UsageError

LATENCY_FILE = "latency.json"


@dataclass(frozen=True, kw_only=True)
class LatencyFigure:
    """A median over interleaved blocks of one run, in microseconds, and its 95 % interval."""

    what: str
    point: str
    arm: str
    value: float
    low: float
    high: float
    blocks: int
    sku: str

    @property
    def name(self) -> str:
        """Unique over a file and over kinds of machines."""
        return f"{self.what}: {self.arm} {self.point} @ {self.sku}"


def read(path: Path) -> list[LatencyFigure]:
    """Figures of a ``latency.json`` in its order; none where there is no file.

    Raises:
        UsageError: it holds something else.
    """
    if not path.is_file():
        return []
    try:
        table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return [_figure(row, table["device"]) for row in table["rows"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: not what the latency suite writes ({error!r})") from error


def _figure(row: dict[str, Any], sku: str) -> LatencyFigure:
    value, low, high = (float(row[name]) for name in ("value", "low", "high"))
    what, point, arm = (str(row[name]) for name in ("what", "point", "arm"))
    return LatencyFigure(
        what=what, point=point, arm=arm,
        value=value, low=low, high=high, blocks=int(row["blocks"]), sku=sku,
    )  # fmt: skip
