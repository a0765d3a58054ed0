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
    FA3,
    GRAPH,
    NEIGHBOURS,
    Calls,
    attention,
    beside_fa3,
    draft_extend,
    floor,
)
from fixtures.latency.timing import median, ratio
from fixtures.tables.latency import ATTENTION, VERIFIED, Attention
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


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
@pytest.mark.parametrize("row", VERIFIED, ids=lambda row: row.id)
def test_fa3_verifies_the_same(
    row: Attention, warm: bool, cuda: torch.device, latency_table: Table
) -> None:
    if torch.cuda.get_device_capability(cuda)[0] != 9:
        pytest.skip("FlashAttention 3 is for Hopper")
    calls = Calls(row, FlashInferXQA(cuda), cuda)
    decoded, expected = calls.decode().float(), calls.fa3().float()
    assert (decoded - expected).norm() < 1e-2 * expected.norm()
    samples = beside_fa3(calls, cuda, warm)
    caches = "warm" if warm else "cold"
    latency_table.enter(f"verify beside FA3, {caches} caches, device", row.id, samples)
    around = median(samples[NEIGHBOURS]).value
    decode, fa3 = (median(samples[arm]).value - around for arm in (DECODE, FA3))
    latency_table.lines.append(
        f"verify {row.id}, {caches} caches: decode {decode:.2f} µs, FA3 {fa3:.2f} µs"
    )


def test_a_graph_extends_the_draft_faster(cuda: torch.device, latency_table: Table) -> None:
    samples = draft_extend(cuda)
    latency_table.enter("draft extend v2, until done", "4K-bs3", samples)
    gain = ratio(samples[EAGER], samples[GRAPH])
    line = f"eager {median(samples[EAGER])} µs, graph {median(samples[GRAPH])} µs, gain {gain}"
    latency_table.lines.append(f"draft extend v2: {line}")
    assert gain.low > 1, line
