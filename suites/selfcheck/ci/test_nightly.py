"""The nightly job plans for the GPUs it finds, or for those it is meant for."""

from __future__ import annotations

import argparse
import io
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest
from rich.console import Console

from ci.nightly import machine, show, stages
from ci.nightly.checks import NightlyCheck
from ci.nightly.machine import Machine, is_visible
from ci.nightly.stages import PinnedArm, Stage
from ci.nightly.trials import PlannedTrial
from fixtures import bench, planned
from fixtures.fakes.fake_nvml import Driver
from fixtures.plan import covering_trials
from fixtures.plan import trials as planned_here
from harness.bench.session_records import Role
from harness.core.capability import BLACKWELL
from harness.core.paths import ROOT
from harness.errors import UsageError

CONFIG = machine.configuration()
FIRST = ("differential", "triples on cpu", "latency")
PROPERTIES = ("properties on cpu", "properties on cuda")
PINS = {"reference": "sglang==0.5.14", "candidate": "sglang"}


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "pynvml", Driver(broken=True))


def with_gpus(monkeypatch: pytest.MonkeyPatch, *gpus: tuple[str, tuple[int, int]]) -> Machine:
    monkeypatch.setattr(machine, "pynvml", Driver(*gpus))
    return machine.detect(CONFIG)


@pytest.mark.parametrize(
    ("sm", "name", "kernels"),
    [
        ((10, 0), "Blackwell", ["trtllm_gen"]),
        ((10, 3), "Blackwell", ["trtllm_gen"]),
        ((9, 0), "Hopper", ["flash_mla", "xqa"]),
    ],
)
def test_kernels_follow_from_the_gpu(
    monkeypatch: pytest.MonkeyPatch, sm: tuple[int, int], name: str, kernels: list[str]
) -> None:
    here = with_gpus(monkeypatch, ("NVIDIA X", sm), ("NVIDIA X", sm))
    assert (here.gpus, here.sm, here.kernels) == (("NVIDIA X",) * 2, sm, kernels)
    assert str(here).startswith(
        f"2 × NVIDIA X, {name} {sm[0]}.{sm[1]}: runs {', '.join(kernels)}; "
    )


def test_hopper_says_what_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    said = str(with_gpus(monkeypatch, ("NVIDIA H200", (9, 0))))
    assert "trtllm_gen needs compute capability 10.0 or 10.3, this device has 9.0" in said


def test_the_target_and_every_blackwell_have_a_row() -> None:
    known = {machine.parsed(gpu) for row in CONFIG["machine"] for gpu in row["gpus"]}
    assert known >= BLACKWELL
    assert machine.parsed(CONFIG["target_gpu"]) in BLACKWELL


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_a_plan_is_for_the_target_or_what_is_asked() -> None:
    assert machine.detect(CONFIG).sm == (10, 0)
    hopper = machine.detect(CONFIG, "9.0")
    assert (hopper.gpus, hopper.sm) == ((), (9, 0))
    assert str(hopper).startswith("no GPU here, planned for Hopper 9.0: runs flash_mla, xqa; ")


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("text", ["8.0", "ten", "10", "10.0.0", "-9.0"])
def test_a_gpu_that_no_row_is_for_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="compute capability = "):
        machine.detect(CONFIG, text)


@pytest.mark.parametrize(
    ("listed", "visible"),
    [("10", [10]), ("2, 0", [0, 2]), ("GPU-n4", [4]), ("", []), (" ,", [])],
)
def test_a_night_is_on_the_gpus_that_are_visible(
    monkeypatch: pytest.MonkeyPatch, listed: str, visible: list[int]
) -> None:
    monkeypatch.setattr(machine, "pynvml", Driver(*((f"n{n}", (9, 0)) for n in range(11))))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    names = [name for name, _ in machine.installed_gpus()]
    told = "of eleven GPUs those are visible whose whole index, or whose UUID, is listed"
    assert names == [f"n{n}" for n in visible], f"{told}: CUDA_VISIBLE_DEVICES={listed!r}: {names}"


