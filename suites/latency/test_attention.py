"""Verify and draft extend v2 are faster on the decode kernel, and draft extend in its graph."""

from __future__ import annotations

import pytest
import torch

from fixtures.latency.latency import Table
from fixtures.latency.latency_attention import (
    CONTEXT,
    COPY,
    DECODE,
    EAGER,
    GRAPH,
    Calls,
    attention,
    draft_extend,
    floor,
)
from fixtures.latency.timing import median, ratio
from fixtures.tables.latency import ATTENTION, Attention
from harness.kernels.flashinfer_xqa import FlashInferXQA


@pytest.mark.parametrize("row", ATTENTION, ids=lambda row: row.id)
def test_the_decode_kernel_verifies_faster(
    row: Attention, cuda: torch.device, latency_table: Table
) -> None:
    calls = Calls(row, FlashInferXQA(cuda), cuda)
    decoded, expected = calls.decode().float(), calls.context().float()
    assert (decoded - expected).norm() < 1e-2 * expected.norm()
    samples = attention(calls, cuda)
    least = floor(calls, median(samples[COPY]).value)
    latency_table.enter("verify or draft extend v2, device", row.id, samples, floor=least)
    gain = ratio(samples[CONTEXT], samples[DECODE])
    line = f"{row.id}: decode {median(samples[DECODE])} µs, floor {least:.3g}, gain {gain}"
    latency_table.lines.append(line)
    assert gain.low > row.least_gain, line


def test_a_graph_extends_the_draft_faster(cuda: torch.device, latency_table: Table) -> None:
    samples = draft_extend(cuda)
    latency_table.enter("draft extend v2, until done", "4K-bs3", samples)
    gain = ratio(samples[EAGER], samples[GRAPH])
    line = f"eager {median(samples[EAGER])} µs, graph {median(samples[GRAPH])} µs, gain {gain}"
    latency_table.lines.append(f"draft extend v2: {line}")
    assert gain.low > 1, line
