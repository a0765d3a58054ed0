"""The command refuses in one line what it cannot run, and no other lane asks for Ray."""

from __future__ import annotations

import configparser
import subprocess
import sys
import tomllib
from collections.abc import Hashable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from ci import __main__ as ci
from ci.cluster import __main__ as command
from ci.cluster import lanes, machine
from ci.cluster.lanes import kinds_of, work
from ci.cluster.store import Store
from ci.cluster.work import Answer, Ended, LaneWork, Node, Plan, UnitEnd
from ci.nightly.machine import is_visible
from harness.core.paths import ROOT
from harness.errors import UsageError

WITHOUT_RAY = """
import runpy, sys
sys.modules["ray"] = None
sys.argv[:] = {argv!r}
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--fast"], "specgate cluster: unrecognized arguments: --fast"),
        (["--wait", "0"], "argument --wait: '0' is not accepted; accepted: a number above 0"),
        (["--workers-per-gpu", "0"], "'0' is not accepted; accepted: 1 or more"),
    ],
)
def test_a_wrong_option_is_one_line(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(argv)
    [line] = capsys.readouterr().err.splitlines()
    assert told in line


def test_a_lane_that_cannot_be_spread_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["lint"]) == 2
    told = "cluster: lane = 'lint' is not accepted; accepted: run, gpu, mutants, "
    assert capsys.readouterr().err.startswith(told)


def test_a_lane_that_is_named_twice_runs_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    joined: list[list[str]] = []
    ray = SimpleNamespace(RayCluster=lambda *_: nullcontext())
    monkeypatch.setitem(sys.modules, "ci.cluster.ray_cluster", ray)
    monkeypatch.setattr(
        command, "run", lambda _, __, options, ___: joined.append(options.lanes) or 0
    )
    code = command.main(["run", "mutants", "run", "--kinds", "cpu", "--report", str(tmp_path)])
    told = f"no other run writes to its folder: {capsys.readouterr().err}"
    assert (code, joined) == (0, [["run", "mutants"]]), told


def test_a_kind_that_is_named_twice_is_one() -> None:
    kinds = command.parser().parse_args(["--kinds", "sm100,sm90,sm100,"]).kinds
    assert kinds == ["sm100", "sm90"], f"no unit runs twice on one kind of GPU: {kinds}"


def test_without_ray_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "ci.cluster.ray_cluster", raising=False)
    assert command.main(["run"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line == "cluster: ray is not installed; install with: pip install '.[cluster]'"


def test_other_lanes_neither_need_nor_import_ray() -> None:
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    with_ray = {
        name.removeprefix("testenv:")
        for name in tox.sections()
        if "cluster" in tox[name].get("extras", "").split()
    }
    assert with_ray == {"cluster", "cluster-test"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [
        *project["dependencies"],
        *(r for n, rs in extras.items() if n != "cluster" for r in rs),
    ]
    assert not [requirement for requirement in asked if requirement.startswith("ray")]


@pytest.mark.parametrize(
    ("module", "argv"),
    [
        ("pytest", ["suites/selfcheck/cluster", "suites/differential", "suites/cluster"]),
        ("harness", ["--help"]),
    ],
)
def test_nothing_else_imports_ray(module: str, argv: list[str]) -> None:
    words = ["-q", "-n0", "--collect-only", "-p", "no:cacheprovider"] if module == "pytest" else []
    script = WITHOUT_RAY.format(argv=[module, *argv, *words], module=module)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_every_lane_of_the_table_is_a_lane_or_a_verb() -> None:
    verbs = command.__doc__ or ""
    assert verbs
    for name, row in lanes.rows().items():
        assert name in ci.lanes() or row["command"][:2] == ["-m", "harness"]
        assert row["kinds"] in ("any", "gpu", "cpu")
        assert ("suites" in row) != ("command" in row)
        for suite in row.get("suites", ()):
            assert (ROOT / suite.removeprefix("--ignore=")).exists()


@pytest.mark.parametrize(
    ("lane", "kinds"),
    [("run", ["cpu", "sm90"]), ("gpu", ["sm90"]), ("mutants", ["cpu"]), ("bench", ["sm90"])],
)
def test_a_lane_is_for_some_kinds(lane: str, kinds: list[str]) -> None:
    assert kinds_of(lane, ["cpu", "sm90"]) == kinds


def test_work_says_what_a_node_must_have() -> None:
    on_gpu = work("gpu", "sm100", ["-k", "xqa"], per_gpu=4)
    assert on_gpu.argv[-6:] == ("--device", "cuda:0", "--kind", "sm100", "-k", "xqa")
    assert (on_gpu.share, on_gpu.is_alone) == (0.25, False)
    assert work("run", "cpu", [], per_gpu=4).share == 1.0, "a core is shared by no batches"
    assert on_gpu.versions["flashinfer-python"] == "0.6.12"
    declared = work("gpu", "sm100", [], is_declared=True)
    assert declared.argv[-4:] == ("--device", "cpu", "--kind", "sm100")
    assert set(declared.versions) == {"torch"}
    session = work("bench", "sm90", ["--a", "x"])
    assert (session.is_alone, session.item, session.argv[-2:]) == (True, "session", ("--a", "x"))


@pytest.mark.parametrize(
    ("gpus", "resources"),
    [
        ([("H200", (9, 0))] * 8, ({"sm90": 8.0, "host": 1.0}, 8)),
        ([("RTX", (12, 0))], ({"sm120": 1.0, "host": 1.0}, 1)),
    ],
)
def test_a_machine_offers_its_gpus_by_kind(
    monkeypatch: pytest.MonkeyPatch, gpus: list[tuple[str, tuple[int, int]]], resources: object
) -> None:
    monkeypatch.setattr(machine, "installed_gpus", lambda: gpus)
    assert machine.resources_here() == resources


def test_a_machine_of_several_kinds_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "installed_gpus", lambda: [("a", (9, 0)), ("b", (10, 0))])
    with pytest.raises(UsageError, match="GPUs = 'sm100, sm90' is not accepted"):
        machine.resources_here()
    assert machine.main([]) == 2
    assert capsys.readouterr().err.startswith("cluster: GPUs = ")


@pytest.mark.parametrize(
    ("listed", "seen"),
    [(None, "ab"), ("0", "a"), ("1,0", "ab"), ("GPU-b0", "b"), ("", ""), ("3", ""), ("-1", "")],
)
def test_a_machine_offers_the_gpus_that_cuda_shows(
    monkeypatch: pytest.MonkeyPatch, listed: str | None, seen: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if listed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    uuids = {"a": "GPU-a0-1", "b": "GPU-b0-2"}
    found = (name for index, name in enumerate(uuids) if is_visible(index, uuids[name]))
    said = "CUDA_VISIBLE_DEVICES names a GPU by its index or by how its UUID begins"
    assert "".join(found) == seen, said


def test_a_machine_without_gpus_offers_its_cores(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "installed_gpus", lambda: [])
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert machine.main([]) == 0
    assert capsys.readouterr().out == '{"cpu": 3.0, "host": 1.0}\n'


class NoNode:
    """A cluster that no node of any kind joins."""

    def __init__(self) -> None:
        self.clock = 0.0

    def slots(self, work: LaneWork) -> int:
        return 0

    def submit(self, work: LaneWork, units: tuple[str, ...] | None) -> int:
        return 1

    def answers(self, within_s: float) -> list[tuple[Hashable, Answer]]:
        self.clock += within_s
        return []

    def refuse(self, node: Node) -> None:
        raise AssertionError(f"no node is wrong: {node}")

    def withdraw(self, ticket: Hashable) -> None:
        """Nothing is under way."""

    def now(self) -> float:
        return self.clock


def test_a_lane_that_no_node_ran_is_red(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mutants").mkdir()
    words = ["mutants", "--kinds", "cpu", "--wait", "2", "--report", str(tmp_path)]
    options = command.parser().parse_args(words)
    works = command.wanted(options.kinds, options, [])
    code = command.run(NoNode(), works, options, 0.0)
    assert code == 1, f"a lane that no node ran ends with 1, as nothing was verified: {code}"
    *before, last = capsys.readouterr().out.splitlines()
    said = "a lane that no node ran is told to stay unverified"
    assert any("no node in 2 s; all of it stays unverified" in line for line in before), (
        f"{said}: {before}"
    )
    said = "the last line of a red command names its red lanes"
    assert last == "cluster: red: mutants", f"{said}: {last!r}"


class OneKind(NoNode):
    """A cluster of nodes of one kind, on which everything passes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.asked = kind, list[tuple[LaneWork, tuple[str, ...] | None]]()

    def slots(self, work: LaneWork) -> int:
        return int(work.kind == self.kind)

    def submit(self, work: LaneWork, units: tuple[str, ...] | None) -> int:
        self.asked.append((work, units))
        return len(self.asked) - 1

    def answers(self, within_s: float) -> list[tuple[Hashable, Answer]]:
        self.clock += within_s
        node, found = Node(id="n", name="node"), list[tuple[Hashable, Answer]]()
        for ticket, (asked, units) in enumerate(self.asked):
            ended = tuple(UnitEnd(unit=unit, outcome="passed") for unit in units or ())
            answer = Ended(units=ended, node=node) if units else Plan(units=("session",), node=node)
            found += [(ticket, answer)] if asked.kind == self.kind else []
        return found


