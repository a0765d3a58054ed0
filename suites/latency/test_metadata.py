"""Metadata of one decode iteration takes a fraction of the newest sglang's, all on the device."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from fixtures.latency.latency import Samples, Table, captured, judged, metadata
from fixtures.latency.latency_arms import OwnIteration
from fixtures.latency.latency_scene import set_scene
from fixtures.tables.latency import LIMITS, POINTS, USUAL, Limit, Point
from harness.graphs.effects import observe


@cache
def measured(point: Point, device: torch.device) -> tuple[Samples, Samples]:
    return metadata(point, device)


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.id)
def test_every_release_plans_what_we_plan(
    point: Point, cuda: torch.device, latency_table: Table
) -> None:
    on_device, on_host = measured(point, cuda)
    latency_table.enter("metadata, device", point.id, on_device)
    latency_table.enter("metadata, host before a replay", point.id, on_host)


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.id)
def test_limits_hold(limit: Limit, cuda: torch.device, latency_table: Table) -> None:
    found, line = judged(limit, measured(limit.point, cuda)[0])
    latency_table.lines.append(line)
    assert found.high <= limit.factor, line


@pytest.mark.parametrize("mla", [False, True], ids=["mha", "mla"])
def test_a_replay_launches_nothing_but_its_graph(mla: bool, cuda: torch.device) -> None:
    ours = OwnIteration(set_scene(USUAL, cuda), mla)
    graph = captured(cuda, ours.record)
    with observe(cuda) as seen:
        ours.plan()
        graph.replay()
    assert seen.activity.graph_launches == 1
    assert not seen.activity.launched
    assert not seen.host_syncs
    assert seen.bytes_allocated == 0
