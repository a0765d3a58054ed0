"""Tests that did not run are counted by reason in one short table, not listed."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import pytest

@pytest.mark.parametrize("value", [20, 31, "(64, 16)"])
def test_refused(value):
    pytest.skip(f"xqa refuses window_left {value}: accepts -1, and nothing else")

def test_long():
    pytest.skip(" ".join(["needs a GPU,"] * 12))

@pytest.mark.xfail(reason="issue 7", strict=True)
def test_waived():
    assert False

def test_runs():
    pass
"""


def test_reasons_are_counted(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_inprocess("-p", "fixtures.pytest_plugin.skips")
    result.assert_outcomes(passed=1, skipped=4, xfailed=1)
    result.stdout.fnmatch_lines(
        [
            "* not run, by reason *",
            "     3  xqa refuses window_left",
            "     1  needs a GPU, *",
            "        GPU, needs a GPU, *",
            "     1  waived: issue 7",
        ]
    )
    result.stdout.no_fnmatch_line("SKIPPED*")
    [start] = [n for n, line in enumerate(result.outlines) if "not run, by reason" in line]
    assert max(map(len, result.outlines[start:])) <= 80


def test_nothing_is_said_where_all_ran(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_runs(): pass")
    result = pytester.runpytest_inprocess("-p", "fixtures.pytest_plugin.skips")
    result.stdout.no_fnmatch_line("*not run, by reason*")
