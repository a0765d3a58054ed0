"""A run ends each unit once, whatever is lost, refused or waited for, and says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import pytest

from ci.cluster.driver import Drive
from ci.cluster.work import (
    Answer,
    Ended,
    LaneWork,
    Node,
    NodeLost,
    Plan,
    Refused,
    UnitEnd,
    WorkerLost,
)
from fixtures.fakes.sample_records import trial
from harness.core.record import Record, Verdict

HERE = Node(id="0123456789", name="here")
THERE = Node(id="abcdefghij", name="there")
WORK = LaneWork(lane="run", kind="sm90", argv=())
PATIENCE_S = 1000.0
UNITS = tuple(f"u{number}" for number in range(12))
Question = tuple[LaneWork, tuple[str, ...] | None]


def passed(units: Sequence[str]) -> tuple[UnitEnd, ...]:
    return tuple(UnitEnd(unit=unit, outcome="passed") for unit in units)


def usual(units: tuple[str, ...] | None) -> Answer:
    """What a node without faults answers."""
    if units is None:
        return Plan(units=UNITS, node=HERE)
    return Ended(units=passed(units), began=100.0, node=HERE)


class ScriptedCluster:
    """Answers as a function of the question; a second passes with each look."""

    def __init__(self, answer: Callable[[Question], Answer], slots: int = 2) -> None:
        self._answer, self._slots = answer, slots
        self.asked: list[Question] = []
        self.running: dict[Hashable, Question] = {}
        self.refused: list[Node] = []
        self.withdrawn: list[Hashable] = []
        self.clock = 0.0

    def slots(self, work: LaneWork) -> int:
        return self._slots

    def submit(self, work: LaneWork, units: tuple[str, ...] | None) -> Hashable:
        self.asked.append((work, units))
        self.running[len(self.asked)] = work, units
        return len(self.asked)

    def answers(self, within_s: float) -> list[tuple[Hashable, Answer]]:
        self.clock += within_s
        assert self.clock < PATIENCE_S, "the run never ends"
        if not self._slots or not self.running:
            return []
        ticket = min(self.running)  # type: ignore[type-var]
        return [(ticket, self._answer(self.running.pop(ticket)))]

    def refuse(self, node: Node) -> None:
        self.refused.append(node)

    def withdraw(self, ticket: Hashable) -> None:
        self.withdrawn.append(ticket)

    def now(self) -> float:
        return self.clock


class Ran:
    """A run over a scripted cluster, and what it left."""

    def __init__(
        self,
        cluster: ScriptedCluster,
        works: Sequence[LaneWork] = (WORK,),
        kept: Sequence[str] = (),
        wait_s: float = 5.0,
    ) -> None:
        self.ended: list[UnitEnd] = []
        self.told: list[str] = []
        self.drive = Drive(
            works,
            cluster,
            recorded=lambda work: dict.fromkeys(UNITS, 0.2),
            kept=lambda work: kept,
            sink=lambda work, ended: self.ended.extend(ended),
            tell=self.told.append,
            wait_s=wait_s,
        )
        self.drive.go()

    @property
    def outcomes(self) -> dict[str, str]:
        assert max(Counter(end.unit for end in self.ended).values(), default=0) <= 1
        return {end.unit: end.outcome for end in self.ended}


def once(faults: dict[str, Answer]) -> Callable[[Question], Answer]:
    """Each fault is the first answer about the batch that its unit is in."""

    def answer(question: Question) -> Answer:
        units = question[1]
        for unit in [*faults]:
            if unit in (units or ("plan",)):
                return faults.pop(unit)
        return usual(units)

    return answer


GREEN = dict.fromkeys(UNITS, "passed")


@pytest.mark.parametrize(
    ("unit", "fault"),
    [
        ("u0", NodeLost(reason="gone")),
        ("u5", NodeLost(reason="gone")),
        ("u5", WorkerLost(reason="gone")),
        ("plan", NodeLost(reason="gone")),
        ("plan", WorkerLost(reason="gone")),
        ("u3", Refused(node=THERE, reasons=("torch = '1' is not accepted; accepted: 2",))),
        ("plan", Refused(node=THERE, reasons=("torch = '1' is not accepted; accepted: 2",))),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_one_fault_costs_nothing_but_a_run_again(unit: str, fault: Answer) -> None:
    cluster = ScriptedCluster(once({unit: fault}))
    ran = Ran(cluster)
    name = type(fault).__name__
    assert ran.outcomes == GREEN, f"each unit ends green behind one {name}: {ran.outcomes}"
    [one] = ran.drive.progress
    lost = 0 if isinstance(fault, Refused) else 1
    said = f"a batch counts as lost with its node or worker, and not when refused: {name} is"
    assert one.losses.batches == lost, f"{said} {lost}, not {one.losses.batches}"
    asked = Counter(u for _, units in cluster.asked for u in units or ())
    again = {u for u, times in asked.items() if times > 1}
    if unit == "plan":
        assert again == set(), f"{name} while planning has no unit run again: {sorted(again)}"
    else:
        [batch] = {
            units for _, units in cluster.asked if units and unit in units and len(units) > 1
        }
        said = f"{name} has its batch alone run again, {sorted(batch)}: {sorted(again)}"
        assert again == {*batch}, said


@pytest.mark.parametrize(
    ("fault", "times", "told"),
    [
        (WorkerLost(reason="out of memory"), 3, "killed its worker 3 times: out of memory"),
        (NodeLost(reason="gone"), 10, "lost with its node 10 times: gone"),
    ],
    ids=["worker", "node"],
)
def test_a_plan_that_is_lost_each_time_ends_its_lane(fault: Answer, times: int, told: str) -> None:
    other = replace(WORK, kind="sm100")

    def answer(question: Question) -> Answer:
        work, units = question
        return fault if work == WORK and units is None else usual(units)

    cluster = ScriptedCluster(answer)
    ran = Ran(cluster, works=[WORK, other])
    asked = cluster.asked.count((WORK, None))
    assert asked == times, f"{told}: a plan is asked for as often as a unit of its own, not {asked}"
    assert [one.given_up for one in ran.drive.progress] == [True, False]
    assert f"run on sm90: planning it {told}; all of it stays unverified" in ran.told, ran.told
    assert ran.outcomes == GREEN, "the other kind's units end"


def test_a_refused_node_is_named_once_with_its_versions() -> None:
    fault = Refused(node=THERE, reasons=("torch = '1' is not accepted; accepted: 2",))
    cluster = ScriptedCluster(once({"u0": fault, "u11": fault}))
    ran = Ran(cluster)
    assert cluster.refused == [THERE]
    assert [line for line in ran.told if "refused" in line] == [
        "node there (abcdefgh) is refused: torch = '1' is not accepted; accepted: 2"
    ]


def deadly(question: Question) -> Answer:
    """Wherever u3 runs, it ends its process; what came before it has ended."""
    units = question[1]
    if units is None or "u3" not in units:
        return usual(units)
    at = units.index("u3")
    blank = trial("u3", Verdict.ERROR, test="u3", kind="sm90").to_json()
    return Ended(
        units=passed(units[:at]),
        killer="u3",
        reason="its process ended by SIGSEGV",
        blank=blank,
        left=units[at + 1 :],
        began=1.0,
        node=HERE,
    )


def test_a_trial_that_kills_its_worker_thrice_is_red_and_holds_nobody_up() -> None:
    cluster = ScriptedCluster(deadly)
    ran = Ran(cluster)
    assert ran.outcomes == GREEN | {"u3": "failed"}
    with_u3 = [units for _, units in cluster.asked if units and "u3" in units]
    assert len(with_u3) == 3
    assert with_u3[1:] == [("u3",)] * 2
    [end] = [end for end in ran.ended if end.unit == "u3"]
    record = Record.from_json(end.record)
    assert (record.verdict, record.test, record.kind) == (Verdict.ERROR, "u3", "sm90")
    assert record.message == "killed its worker 3 times: its process ended by SIGSEGV"
    assert record.recorded
    # At once: a run that is stopped at its time limit writes no report.
    assert [line for line in ran.told if "red: " in line] == [
        f"run on sm90: red: u3: {record.message}"
    ]


def test_an_answer_that_comes_twice_counts_once() -> None:
    def answer(question: Question) -> Answer:
        # u0 ends with every batch, as after a node that was thought lost and was not.
        units = question[1]
        return usual(units if units is None else tuple(dict.fromkeys(("u0", *units))))

    assert Ran(ScriptedCluster(answer)).outcomes == GREEN


def test_what_ended_before_does_not_run_again() -> None:
    cluster = ScriptedCluster(lambda question: usual(question[1]))
    ran = Ran(cluster, kept=["u1", "u4", "of another plan"])
    assert set(ran.outcomes) == {*UNITS} - {"u1", "u4"}


def test_a_kind_without_a_node_is_waited_for_and_then_told() -> None:
    cluster = ScriptedCluster(lambda question: usual(question[1]), slots=0)
    ran = Ran(cluster, wait_s=5.0)
    assert ran.drive.progress[0].given_up
    assert ran.told[0] == "run on sm90: waits for a node of sm90: none is there"
    assert ran.told[-1] == "run on sm90: no node in 5 s; all of it stays unverified"
    assert cluster.withdrawn == [1]
    assert 5.0 <= cluster.clock <= 7.0


def test_what_was_given_up_is_not_begun_when_a_node_comes_after_all() -> None:
    units, begun = tuple(f"u{i}" for i in range(60)), list[float]()

    class ComesTooLate(ScriptedCluster):
        def slots(self, work: LaneWork) -> int:
            return 0 if work.kind == "sm90" and 2 <= self.clock < 10 else 1

        def submit(self, work: LaneWork, units: tuple[str, ...] | None) -> Hashable:
            begun.append(self.clock if work.kind == "sm90" else 0.0)
            return super().submit(work, units)

    def answer(question: Question) -> Answer:
        return usual(question[1]) if question[1] else Plan(units=units, node=HERE)

    other = LaneWork(lane="run", kind="sm100", argv=())
    cluster = ComesTooLate(answer)
    ran = Ran(cluster, works=[WORK, other], wait_s=5.0)
    assert any("no node in 5 s" in line for line in ran.told), ran.told
    assert cluster.clock > 10, "the other kind is busy when the node comes"
    told = "of a kind that was told to stay unverified no batch is handed over any more"
    assert max(begun) < 8, f"{told}: {begun}"


def test_each_absence_of_a_node_is_waited_for_by_itself() -> None:
    class ComesAndGoes(ScriptedCluster):
        def slots(self, work: LaneWork) -> int:
            return 0 if self.clock in (0, 1, 2, 6, 7, 8) else 2

    ran = Ran(ComesAndGoes(once({})), wait_s=5.0)
    assert ran.outcomes == GREEN
    assert sum("waits for a node" in line for line in ran.told) == 2


def test_what_shares_its_host_with_nobody_is_handed_over_first() -> None:
    alone = LaneWork(lane="bench", kind="sm90", argv=(), item="session", is_alone=True)
    cluster = ScriptedCluster(lambda question: usual(question[1]))
    Ran(cluster, works=[WORK, alone])
    assert [work.lane for work, _ in cluster.asked[:2]] == ["bench", "run"]
    own = [units for work, units in cluster.asked if work.lane == "bench" and units]
    assert {len(units) for units in own} == {1}


def test_no_more_is_handed_over_than_nodes_can_take() -> None:
    most = 0

    def answer(question: Question) -> Answer:
        nonlocal most
        most = max(most, len(cluster.running) + 1)
        return usual(question[1])

    cluster = ScriptedCluster(answer, slots=1)
    Ran(cluster)
    assert most == 2


def test_what_a_node_does_before_its_first_unit_is_told_until_one_has_ended() -> None:
    class SlowCluster(ScriptedCluster):
        def answers(self, within_s: float) -> list[tuple[Hashable, Answer]]:
            if self.clock >= 25:
                return super().answers(12.0)
            self.clock += within_s
            return []

    ran = Ran(SlowCluster(once({})), [replace(WORK, first="each node compiles")])
    blank, planned, *later = ran.told
    assert {blank, planned} == {"run on sm90: 0 of ?, 0 red; each node compiles"}
    assert later[0] == "run on sm90: 0 of 12, 0 red; each node compiles"
    assert later[1] == "run on sm90: 2 of 12, 0 red"


def test_a_run_began_when_the_first_of_its_units_did() -> None:
    # Answers come in another order than their batches began; the first batch began nothing.
    began = iter((0.0, 300.0, 200.0, 400.0))

    def answer(question: Question) -> Answer:
        given = usual(question[1])
        if not isinstance(given, Ended):
            return given
        return replace(given, began=next(began, 500.0))

    assert Ran(ScriptedCluster(answer)).drive.began == 200.0, "the first of all that began"
