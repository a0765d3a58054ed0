"""A night starts what it planned, is green only with all of it, and says what it left out."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from ci.nightly import __main__ as command
from ci.nightly import checks, machine, nightly_run, stages, trials
from ci.nightly.checks import NightlyCheck
from ci.nightly.stages import Stage
from ci.nightly.trials import PlannedTrial
from fixtures.fakes import synthetic_bench
from fixtures.fakes.fake_nvml import Driver
from fixtures.fakes.sample_records import trial
from harness.bench.jsonl import append
from harness.core.record import Verdict, write_records

STAGES = (
    "differential",
    "triples on cpu",
    "latency",
    "properties on cpu",
    "properties on cuda",
    "reference environment",
    "reference plugin",
    "reference",
    "candidate environment",
    "candidate plugin",
    "candidate",
    "server",
    "bench",
)
PLANNED = [
    PlannedTrial("one", "mha/gen", "decode", "eager", ""),
    PlannedTrial("one", "mha/gen", "decode", "graph", ""),
    PlannedTrial("two", "mha/gen", "decode", "eager", "head_dim"),
    PlannedTrial("two", "mla/gen", "decode", "eager", ""),
    PlannedTrial("two", "mla/gen", "extend", "eager", "page_size"),
    PlannedTrial("six", "mla/gen", "extend", "eager", "dtype"),
    PlannedTrial("ten", "mla/gen", "extend", "eager", "dtype"),
]


def test_trials_are_counted_by_subject() -> None:
    expected = [("mha/gen", 2, 1, "head_dim"), ("mla/gen", 1, 3, "dtype")]
    assert trials.per_subject(PLANNED) == expected
    assert trials.per_subject(PLANNED[::-1]) == expected, "subjects are told in one order"


def test_only_a_passed_record_on_a_gpu_verifies() -> None:
    ran = [
        trial("one", subject="mha/gen", device="cuda:0"),
        trial("one", subject="mha/gen", execution="graph"),
        trial("two", Verdict.WRONG_NUMBERS, subject="mla/gen", device="cuda:0"),
    ]
    assert trials.unverified(PLANNED, ran) == {"mha/gen": 1, "mla/gen": 1}
    assert trials.unverified(PLANNED, []) == {"mha/gen": 2, "mla/gen": 1}
    assert trials.unverified(PLANNED[:1], ran) == {}
    for verdict in (Verdict.WAIVED, Verdict.REFUSED):
        set_aside = trial("two", verdict, subject="mla/gen", device="cuda:0", message="why")
        left = trials.unverified(PLANNED, [*ran, set_aside])
        told = f"a trial that was {verdict} is as little verified as one that did not run"
        assert left == {"mha/gen": 1, "mla/gen": 1}, f"{told}: {left}"


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "pynvml", Driver(broken=True))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[NightlyCheck]:
    """Checks that hold and a plan of seven trials, whatever the machine."""
    found = [
        NightlyCheck("packages", True, "as pinned"),
        NightlyCheck("kernel signatures", None, "9 skipped"),
    ]
    monkeypatch.setattr(checks, "checks", lambda *_, **__: found)
    monkeypatch.setattr(trials, "planned", lambda sm: PLANNED)
    return found


@pytest.mark.usefixtures("no_gpu", "quick")
def test_dry_run_shows_the_plan_and_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nightly_run, "run_stages", lambda *_: pytest.fail("started"))
    report = tmp_path / "report"
    asked = ["--dry-run", "--report", str(report), "--reference", "sglang==0.5.13"]
    assert command.main([*asked, "--", "--seconds", "77"]) == 0
    text = capsys.readouterr().out
    assert "planned for Blackwell 10.0: runs trtllm_gen" in text
    told = "of four trials of mla/gen one is to run, and three are refused, most for their dtype"
    assert re.search(r"mla/gen\W+1\W+3\W+dtype", text), f"{told}: {text}"
    assert "sglang==0.5.13" in text
    [bench] = [
        line for line in text.splitlines() if line.startswith(f"stage {len(STAGES)}, bench: ")
    ]
    assert bench.endswith(" --seconds 77")
    tail = text[text.index("not verified on Blackwell (10.0, 10.3): 3 trials") :].splitlines()
    assert tail[1:3] == ["  mha/gen: 2 trials", "  mla/gen: 1 trials"]
    assert tail[3:] == [f"  stages: {', '.join(STAGES)}"]
    assert not report.exists()


@pytest.mark.usefixtures("no_gpu", "quick")
def test_a_dry_run_verifies_nothing_whatever_an_earlier_night_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_records(tmp_path / "records.jsonl", [trial("one", subject="mha/gen", device="cuda:0")])
    assert command.main(["--dry-run", "--report", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    told = "a plan counts no records in its folder, which are those of a night before"
    assert "not verified on Blackwell (10.0, 10.3): 3 trials" in text, f"{told}: {text}"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("gpus", [(), (("NVIDIA B200", (10, 0)),)])
def test_kernel_packages_and_disk_are_asked_where_a_gpu_is(
    gpus: tuple[tuple[str, tuple[int, int]], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(machine, "pynvml", Driver(*gpus, broken=not gpus))
    monkeypatch.setattr(checks, "checks", lambda *given, **_: asked.append(given) or [])
    assert command.main(["--dry-run"]) == 0
    [(extras, _, free_gib, _)] = asked
    rule = "kernel packages are asked for where a GPU is, and only there"
    assert ("gpu" in extras) is bool(gpus), f"{rule}: {extras} with {gpus}"
    rule = "free disk for both arms is asked for where a GPU is, and only there"
    assert (free_gib > 0) is bool(gpus), f"{rule}: {free_gib} GiB with {gpus}"


@pytest.mark.usefixtures("no_gpu", "quick")
def test_a_real_run_without_a_gpu_fails_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nightly_run, "run_stages", lambda *_: pytest.fail("started"))
    assert command.main([]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line == "nightly: no GPU here: launching kernels needs one, --dry-run does not"


@pytest.mark.usefixtures("no_gpu")
def test_a_check_that_does_not_hold_ends_a_dry_run_red(
    quick: list[NightlyCheck], capsys: pytest.CaptureFixture[str]
) -> None:
    quick[0] = NightlyCheck("packages", False, "rich is old")
    assert command.main(["--dry-run"]) == 1
    assert capsys.readouterr().err == "nightly: packages: rich is old\n"


@pytest.mark.usefixtures("no_gpu", "quick")
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--gpu", "9.0"], "--gpu = '9.0' is not accepted; accepted: nothing: a real run asks"),
        (["--dry-run", "--gpu", "7.5"], "compute capability = '7.5' is not accepted"),
        (["--dry-run", "--reference", "no such"], "pin = 'no such' is not accepted"),
    ],
)
def test_what_cannot_be_asked_is_one_line(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(argv) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"nightly: {said}")


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", code)


def test_a_failed_stage_stops_those_that_need_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in (stages.BENCH, "records.jsonl", "latency.json"):
        (out / name).write_text("of an earlier night")
    night = [
        Stage("one", python("raise SystemExit(3)")),
        Stage("two", python(f"open({str(out / 'two')!r}, 'w')"), ("one",)),
        Stage("three", python(f"open({str(out / 'three')!r}, 'w')")),
        Stage("four", python(""), ("two", "three")),
        Stage("five", python(""), ("three", "two")),
    ]
    codes = nightly_run.run_stages(night, out)
    skipped = dict.fromkeys(("two", "four", "five"), nightly_run.SKIPPED)
    said = "a stage is skipped if any that it needs did not succeed, first or last"
    assert codes == {"one": 3, "three": 0} | skipped, said
    assert sorted(path.name for path in out.iterdir()) == ["three"]
    told = ["one: ended with 3", "two: skipped, a stage before it failed"]
    assert nightly_run.lines(codes, [])[:2] == told


@pytest.mark.parametrize("code", [1, 255, -1, -9])
def test_a_stage_that_ran_was_not_skipped(tmp_path: Path, code: int) -> None:
    # Under nohup a process inherits that SIGHUP is ignored; SIGKILL has no handler to be set.
    heard = "" if -code == signal.SIGKILL else f"signal.signal({-code}, signal.SIG_DFL); "
    signalled = f"import os, signal; {heard}os.kill(os.getpid(), {-code})"
    ends = f"raise SystemExit({code})" if code > 0 else signalled
    night = [Stage("one", python(ends)), Stage("two", python(""), ("one",))]
    first, second = nightly_run.lines(nightly_run.run_stages(night, tmp_path), [])
    assert first == f"one: ended with {code}"
    told = "what needs a stage that failed, or that a signal ended, is skipped"
    assert second == "two: skipped, a stage before it failed", f"{told}: {second}"


def test_the_trials_of_a_night_are_counted() -> None:
    refused = trial("two", Verdict.REFUSED, message="no such kernel", planned=3)
    ran = [trial("one", planned=3), refused, trial("three", Verdict.WRONG_NUMBERS, planned=3)]
    told = nightly_run.lines({"differential": 1}, ran)
    assert told[1] == "trials: planned 3 = run 2 + refused 1 + waived 0, 1 red"
    green = nightly_run.lines({"differential": 0}, [trial("one", planned=1)])
    said = "a night tells how many trials ran, red or not"
    assert green[1:] == ["trials: planned 1 = run 1 + refused 0 + waived 0, 0 red"], said


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("sm", "words", "code", "effects", "left", "exits"),
    [
        pytest.param((10, 0), [], 0, {}, 2, 0, id="green"),
        pytest.param((10, 0), ["--attention-backend", "x"], 0, {}, 2, 0, id="other backend"),
        pytest.param((10, 3), [], 0, {}, 2, 0, id="other Blackwell"),
        pytest.param((10, 0), [], 1, {}, 2, 1, id="a stage failed"),
        pytest.param((10, 0), [], -9, {}, 2, 1, id="a stage was killed"),
        pytest.param((10, 0), [], 0, {"tpot": 0.05}, 2, 1, id="regressed"),
        pytest.param((9, 0), [], 0, {}, 3, 0, id="hopper"),
        pytest.param((10, 0), [], 0, None, 2, 1, id="no benchmark"),
    ],
)
def test_a_night_is_green_only_with_its_stages_and_its_benchmark(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    sm: tuple[int, int],
    words: list[str],
    code: int,
    effects: dict[str, float] | None,
    left: int,
    exits: int,
) -> None:
    def run_stages(night: list[Stage], folder: Path) -> dict[str, int]:
        write_records(folder / "records.jsonl", [trial("one", subject="mha/gen", device="cuda:0")])
        for line in (
            ()
            if effects is None
            else synthetic_bench.run_lines(effects, workloads=synthetic_bench.WORKLOADS[1:])
        ):
            append(folder / stages.BENCH, line)
        return {stage.name: code if stage.name == "server" else 0 for stage in night}

    monkeypatch.setattr(nightly_run, "run_stages", run_stages)
    monkeypatch.setattr(nightly_run.outputs, "page", lambda *_: "a page")
    (tmp_path / "summary").write_text("of an earlier step\n")
    monkeypatch.setenv(nightly_run.SUMMARY, str(tmp_path / "summary"))
    monkeypatch.setattr(machine, "pynvml", Driver(("NVIDIA X", sm)))
    history = tmp_path / "history.jsonl"
    asked = ["--report", str(tmp_path), "--history", str(history), "--unpinned"]
    ended = command.main([*asked, *words])
    rule = "a night ends with 1 if a stage failed or was killed, or a case regressed, else with 0"
    assert ended == exits, f"{rule}: {exits}, not {ended}"
    text = (tmp_path / "summary").read_text()
    said = "a night's summary comes after what the job's other steps told GitHub"
    assert text.startswith("of an earlier step\n"), said
    assert "as pinned" in text, f"a summary tells what is installed as pinned: {text}"
    assert "9 skipped" not in text, f"of the checks a summary tells the packages alone: {text}"
    told = f"not verified on Blackwell (10.0, 10.3): {left} trials"
    rule = "a trial that ran on Blackwell is verified, whatever --attention-backend the night has"
    assert told in text, f"{rule}: {told!r}, not {text}"
    [undone] = [line for line in text.splitlines() if line.startswith("  stages: ")] or [""]
    told = "a summary names each stage that did not succeed on Blackwell, and no other"
    assert ("server" in undone) == (sm == (9, 0) or code != 0), f"{told}: {undone!r}"
    told = "a summary says that there is no benchmark where there is none"
    assert ("## specgate: no benchmark" in text) == (effects is None), f"{told}: {text}"
    told = "a night enters the history if it has a benchmark"
    assert history.is_file() == (effects is not None), told
