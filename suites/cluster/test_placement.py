"""Work lands on its own kind, on no refused node, and a session shares its host with nobody."""

from __future__ import annotations

import pickle
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import ray

from ci.cluster.driver import Drive
from ci.cluster.ray_cluster import RayCluster, absent_or, answer_of
from ci.cluster.work import Ended, LaneWork, Node, Refused, UnitEnd
from fixtures.clusters.local_cluster import LocalCluster
from harness.core.paths import ROOT
from harness.core.tree import digest

KINDS = ("cpu", "sm90", "sm100", "sm103", "sm120")
SLEEPS = ("-c", "import time; began = time.time(); time.sleep({item}); print(began, time.time())")


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster() as made:
        yield made


def work(kind: str, units: int, seconds: float = 0.05, **facts: object) -> LaneWork:
    """A lane of commands that sleep, whose items differ in a digit that nobody sees."""
    printed = f"print(*[{seconds} + n * 1e-6 for n in range({units})], sep='\\n')"
    usual: dict[str, object] = {"lane": "sleep", "items": ("-c", printed), "is_declared": True}
    return LaneWork(kind=kind, argv=SLEEPS, tree=digest(), **usual | facts)  # type: ignore[arg-type]


class Seen(RayCluster):
    """A connection that notes where each batch ran."""

    def __init__(self, address: str) -> None:
        super().__init__(address, ROOT)
        self.where: dict[str, list[str]] = defaultdict(list)
        self._kinds: dict[object, str] = {}

    def submit(self, work: LaneWork, units: tuple[str, ...] | None) -> object:  # type: ignore[override]
        ticket = super().submit(work, units)
        self._kinds[ticket] = work.kind
        return ticket

    def answers(self, within_s: float):  # type: ignore[no-untyped-def]
        found = super().answers(within_s)
        for ticket, answer in found:
            if hasattr(answer, "node"):
                self.where[self._kinds[ticket]].append(answer.node.id)
        return found


def drive(cluster: RayCluster, works: list[LaneWork], wait_s: float = 20.0) -> list[UnitEnd]:
    ended: list[UnitEnd] = []
    Drive(
        works,
        cluster,
        recorded=lambda _: {},
        kept=lambda _: (),
        sink=lambda _, ends: ended.extend(ends),
        tell=print,
        wait_s=wait_s,
    ).go()
    return ended


@pytest.mark.parametrize("seed", range(4))
def test_work_never_lands_on_the_wrong_kind(cluster: LocalCluster, seed: int) -> None:
    draw = random.Random(seed)
    chosen = [draw.choice(KINDS) for _ in range(draw.randint(2, 4))]
    nodes = {cluster.add({kind: float(draw.randint(1, 3))}): kind for kind in chosen}
    of = {node.id: kind for node, kind in nodes.items()}
    lacking = sorted({*KINDS} - {*chosen})[0]
    try:
        with Seen(cluster.address) as joined:
            works = [work(kind, draw.randint(3, 8)) for kind in {*chosen}]
            ended = drive(joined, [*works, work(lacking, 2)], wait_s=3.0)
            assert {of[node] for node in joined.where[lacking]} == set()
            for kind in {*chosen}:
                assert joined.where[kind]
                assert {of[node] for node in joined.where[kind]} == {kind}
            assert {end.outcome for end in ended} == {"passed"}
    finally:
        for node in nodes:
            cluster.remove(node)


def test_a_refused_node_runs_nothing_and_the_others_all(cluster: LocalCluster) -> None:
    bad, good = (cluster.add({"sm90": 2.0}) for _ in range(2))
    try:
        with Seen(cluster.address) as joined:
            joined.refuse(Node(id=bad.id, name="bad"))
            assert joined.slots(work("sm90", 1)) == 2
            ended = drive(joined, [work("sm90", 12)])
            assert len(ended) == 12
            assert {*joined.where["sm90"]} == {good.id}
    finally:
        cluster.remove(bad)
        cluster.remove(good)


def test_nodes_with_another_torch_are_refused_by_name(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    node = cluster.add({"sm90": 2.0})
    try:
        with Seen(cluster.address) as joined:
            other = replace(work("sm90", 2), versions={"torch": "1.0.0"})
            assert drive(joined, [other], wait_s=2.0) == []
        said = capsys.readouterr().out
        assert f"({node.id[:8]}) is refused: torch = " in said
        assert "accepted: 1.0.0" in said
        assert "all of it stays unverified" in said
    finally:
        cluster.remove(node)


def test_a_node_without_the_tree_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    here = SimpleNamespace(get_node_id=lambda: "0123456789")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: here)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    task = absent_or(pickle.dumps((work("sm90", 1), None)))
    monkeypatch.setitem(sys.modules, "ci.cluster", None)
    said = task()
    assert answer_of(said) == Refused(
        node=Node(id="0123456789", name="10.0.0.7"),
        reasons=("no specgate: import of ci.cluster halted; None in sys.modules",),
    )


def test_a_session_shares_its_host_with_nobody(cluster: LocalCluster) -> None:
    node = cluster.add({"sm90": 2.0})
    try:
        with RayCluster(cluster.address, ROOT) as joined:
            alone = work("sm90", 1, seconds=1.0, lane="bench", is_alone=True)
            ended = drive(joined, [work("sm90", 8, seconds=0.3), alone])
    finally:
        cluster.remove(node)
    spans = {end.unit: tuple(map(float, end.message.split())) for end in ended}
    assert len(spans) == 9
    begun, over = spans.pop("1.0")
    assert all(end <= begun or start >= over for start, end in spans.values())


def test_the_tree_travels_where_no_node_has_it(cluster: LocalCluster) -> None:
    node = cluster.add({"sm90": 1.0})
    says = ("-c", "import harness; print(harness.__file__)")
    try:
        with RayCluster(cluster.address, None) as joined:
            [end] = drive(joined, [replace(work("sm90", 1), argv=says)])
    finally:
        cluster.remove(node)
    assert (end.outcome, str(ROOT) in end.message) == ("passed", False)
    assert "working_dir" in end.message


def test_an_answer_names_its_node(cluster: LocalCluster) -> None:
    node = cluster.add({"sm90": 1.0})
    try:
        with RayCluster(cluster.address, ROOT) as joined:
            ticket = joined.submit(work("sm90", 1), ("0.05",))
            [(own, answer)] = joined.answers(30.0)
    finally:
        cluster.remove(node)
    assert own == ticket
    assert isinstance(answer, Ended)
    assert answer.node.id == node.id
