"""Memory that is allocated holds garbage in the tests that ask for it, and in none behind them."""

from __future__ import annotations

import pytest

from fixtures.pytest_plugin.nested_runs import run_forked

pytest_plugins = ["pytester"]

TESTS = """
import torch

def test_asks(garbage):
    assert torch.empty(3).isnan().all()

def test_comes_behind():
    assert not torch.are_deterministic_algorithms_enabled()
"""


def test_garbage_ends_with_the_test_that_asked_for_it(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("from fixtures.pytest_plugin.plugin import garbage")
    pytester.makepyfile(TESTS)
    outcomes = run_forked(pytester, "-p", "no:cacheprovider").parseoutcomes()
    assert outcomes == {"passed": 2}, f"memory is garbage for the test that asks alone: {outcomes}"
