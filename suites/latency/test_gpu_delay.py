"""A wait on the GPU lasts as long as its memory says by the replay, and one of 0 costs a launch."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from fixtures.latency.latency import Samples, Table
from fixtures.latency.latency_waits import waits
from fixtures.latency.timing import median
from fixtures.tables.latency import WAITS, Wait


@cache
def measured(device: torch.device) -> Samples:
    return waits(WAITS, device)


@pytest.mark.parametrize("row", WAITS, ids=lambda row: row.id)
def test_a_wait_lasts_as_long_as_its_memory_says(
    row: Wait, cuda: torch.device, latency_table: Table
) -> None:
    samples = measured(cuda)[row.id]
    latency_table.enter("wait of an injected slowdown, device", row.id, {"specgate": samples})
    over = median(samples).value - row.microseconds
    assert row.least_over <= over <= row.most_over
