"""Four equal workers do at least 3.2 times the work of one, in tests that wait."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ci.cluster.driver import Drive
from ci.cluster.lanes import PYTEST
from ci.cluster.ray_cluster import RayCluster
from ci.cluster.work import LaneWork
from fixtures.clusters.local_cluster import LocalCluster
from harness.core.paths import ROOT
from harness.core.tree import digest

LEAST = 3.2
UNITS, SECONDS = 120, 0.25
PLUGINS = ("kinds", "resume", "shards", "records", "asked_tests")
TESTS = f"""
import time
import pytest

@pytest.mark.parametrize("number", range({UNITS}))
def test_waits(number):
    time.sleep({SECONDS})
"""


def timed(cluster: RayCluster, kind: str, folder: Path) -> float:
    """Seconds from the first test's beginning to the end of the last."""
    work = LaneWork(
        lane="waits",
        kind=kind,
        argv=(*PYTEST, "--rootdir", str(folder), "-c", os.devnull, str(folder)),
        is_declared=True,
        tree=digest(),
    )
    ended = 0

    def count(_: LaneWork, ends: object) -> None:
        nonlocal ended
        ended += len(ends)  # type: ignore[arg-type]

    drive = Drive(
        [work],
        cluster,
        recorded=lambda _: {f"test_waits.py::test_waits[{n}]": SECONDS for n in range(UNITS)},
        kept=lambda _: (),
        sink=count,
        tell=print,
        wait_s=30.0,
    )
    drive.go()
    assert ended == UNITS
    assert drive.began is not None
    return time.time() - drive.began


def test_four_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"fixtures.pytest_plugin.{name}" for name in PLUGINS]
    (tmp_path / "conftest.py").write_text(f"pytest_plugins = {names}\n")
    (tmp_path / "test_waits.py").write_text(TESTS)
    nodes = [{"sm90": 1.0}] * 4 + [{"sm100": 1.0}]
    with LocalCluster(*nodes) as local, RayCluster(local.address, ROOT) as cluster:
        # A worker imports and collects in its first batch, which two cores do not do for four.
        (_, four), (_, one) = (
            [timed(cluster, kind, tmp_path) for _ in range(2)] for kind in ("sm90", "sm100")
        )
    with capsys.disabled():
        print(f"\none worker {one:.1f} s, four {four:.1f} s: {one / four:.2f} ×")
    assert one / four >= LEAST
