"""Tests run on every core, unless they are named one by one or somebody looks into a process."""

from __future__ import annotations

import os
import tomllib

import pytest

from fixtures.pytest_plugin import workers
from harness.core.paths import ROOT

pytestmark = pytest.mark.untraced
pytest_plugins = ["pytester"]


@pytest.mark.parametrize(
    ("words", "chosen", "spread"),
    [
        ((), "auto", "worksteal"),
        (("-k", "draft_extend_v2"), "auto", "worksteal"),
        (("test_a.py",), "auto", "worksteal"),
        (("test_a.py::test_one",), None, "no"),
        (("test_a.py", "test_a.py::test_one"), None, "no"),
        (("-n0",), 0, "no"),
        (("-n3",), 3, "worksteal"),
        (("-n3", "--dist=loadfile"), 3, "loadfile"),
        (("--dist", "no"), None, "no"),
        (("--dist=load",), None, "load"),
        (("--pdb",), None, "no"),
        (("--collect-only",), None, "no"),
        (("--golden=add",), None, "no"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_workers_are_chosen(
    pytester: pytest.Pytester, words: tuple[str, ...], chosen: int | str | None, spread: str
) -> None:
    pytester.makepyfile(test_a="def test_one(): pass")
    config = pytester.parseconfig("-p", "fixtures.pytest_plugin.goldens", *words)
    workers.pytest_cmdline_main(config)
    assert (config.option.numprocesses, config.option.dist) == (chosen, spread)
    assert config.option.maxprocesses == 8


def test_more_workers_are_had_by_asking(pytester: pytest.Pytester) -> None:
    config = pytester.parseconfig("-n", "auto", "--maxprocesses", "64")
    workers.pytest_cmdline_main(config)
    assert (config.option.numprocesses, config.option.maxprocesses) == ("auto", 64)


@pytest.mark.parametrize(
    ("words", "told"), [((), "2 workers*"), (("test_a.py::test_one",), "collected 1 item")]
)
def test_xdist_reads_what_is_chosen(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    told: str,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "2")
    pytester.makepyfile(test_a="def test_one(): pass\ndef test_two(): pass")
    plugins = ("-p", "xdist.plugin", "-p", "fixtures.pytest_plugin.workers")
    result = pytester.runpytest_subprocess(*plugins, *words)
    result.assert_outcomes(passed=1 if words else 2)
    result.stdout.fnmatch_lines([told])


def test_pytest_answers_without_xdist(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(ROOT)
    words = ("-p", "no:xdist", "-q", "suites/selfcheck/plugin/test_workers.py::test_mistyped")
    done = pytester.runpytest_inprocess(*words)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: not found: " in done.stderr.str()
    assert "unrecognized arguments" not in done.stderr.str()


def test_nothing_forces_workers() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    options = project["tool"]["pytest"]["ini_options"]["addopts"]
    assert not [word for word in options if word.startswith(("-n", "--maxprocesses", "--dist"))]
