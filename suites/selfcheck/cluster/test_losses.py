"""What is lost runs again, and what ends its process again and again is red for that."""

from __future__ import annotations

from ci.cluster.batches import Batch
from ci.cluster.losses import KILLS, NODES_LOST_ALONE, NODES_LOST_TOGETHER, Losses

MANY = Batch(units=("a", "b"), seconds=2.0)
ONE = Batch(units=("a",), seconds=1.0)


def test_a_unit_is_red_at_its_third_kill_and_not_before() -> None:
    losses = Losses()
    said = [losses.killed("a", "SIGSEGV") for _ in range(3)]
    assert said == ["", "", "killed its worker 3 times: SIGSEGV"]
    assert losses.killed("b", "SIGSEGV") == ""


def test_after_a_lost_worker_each_unit_is_alone() -> None:
    losses = Losses()
    again, red = losses.lost_worker(MANY, "gone")
    assert ([batch.units for batch in again], red) == ([("a",), ("b",)], "")
    for _ in range(KILLS - 1):
        assert losses.lost_worker(ONE, "gone") == ([ONE], "")
    assert losses.lost_worker(ONE, "gone") == ([], "killed its worker 3 times: gone")


def test_a_lost_node_does_not_count_against_a_trial() -> None:
    losses = Losses()
    for _ in range(NODES_LOST_TOGETHER - 1):
        assert losses.lost_node(MANY, "gone") == ([MANY], "")
    again, red = losses.lost_node(MANY, "gone")
    assert ([batch.units for batch in again], red) == ([("a",), ("b",)], "")
    for _ in range(NODES_LOST_ALONE - 1):
        assert losses.lost_node(ONE, "gone") == ([ONE], "")
    assert losses.kills["a"] == 0
    assert losses.lost_node(ONE, "gone") == ([], "lost with its node 10 times: gone")
    assert losses.batches == NODES_LOST_TOGETHER + NODES_LOST_ALONE
