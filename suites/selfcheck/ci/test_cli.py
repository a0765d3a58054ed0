"""``specgate`` starts what its verbs stand for and returns the first failure."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from harness import __main__ as cli


class Started:
    """Stands in for processes: remembers what was started, answers with exit codes by module."""

    def __init__(self, codes: dict[str, int]) -> None:
        self.codes = codes
        self.calls: list[tuple[str, ...]] = []

    def __call__(self, module: str, *args: str) -> int:
        self.calls.append((module, *args))
        return self.codes.get(module, 0)


def started(monkeypatch: pytest.MonkeyPatch, **codes: int) -> Started:
    stand_in = Started({name.replace("_", "."): code for name, code in codes.items()})
    monkeypatch.setattr(cli, "start", stand_in)
    return stand_in


def test_run_tests_reports_and_gates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in = started(monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "--report", "out", "-k", "draft_extend_v2", "-x"]) == 0
    folder = tmp_path / "out"
    pytest_call, *after = stand_in.calls
    assert pytest_call[:3] == ("pytest", "suites/differential", "suites/speculative")
    assert pytest_call[4:8] == ("--workers-per-gpu", "4", "--device", "auto")
    assert pytest_call[-5:] == ("--report", str(folder), "-k", "draft_extend_v2", "-x")
    assert after == [
        ("ci.report", f"{folder}/records.jsonl", "--out", f"{folder}/index.html"),
        ("ci.gate", f"{folder}/records.jsonl"),
    ]


def test_a_separator_does_not_reach_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = started(monkeypatch)
    assert cli.main(["run", "--", "-k", "draft_extend_v2"]) == 0
    assert stand_in.calls[0][-3:] == (str(cli.Path("report").absolute()), "-k", "draft_extend_v2")


@pytest.mark.parametrize(
    ("codes", "ended", "calls"),
    [
        pytest.param({"pytest": 1}, 1, 3, id="failed-tests-are-reported"),
        pytest.param({"pytest": 2, "ci_gate": 1}, 2, 3, id="interrupted-run-is-reported"),
        pytest.param({"pytest": 4}, 4, 1, id="usage-error-stops"),
        pytest.param({"pytest": 5}, 5, 1, id="nothing-collected-stops"),
        pytest.param({"ci_gate": 1}, 1, 3, id="gate-decides"),
        pytest.param({"ci_report": 2, "ci_gate": 1}, 2, 3, id="first-failure-counts"),
    ],
)
def test_run_returns_the_first_failure(
    monkeypatch: pytest.MonkeyPatch, codes: dict[str, int], ended: int, calls: int
) -> None:
    stand_in = started(monkeypatch, **codes)
    assert cli.main(["run"]) == ended
    assert len(stand_in.calls) == calls


def test_gpu_times_alone_what_it_tested_in_parallel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in = started(monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["gpu", "--report", "out", "--workers-per-gpu", "4"]) == 0
    tested, timed, *after = stand_in.calls
    assert tested[:3] == ("pytest", "suites", "--ignore=suites/latency")
    assert tested[3:5] == ("-n", "auto")
    assert tested[-6:-4] == ("--device", "cuda")
    assert tested[-4:] == ("--workers-per-gpu", "4", "--report", str(tmp_path / "out"))
    figures = f"--latency-json={tmp_path / 'out' / 'latency.json'}"
    assert timed == ("pytest", "suites/latency", "-n0", "--device", "cuda", figures)
    assert [call[0] for call in after] == ["ci.report", "ci.gate"]


@pytest.mark.parametrize(
    ("args", "first"),
    [
        (["-k", "xqa"], "suites"),
        (["suites/graphs/test_cuda_graphs.py", "-n0"], "-n"),
    ],
)
def test_gpu_runs_what_is_selected_alone(
    monkeypatch: pytest.MonkeyPatch, args: list[str], first: str
) -> None:
    stand_in = started(monkeypatch)
    assert cli.main(["gpu", *args]) == 0
    [tested] = [call for call in stand_in.calls if call[0] == "pytest"]
    assert tested[1] == first
    assert tested[-len(args) :] == tuple(args)


@pytest.mark.parametrize(
    ("codes", "ended", "calls"),
    [
        pytest.param({"pytest": 1}, 1, 4, id="failed-tests-are-timed-and-judged"),
        pytest.param({"pytest": 2}, 2, 3, id="interrupted-run-is-judged"),
        pytest.param({"pytest": 4}, 4, 1, id="lost-environment-stops"),
        pytest.param({"pytest": 5}, 5, 1, id="nothing-collected-stops"),
        pytest.param({"ci_gate": 1}, 1, 4, id="gate-decides"),
    ],
)
def test_gpu_returns_the_first_failure(
    monkeypatch: pytest.MonkeyPatch, codes: dict[str, int], ended: int, calls: int
) -> None:
    stand_in = started(monkeypatch, **codes)
    assert cli.main(["gpu"]) == ended
    assert len(stand_in.calls) == calls


@pytest.mark.parametrize(
    ("codes", "told"),
    [
        pytest.param({}, "", id="green"),
        pytest.param(
            {"pytest": 1}, "specgate gpu: pytest ended with 1\n", id="beside-a-green-gate"
        ),
        pytest.param({"pytest": 1, "ci_gate": 1}, "", id="the-gate-said-so"),
        pytest.param({"pytest": 4}, "", id="pytest-said-so"),
    ],
)
def test_a_green_gate_is_not_the_last_word_of_a_red_run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    codes: dict[str, int],
    told: str,
) -> None:
    started(monkeypatch, **codes)
    cli.main(["gpu"])
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("mode", ["verify", "add", "rewrite"])
def test_golden_hands_its_mode_to_pytest(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    stand_in = started(monkeypatch, pytest=1)
    assert cli.main(["golden", mode, "-k", "decode"]) == 1
    assert stand_in.calls == [("pytest", *cli.GOLDENS, "-n0", f"--golden={mode}", "-k", "decode")]


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "the following arguments are required"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["golden", "burn"], "invalid choice: 'burn'"),
    ],
)
def test_bad_command_line_is_refused(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_start_runs_a_module_in_the_repository(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.start("ci") == 0
    assert capfd.readouterr().out.startswith("usage: python3 -m ci LANE")
    assert cli.start("ci", "no-such-lane") == 2


def test_interrupt_waits_for_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    class Child:
        waits = iter([KeyboardInterrupt(), KeyboardInterrupt(), 2])

        def __enter__(self) -> Child:
            return self

        def __exit__(self, *_: object) -> None:
            return

        def wait(self) -> int:
            ended = next(self.waits)
            if isinstance(ended, KeyboardInterrupt):
                raise ended
            return ended

    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: Child())
    assert cli.start("pytest") == 2


def test_latency_is_timed_by_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in = started(monkeypatch, pytest=1)
    assert cli.main(["latency", "--report", str(tmp_path), "-k", "512K"]) == 1
    timed = ("pytest", "suites/latency", "-n0", "--device", "cuda")
    assert stand_in.calls == [(*timed, f"--latency-json={tmp_path}/latency.json", "-k", "512K")]


@pytest.fixture
def put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that a verb takes out of ``sys.modules`` is there for the tests that come after."""

    def imported(name: str) -> None:
        monkeypatch.setitem(sys.modules, name, import_module(name))

    monkeypatch.setattr(cli, "import_module", imported)