def test_the_beginning_of_a_uuid_names_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f9")
    seen = [uuid for uuid in ("GPU-8932f937-d72c", "GPU-8931aa05-11e0") if is_visible(7, uuid)]
    told = "CUDA takes as much of a UUID as tells the GPUs apart, and so does a night"
    assert seen == ["GPU-8932f937-d72c"], f"{told}: {seen}"


def test_gpus_of_unlike_compute_capabilities_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="one compute capability"):
        with_gpus(monkeypatch, ("NVIDIA X", (10, 0)), ("NVIDIA X", (9, 0)))
    here = with_gpus(monkeypatch, ("NVIDIA H100", (9, 0)), ("NVIDIA H200", (9, 0)))
    said = "GPUs of one compute capability are one machine, whatever their names"
    assert (here.gpus, here.sm) == (("NVIDIA H100", "NVIDIA H200"), (9, 0)), said


def plan_of(
    sm: str = "10.0", backend: str | None = None, options: Sequence[str] = (), **pins: str
) -> dict[str, Stage]:
    here = Machine((), machine.parsed(sm), machine.row_of(CONFIG, machine.parsed(sm)))
    both = stages.arms_of(PINS | pins)
    night = stages.plan(here.serving(backend), CONFIG, Path("out"), both, options)
    return {stage.name: stage for stage in night}


def option(stage: Stage, name: str) -> str:
    return stage.argv[stage.argv.index(name) + 1]


@pytest.mark.parametrize(("sm", "backend"), [("10.3", "trtllm_mha"), ("9.0", "triton")])
def test_benchmark_compares_two_environments_with_controls(sm: str, backend: str) -> None:
    night = plan_of(sm)
    stage = night["bench"]
    assert list(night)[:5] == [*FIRST, *PROPERTIES]
    assert [option(night[name], "--covering") for name in FIRST[:2]] == ["3", "3"]
    drawn = date.fromordinal(int(option(night[FIRST[1]], "--draw")))
    assert abs(drawn - datetime.now(UTC).date()) <= timedelta(days=1)
    assert list(night)[-2:] == ["server", "bench"]
    assert stage.needs == ("reference", "candidate")
    asked = bench_options(stage)
    assert asked.sessions == "candidate,A/A,injected"
    sides = [bench.arm_of(option(stage, side)) for side in ("--a", "--b")]
    pythons = [
        ROOT / ".tox" / "pins" / name / "bin" / "python" for name in ("sglang-0.5.14", "sglang")
    ]
    assert [Path(side.options["python"]) for side in sides] == pythons
    assert {side.options["backend"] for side in sides} == {backend}
    assert [side.options["name"] for side in sides] == ["reference", "candidate"]
    assert night["reference"].argv[0] == str(pythons[0])
    assert night["reference"].argv[-1] == "sglang==0.5.14"
    assert night["reference"].needs == ("reference plugin",)
    assert night["reference plugin"].argv[0] == str(pythons[0])
    assert night["reference plugin"].argv[-1] == str(ROOT)
    said = "the plugin brings no package of its own into the environment of an arm"
    assert "--no-deps" in night["reference plugin"].argv, said
    said = "a pin without a version is the newest release, also where one is installed"
    assert night["candidate"].argv[-2:] == ("--upgrade", "sglang"), said
    assert night["reference plugin"].needs == ("reference environment",)
    assert {side.shape for side in sides} == {"llama-3.1-8b"}


def bench_options(stage: Stage) -> argparse.Namespace:
    """What the benchmark makes of its command line, which must say enough for a plan."""
    options = bench.parser().parse_args(stage.argv[4:])
    assert bench.setup(options).roles == tuple(Role)
    return options


def test_suites_of_servers_ask_the_candidate() -> None:
    night = plan_of("10.3", candidate="sglang==0.5.23")
    server = night["server"]
    home = ROOT / ".tox" / "pins" / "sglang-0.5.23"
    assert option(server, "--server") == "sglang"
    assert option(server, "--server-python") == str(home / "bin" / "python")
    assert option(server, "--server-backend") == "trtllm_mha"
    assert server.needs == ("candidate",)
    assert list(night).index("candidate") < list(night).index("server")