@pytest.mark.parametrize("there", ["sm90", "sm100"])
def test_a_lane_is_red_if_one_of_its_kinds_has_no_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], there: str
) -> None:
    (tmp_path / "bench").mkdir()
    words = ["bench", "--kinds", "sm90,sm100", "--wait", "2", "--report", str(tmp_path)]
    options = command.parser().parse_args(words)
    works = command.wanted(options.kinds, options, [])
    code = command.run(OneKind(there), works, options, 0.0)
    told = f"a lane that passed on {there} alone is red for the kind that nobody ran: {code}"
    assert code == 1, told
    lines = capsys.readouterr().out.splitlines()
    assert f"cluster: bench on {there}: 1 of 1, 0 red" in lines, "the other kind was run"
    assert lines[-1] == "cluster: red: bench", "the last line names the red lane"


def test_each_lane_is_judged_by_its_own_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for lane in ("gpu", "bench"):
        (tmp_path / lane).mkdir()
    judged: list[tuple[str, list[str]]] = []

    def judge(store: Store, works: list[LaneWork]) -> int:
        judged.append((store.folder.name, [str(one) for one in works]))
        return 0

    monkeypatch.setattr(command, "judge", judge)
    words = ["gpu", "bench", "--kinds", "sm90", "--report", str(tmp_path)]
    options = command.parser().parse_args(words)
    command.run(OneKind("sm90"), command.wanted(options.kinds, options, []), options, 0.0)
    own = [("gpu", ["gpu on sm90"]), ("bench", ["bench on sm90"])]
    assert judged == own, f"the gate of tests judges no benchmark, whose lane is another: {judged}"


