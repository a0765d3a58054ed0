"""Stamps in a graph time its phases as CUDA's events do, and cost a few empty kernels."""

from __future__ import annotations

import pytest
import torch

from fixtures.latency.latency import Table
from fixtures.latency.latency_phases import cost, phases
from fixtures.latency.timing import ratio
from fixtures.tables.latency import (
    CONFIDENCE,
    EMPTY,
    PHASE_SHARE,
    PHASE_US,
    STAMPS,
    STAMPS_AT_MOST,
)


def test_stamps_agree_with_events(cuda: torch.device, latency_table: Table) -> None:
    for phase, (stamped, timed) in phases(cuda).items():
        line = f"wait in {phase.name.lower()}: stamps {stamped:.4g} µs, events {timed:.4g} µs"
        latency_table.lines.append(line)
        assert stamped == pytest.approx(timed, rel=PHASE_SHARE, abs=PHASE_US), line


def test_a_stamp_costs_little(cuda: torch.device, latency_table: Table) -> None:
    samples = cost(cuda)
    latency_table.enter("stamps, device", "in a graph", samples)
    found = ratio(samples[STAMPS], samples[EMPTY], CONFIDENCE)
    line = f"{STAMPS} / {EMPTY} = {found}, at most {STAMPS_AT_MOST:g}"
    latency_table.lines.append(line)
    assert found.high <= STAMPS_AT_MOST, line
