"""Rows of our plugin are planned on what sglang's own rows are planned on."""

from __future__ import annotations

import pytest

from fixtures.pytest_plugin.nested_runs import run_forked
from harness.core.paths import ROOT

pytest_plugins = ["pytester"]


def test_a_checkout_is_what_every_row_runs_on(pytester: pytest.Pytester) -> None:
    collect = ["--collect-only", "-q", "-n0", "-p", "no:cacheprovider"]
    given = ["--release", "0.5.23", "--sglang-source", str(pytester.path)]
    rows = str(ROOT / "suites/upstream/test_releases.py")
    done = run_forked(pytester, "-c", str(ROOT / "pyproject.toml"), *collect, *given, rows)
    assert done.ret == 0, done.errlines
    names = [line for line in done.outlines if "test_releases.py::" in line]
    assert sum("specgate_" in name for name in names) > 100
    assert [name for name in names if "-sglang-source/" not in name] == []
