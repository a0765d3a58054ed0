"""Batching keeps a thousand machines busy, whatever a stated share of them does."""

from __future__ import annotations

import pytest

from ci.cluster.simulation import SCENES, SLOTS, Scene, simulate

pytestmark = pytest.mark.untraced
MOST = 1.25
LARGEST = max(sum(scene.nodes.values()) for scene in SCENES)
HARDEST = max(scene.losses_a_day for scene in SCENES)
SIMULATED = [
    scene
    for scene in SCENES
    if sum(scene.nodes.values()) < LARGEST or scene.losses_a_day == HARDEST
]
"""The largest takes seconds, so it is simulated with the most losses alone."""


@pytest.mark.parametrize(
    "scene",
    SIMULATED,
    ids=lambda s: f"{sum(s.nodes.values())}-nodes-{s.losses_a_day:g}-losses-a-day",
)
def test_makespan_is_near_the_bound(scene: Scene) -> None:
    made = simulate(scene)
    assert 1.0 <= made.ratio <= MOST
    assert made.most_held <= 2 * SLOTS * sum(scene.nodes.values())
    assert bool(made.losses) >= (scene.losses_a_day * sum(scene.nodes.values()) > 500)


def test_the_same_seed_gives_the_same_run() -> None:
    scene = Scene(nodes={"sm90": 5}, units={"sm90": 300}, losses_a_day=500.0, seed=3)
    assert simulate(scene) == simulate(scene)
    assert simulate(scene).losses > 0