def test_property_tests_have_a_budget_on_each_device() -> None:
    night = plan_of()
    for name in PROPERTIES:
        stage, device = night[name], name.split()[-1]
        assert float(option(stage, "--property-seconds")) >= 60
        assert option(stage, "--device") == device
        assert stage.argv[-1].endswith(f"out/properties-{device}.xml")
        assert not stage.needs


def test_another_backend_is_served_and_benchmarked() -> None:
    night = plan_of("9.0", backend="fa3")  # another than nightly.toml has
    assert option(night["server"], "--server-backend") == "fa3"
    sides = [bench.arm_of(option(night["bench"], side)) for side in ("--a", "--b")]
    assert [side.options["backend"] for side in sides] == ["fa3", "fa3"]


def test_a_night_measures_the_newest_release_against_a_pinned_one() -> None:
    reference, candidate = (CONFIG["bench"][name] for name in ("reference", "candidate"))
    assert candidate == "sglang"
    assert reference.startswith("sglang==")


def test_the_benchmark_is_told_more_and_the_last_word_wins() -> None:
    night = plan_of(options=("--seconds", "60.5", "--design", "pairs"))
    asked = bench_options(night["bench"])
    assert (asked.seconds, asked.design) == (60.5, "pairs")
    assert asked.injected == bench_options(plan_of()["bench"]).injected


def test_an_installed_python_needs_no_environment() -> None:
    night = plan_of(reference=sys.executable)
    assert not [name for name in night if name.startswith("reference")]
    assert night["bench"].needs == ("candidate",)
    both = plan_of(reference=sys.executable, candidate=sys.executable)
    assert list(both) == [*FIRST, *PROPERTIES, "server", "bench"]
    assert not any(stage.needs for stage in both.values())
    assert f"python={sys.executable}" in option(night["bench"], "--a")


@pytest.mark.parametrize("pin", ["", "sglang=0.5", "-e .", "/no/such/python", "a b", "sglang==1;x"])
def test_a_pin_that_is_neither_is_refused(pin: str) -> None:
    with pytest.raises(UsageError, match=r"a requirement such as sglang==0\.5\.14, or an existing"):
        PinnedArm(pin, Path())


def test_commands_of_stages_exist() -> None:
    night = plan_of()
    paths = [word for stage in night.values() for word in stage.argv if word.startswith("suites/")]
    assert paths
    assert all((ROOT / path).is_dir() for path in paths)
    assert [stage.argv[2] for stage in night.values() if stage.argv[1] == "-m"] == [
        "harness", "harness", "harness", "pytest", "pytest",
        "venv", "pip", "pip", "venv", "pip", "pip", "pytest", "harness",
    ]  # fmt: skip


def test_plan_for_a_gpu_that_is_not_here_is_the_one_a_gpu_would_make() -> None:
    rows = list(planned.rows((9, 0)))
    runs = Counter(subject.split("/")[1] for _, subject, _, _, refused in rows if not refused)
    assert set(runs) == {"xqa", "flash_mla", "reference"}
    assert {row[:2] for row in planned.rows(None)} == {(c.id, s.name) for c, s, _ in planned_here()}
    triples = {(case.id, on.name) for case, on, _ in covering_trials((9, 0), 3)}
    missed = triples - {row[:2] for row in planned.rows((9, 0), 3)}
    assert not missed, f"of --covering 3 every row is planned, {len(missed)} are not"
    needs = "trtllm_gen needs compute capability 10.0 or 10.3, this device has 9.0"
    assert {row[4] for row in rows if row[1] == "trtllm_mha/trtllm_gen"} == {needs}


def test_a_plan_is_printed_with_its_brackets() -> None:
    said = "wheel [/pins] holds sglang[all]"
    trial = PlannedTrial("decode", "trtllm_mha/xqa", "decode", "eager", "no page [bold]")
    console = Console(file=io.StringIO(), width=200)
    where = Machine(("GPU [red]",), (9, 0), {"name": "hopper"})
    show.show(console, where, [trial], [NightlyCheck("pins", False, said)], [])
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue()
    for part in (said, "no page [bold]", "[red]"):
        assert part in printed, f"{part} is told as it is"
