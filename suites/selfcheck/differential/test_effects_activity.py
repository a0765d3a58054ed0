"""Rows of a GPU's profile are counted as what the host asked for and what the GPU did."""

from __future__ import annotations

import warnings

import pytest

from fixtures.tables.budgets import DEVICE
from harness.graphs.effects import reported_waits
from harness.graphs.gpu_profile import Activity, ProfileRow, tally

ROWS = (
    ProfileRow("cudaLaunchKernel", False, 1),
    ProfileRow("fill", True, 1),
    ProfileRow("cudaGraphLaunch", False, 2),
    ProfileRow("metadata", True, 2),
    ProfileRow("attention", True, 2),
    ProfileRow("attention", True, 2),
    ProfileRow("Memset (Device)", True, 2),
    ProfileRow("cudaGraphLaunch_v10000", False, 3),
    ProfileRow("attention", True, 3),
    ProfileRow("cudaMemcpyAsync", False, 4),
    ProfileRow("Memcpy DtoH (Device -> Pageable)", True, 4),
    ProfileRow("cudaMemcpyAsync", False, 5),
    ProfileRow("Memcpy DtoD (Device -> Device)", True, 5),
    ProfileRow("cudaStreamSynchronize", False, 6),
    ProfileRow("cudaDeviceSynchronize", False, 7),
    ProfileRow("Context Sync", True, 7),
    ProfileRow("Stream Wait", True, 8),
    ProfileRow("Stream Sync", True, 9),
    ProfileRow("Event Sync", True, 10),
    ProfileRow("stray", True, 99),
)


def test_graphs_are_told_apart_from_launches() -> None:
    found = tally(ROWS)
    told = "a wait of a stream or for an event is no work of the GPU"
    assert not [name for name in found.done if name.endswith((" Wait", " Sync"))], told
    assert found.kernels == {"fill": 1, "metadata": 1, "attention": 3, "stray": 1}
    assert sorted(found.launched) == [
        "Memcpy DtoD (Device -> Device)",
        "Memcpy DtoH (Device -> Pageable)",
        "fill",
        "stray",
    ]
    assert found.copies == {"DtoH": 1, "DtoD": 1}
    assert (found.graph_launches, found.replayed) == (2, 5)
    assert found.waits == {"cudaStreamSynchronize": 1}


@pytest.mark.parametrize(
    ("messages", "names", "lines"),
    [
        (["called a synchronizing CUDA operation (Triggered internally)"], ("D", "S"), 1),
        (["does not yet detect all synchronizing operations"], (), 0),
        ([], ("D",), 1),
        ([], ("S",), 1),
        (["called a synchronizing CUDA operation"], ("D", "D", "S", "S"), 2),
    ],
)
def test_each_wait_is_reported_once(
    messages: list[str], names: tuple[str, ...], lines: int
) -> None:
    rows = {
        "D": ProfileRow("Memcpy DtoH (Device -> Pageable)", True, 1),
        "S": ProfileRow("cudaStreamSynchronize", False, 2),
    }
    told = [warnings.WarningMessage(UserWarning(text), UserWarning, "f.py", 7) for text in messages]
    found = reported_waits(told, tally(rows[name] for name in names))
    assert len(found) == lines
    assert all("f.py:7" in line for line in found[: len(messages)])


def test_copies_to_pageable_and_to_pinned_memory_are_copies_to_the_host() -> None:
    names = ["Memcpy DtoH (Device -> Pageable)"] * 2 + ["Memcpy DtoH (Device -> Pinned)"]
    found = tally(ProfileRow(name, True, i) for i, name in enumerate(names))
    assert found.copies == {"DtoH": 3}, "copies of a direction add up, whatever memory they reach"
    assert len(reported_waits([], found)) == 3


def test_nothing_is_nothing() -> None:
    assert tally(()) == Activity()
    assert reported_waits([], Activity()) == []


def test_a_launch_outside_the_graph_or_a_read_is_over_a_devices_budget() -> None:
    for row in DEVICE.values():
        counts = dict(row.counts)
        assert row.over(counts) == {}
        allowed = counts["launched"]
        assert row.over(counts | {"launched": allowed + 1}) == {"launched": (allowed + 1, allowed)}
        assert row.over(counts | {"host_syncs": 1}) == {"host_syncs": (1, 0)}
        assert row.over(counts | {"graph_launches": 2}) == {"graph_launches": (2, 1)}
