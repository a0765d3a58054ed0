"""Nodes and workers that are lost in a run cost a run again of their batches, and nothing else."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable

import pytest

from ci.cluster.driver import Drive
from ci.cluster.ray_cluster import RayCluster
from ci.cluster.work import Answer, Ended, LaneWork, UnitEnd
from fixtures.clusters.local_cluster import LocalCluster
from harness.core.paths import ROOT
from harness.core.tree import digest

SECONDS = 0.4
UNITS = 40
KILLS_ITS_WORKER = """
import os, sys, time, psutil
if {item} == 7:
    psutil.Process().parents()[2].kill()  # of what watches, whose parent waits for it
time.sleep(0.4)
"""


class Disturbed(RayCluster):
    """A connection that kills a busy node, and adds another, after drawn numbers of answers.

    Busy is one that has answered before: what it was handed next is under way. A new node takes
    seconds to begin.
    """

    def __init__(self, local: LocalCluster, moments: list[int], draw: random.Random) -> None:
        super().__init__(local.address, ROOT)
        self._local, self._moments, self._draw = local, moments, draw
        self._answered = 0
        self._begun: set[str] = set()

    def answers(self, within_s: float) -> list[tuple[Hashable, Answer]]:
        found = super().answers(within_s)
        self._answered += len(found)
        busy = [node for node in self._local.nodes if node.id in self._begun]
        if busy and self._moments and self._answered >= self._moments[0]:
            self._moments.pop(0)
            chosen = self._draw.choice(busy)
            self._local.kill(chosen)
            self._local.add(chosen.resources)
        self._begun |= {answer.node.id for _, answer in found if isinstance(answer, Ended)}
        return found


def work(argv: tuple[str, ...]) -> LaneWork:
    printed = f"print(*range({UNITS}), sep='\\n')"
    return LaneWork(
        lane="sleep",
        kind="sm90",
        argv=argv,
        items=("-c", printed),
        is_declared=True,
        tree=digest(),
    )


def run(cluster: RayCluster, work: LaneWork) -> tuple[dict[str, str], Drive]:
    ended: list[UnitEnd] = []
    drive = Drive(
        [work],
        cluster,
        recorded=lambda _: {},
        kept=lambda _: (),
        sink=lambda _, ends: ended.extend(ends),
        tell=print,
        wait_s=60.0,
    )
    drive.go()
    assert max(Counter(end.unit for end in ended).values()) == 1
    return {end.unit: end.outcome for end in ended}, drive


@pytest.mark.parametrize("seed", [0, 1])
def test_killed_raylets_lose_nothing(seed: int) -> None:
    draw = random.Random(seed)
    moments = sorted(draw.sample(range(3, UNITS - 6), 3))
    with LocalCluster(*[{"sm90": 1.0}] * 3) as local, Disturbed(local, moments, draw) as cluster:
        sleeps = ("-c", f"import time; time.sleep({SECONDS}); print('{{item}}')")
        outcomes, drive = run(cluster, work(sleeps))
        assert moments == []
    assert outcomes == {str(number): "passed" for number in range(UNITS)}
    assert drive.progress[0].losses.batches >= 1


def test_a_unit_that_kills_its_worker_thrice_is_red_and_the_others_are_not() -> None:
    with LocalCluster({"sm90": 2.0}) as local, RayCluster(local.address, ROOT) as cluster:
        outcomes, drive = run(cluster, work(("-c", KILLS_ITS_WORKER)))
    assert outcomes == {str(n): "failed" if n == 7 else "passed" for n in range(UNITS)}
    assert drive.progress[0].losses.kills == {"7": 3}
