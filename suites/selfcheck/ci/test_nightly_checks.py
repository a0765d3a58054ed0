"""What a night needs is checked before a kernel runs, and what was not asked is no success."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ci.nightly import checks
from ci.nightly.__main__ import free_gib_needed
from ci.nightly.checks import NightlyCheck
from ci.nightly.stages import arms_of, module

pytestmark = pytest.mark.untraced


def junit(text: str) -> Any:
    def started(module: str, *args: str) -> subprocess.CompletedProcess[str]:
        [path] = [word.partition("=")[2] for word in args if word.startswith("--junitxml=")]
        Path(path).write_text(f"<testsuites><testsuite {text}/></testsuites>")
        return subprocess.CompletedProcess([], 0, "", "")

    return started


@pytest.mark.parametrize(
    ("counts", "holds", "said"),
    [
        ((16, 0, 0, 0), True, "16 tests passed, 0 failed"),
        ((16, 1, 1, 0), False, "14 tests passed, 2 failed"),
        ((16, 0, 0, 9), None, "7 tests passed, 0 failed; 9 skipped, because a kernel package"),
        ((16, 1, 0, 9), False, "6 tests passed, 1 failed; 9 skipped"),
        ((0, 0, 0, 0), False, "0 tests passed"),
    ],
)
def test_signatures_that_were_not_asked_are_no_success(
    monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...], holds: bool | None, said: str
) -> None:
    names = ("tests", "failures", "errors", "skipped")
    text = " ".join(f'{name}="{count}"' for name, count in zip(names, counts, strict=True))
    monkeypatch.setattr(checks, "started", junit(text))
    found = checks.signatures()
    assert found.holds is holds
    assert found.said.startswith(said)


def test_pytest_that_leaves_no_report_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "started", lambda *_: None)
    assert checks.signatures() == NightlyCheck("kernel signatures", False, "pytest left no report")


def test_packages_are_held_to_their_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    pins = dict(checks.pinned("constraints.txt", "constraints-gpu.txt"))
    assert pins["flashinfer-python"] == "0.6.12"
    found = pins | {"rich": "0.1", "torch": f"{pins['torch']}+cu130"}
    monkeypatch.setattr(checks, "version", lambda name: found[name])
    wrong = checks.packages(("test", "gpu"), "gpu")
    assert wrong.said == f"rich {pins['rich']} is pinned, 0.1 is installed"
    assert wrong.holds is False
    found["rich"] = pins["rich"]
    assert checks.packages(("test", "gpu"), "gpu").holds is True
    monkeypatch.setattr(checks, "version", lambda name: version("no-such-package"))
    assert "torch 2.11.0 is pinned, none is installed" in checks.packages(("gpu",), "gpu").said


def test_a_requirement_that_nobody_pinned_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pins = dict(checks.pinned("constraints.txt", "constraints-cpu.txt"))
    monkeypatch.setattr(checks, "version", lambda name: pins[name])
    left = [(name, pin) for name, pin in pins.items() if name != "rich"]
    monkeypatch.setattr(checks, "pinned", lambda *_: left)
    found = checks.packages(("test",), "cpu")
    assert (found.holds, found.said) == (
        False,
        f"rich {pins['rich']} is installed, nothing is pinned",
    )


def test_other_versions_are_accepted_where_asked_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = dict(checks.pinned("constraints.txt", "constraints-gpu.txt")) | {"rich": "99.1"}
    monkeypatch.setattr(checks, "version", lambda name: found[name])
    asked = checks.accepted(("test", "gpu"))
    assert asked.holds is True
    assert asked.said.startswith("not held to their pins: ")
    assert "rich 99.1" in asked.said
    found["rich"] = "0.1"
    assert checks.accepted(("test",)) == NightlyCheck(
        "packages", False, "rich>=13 is required, 0.1 is installed"
    )
    monkeypatch.setattr(checks, "version", lambda name: version("no-such-package"))
    assert "flashinfer-python==0.6.12 is required, none is" in checks.accepted(("gpu",)).said


def test_room_is_asked_for_environments_that_are_made() -> None:
    config = {"free_gib": 3, "free_gib_environment": 7}
    pins = {"a": sys.executable, "b": "sglang", "c": "sglang==0.5.14"}
    assert free_gib_needed(config, arms_of(pins)) == 17.0
    assert free_gib_needed(config, arms_of({"a": sys.executable})) == 3.0


def test_the_benchmark_is_asked_whether_it_understands_its_words(tmp_path: Path) -> None:
    out = tmp_path / "bench.jsonl"
    words = ("harness", "bench", "--a", "embedded:", "--sessions", "A/A", "--out", str(out))
    bench = module(*words, "--workloads", "bs1-in128-out64")
    assert checks.benchmark(bench) == NightlyCheck(
        "benchmark",
        True,
        "cases that are decided early take less, dropped blocks come on top",
    )
    said = "specgate bench: argument --passes: '0' is not accepted; accepted: 1 or more"
    assert checks.benchmark((*bench, "--passes", "0")) == NightlyCheck("benchmark", False, said)
    assert not out.exists()


def test_a_benchmark_that_is_refused_is_told_by_what_it_says_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = subprocess.CompletedProcess([], 2, "8 workloads, 2 arms\n", "usage: …\nno such GPU\n")
    monkeypatch.setattr(checks, "ran", lambda command: ended)
    found = checks.benchmark(["bench"])
    told = "why a benchmark is refused is the last line of standard error, whatever it printed"
    assert found == NightlyCheck("benchmark", False, "no such GPU"), f"{told}: {found}"


def test_disk_is_that_of_a_folder_to_be_made(tmp_path: Path) -> None:
    deep = tmp_path / "not" / "yet"
    assert checks.disk(deep, 0.0).holds is True
    assert checks.disk(deep, 1e9).holds is False
    assert not deep.parent.exists()


def test_a_disk_that_is_almost_large_enough_is_told_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    there = SimpleNamespace(free=int(59.8 * (1 << 30)))
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: there)
    found = checks.disk(tmp_path, 60.0)
    assert found == NightlyCheck("disk", False, "59 GiB free, 60 are needed")


def test_packages_are_held_to_the_pins_of_the_stack_that_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stacks: list[str] = []

    def packages(_: object, stack: str) -> NightlyCheck:
        stacks.append(stack)
        return NightlyCheck("packages", True, "as pinned")

    made = NightlyCheck("made elsewhere", True, "")
    monkeypatch.setattr(checks, "packages", packages)
    monkeypatch.setattr(checks, "signatures", lambda: made)
    monkeypatch.setattr(checks, "benchmark", lambda argv: made)
    for extras in (("test", "gpu"), ("test",)):
        checks.checks(extras, tmp_path, 0.0, ())
    told = "with the extra gpu packages are held to constraints-gpu.txt, without it to -cpu"
    assert stacks == ["gpu", "cpu"], f"{told}: {stacks}"
