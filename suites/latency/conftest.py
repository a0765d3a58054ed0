"""What a run measured: printed as a table at its end, and written to ``--latency-json``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.table import Table as Printed

from fixtures.latency.latency import Table
from harness.core.environment import environment

MEASURED = Table()
OPTION, DEFAULT = "--latency-json", Path("report", "latency.json")
COLUMNS = ("what", "point", "arm", "value", "low", "high", "floor")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the figures go."""
    parser.addoption(OPTION, type=Path, default=DEFAULT, metavar="FILE", help="of latencies")


@pytest.fixture(scope="session")
def latency_table(cuda: torch.device) -> Table:
    """Where tests enter their figures."""
    MEASURED.device = environment(str(cuda)).device
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
    path: Path = config.getoption(OPTION, DEFAULT)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(MEASURED), indent=1) + "\n")


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