@pytest.mark.usefixtures("put_back")
@pytest.mark.parametrize("verb", cli.HANDED_ON)
def test_a_verb_with_its_own_command_line_becomes_that_program(
    monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    became: list[tuple[str, list[str]]] = []

    def run_module(module: str, *, run_name: str, alter_sys: bool) -> None:
        assert (run_name, alter_sys) == ("__main__", True)
        became.append((module, sys.argv[1:]))
        raise SystemExit(3)

    monkeypatch.setattr(cli.runpy, "run_module", run_module)
    monkeypatch.setattr(sys, "argv", ["specgate", verb, "--help"])
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    with pytest.raises(SystemExit):
        cli.main([verb, "--help"])
    assert became == [(cli.HANDED_ON[verb][0], ["--help"])]
    assert cli.os.environ["PYTHONPATH"] == f"{cli.ROOT}:/elsewhere"


@pytest.mark.usefixtures("put_back")
def test_a_verb_that_is_interrupted_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_module(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.runpy, "run_module", run_module)
    monkeypatch.setattr(sys, "argv", ["specgate", "mutants"])
    monkeypatch.setenv("PYTHONPATH", "")  # is changed, and must not stay so
    assert cli.main(["mutants"]) == 130
    assert capsys.readouterr().err == "specgate mutants: interrupted\n"


def test_the_version_is_the_projects(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    project = tomllib.loads((cli.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"specgate {project['version']}\n"
