"""Batching keeps many machines busy, whatever a stated share of them does."""

from __future__ import annotations

from typing import Any

import pytest

from ci.cluster import simulation
from ci.cluster.simulation import MOST, SCENES, SLOTS, Scene, Simulated, simulate

pytestmark = pytest.mark.untraced
# A thousand machines take seconds: the command simulates those, too.
SIMULATED = [scene for scene in SCENES if sum(scene.nodes.values()) < 1000]


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


@pytest.mark.parametrize(("most", "code"), [(MOST, 0), (1.0, 1)])
def test_the_command_ends_with_1_where_a_scene_is_far_from_its_bound(
    most: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(simulation, "SCENES", SIMULATED[:2])
    monkeypatch.setattr(simulation, "MOST", most)
    assert simulation.main([]) == code
    assert "÷ bound" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "is_near"),
    [
        ({}, True),
        ({"makespan_s": 12.6}, False),
        ({"makespan_s": 9.9}, False),
        ({"most_held": 4 * SLOTS + 1}, False),
    ],
)
def test_a_scene_is_near_its_bound_and_its_head_holds_two_batches_a_slot(
    changes: dict[str, Any], is_near: bool
) -> None:
    made: dict[str, Any] = {"makespan_s": 12.5, "bound_s": 10.0, "most_held": 4 * SLOTS}
    scene = Scene(nodes={"sm90": 2}, units={"sm90": 1}, losses_a_day=0.0)
    found = Simulated(scene=scene, losses=0, most_bytes=0, **(made | changes))
    assert found.is_near == is_near
