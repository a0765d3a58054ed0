"""What a run measured: printed as a table at its end, and written to ``report/latency.json``."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from rich.console import Console
from rich.table import Table as Printed

from fixtures.latency import Table

MEASURED = Table()
COLUMNS = ("what", "point", "arm", "value", "low", "high", "floor")


@pytest.fixture(scope="session")
def latency_table() -> Table:
    """Where tests enter their figures."""
    return MEASURED


def pytest_terminal_summary(config: pytest.Config) -> None:
    """Print and write the figures, if any were taken."""
    if not MEASURED.rows:
        return
    printed = Printed(*COLUMNS, title="latency, µs: medians and 95 % intervals")
    for row in MEASURED.rows:
        printed.add_row(*(_cell(row.get(column, "")) for column in COLUMNS))
    console = Console(width=120)
    console.print(printed)
    for line in MEASURED.lines:
        console.print(line, markup=False)
    path = config.rootpath / "report" / "latency.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(asdict(MEASURED), indent=1) + "\n")


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