def test_the_gate_is_asked_for_every_kind_of_a_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(command.report, "main", lambda _: 0)
    monkeypatch.setattr(command.gate, "main", lambda argv: asked.append(argv) or 0)
    works = [work("gpu", kind, []) for kind in ("sm90", "sm100")]
    command.judge(Store(tmp_path, works, resume=False, source=("", False)), works)
    assert asked == [[str(tmp_path / "records.jsonl"), "--kinds", "sm90,sm100"]], (
        "a kind of which there are no records at all is red only if the gate is asked for it"
    )


@pytest.mark.parametrize(("outcome", "code"), [("passed", 0), ("failed", 1)])
def test_an_item_that_failed_is_red_without_a_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], outcome: str, code: int
) -> None:
    works = [work("mutants", "cpu", [])]
    store = Store(tmp_path, works, resume=False, source=("", False))
    store.add(works[0], [UnitEnd(unit="one", outcome=outcome, message="off")])
    assert command.judge(store, works) == code, "an item's command leaves no record to judge"
    assert ("cluster: failed: one on cpu: off" in capsys.readouterr().out) == bool(code)


def test_a_failed_test_is_told_after_a_green_gate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command.report, "main", lambda _: 0)
    monkeypatch.setattr(command.gate, "main", lambda _: print("gate: green") or 0)
    works = [work("gpu", "sm90", [])]
    store = Store(tmp_path, works, resume=False, source=("", False))
    store.add(works[0], [UnitEnd(unit="some.py::test", outcome="failed", message="3 < 2")])
    code = command.judge(store, works)
    assert code == 1, f"a lane of which a test failed ends with 1 beside a green gate: {code}"
    told = capsys.readouterr().out.splitlines()
    said = "a failed test is told behind the gate's line"
    assert told == ["gate: green", "cluster: failed: some.py::test on sm90: 3 < 2"], (
        f"{said}: {told}"
    )


@pytest.mark.parametrize(
    ("kind", "gpu"), [("sm90", (9, 0)), ("sm100", (10, 0)), ("sm121", (12, 1))]
)
def test_what_stays_unverified_is_the_plan_of_its_gpu(
    kind: str, gpu: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def planned(found: tuple[int, int]) -> list[object]:
        asked.append(found)
        return []

    monkeypatch.setattr(command, "planned", planned)
    command.tell_unverified(work("gpu", kind, []))
    assert asked == [gpu], "the last digit is the minor version"
