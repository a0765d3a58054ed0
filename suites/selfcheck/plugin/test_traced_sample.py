"""Coverage is measured in so many parameters of a test as its sample holds, and all of them run."""

from __future__ import annotations

import pytest

from fixtures.pytest_plugin import traced_sample
from harness.core.paths import ROOT

pytest_plugins = ["pytester"]

TESTS = """
import pytest

@pytest.mark.parametrize("number", range(50))
def test_many(number):
    pass

@pytest.mark.parametrize("number", range(5))
def test_few(number):
    pass

@pytest.mark.untraced
def test_long():
    pass
"""


def untraced(pytester: pytest.Pytester, *words: str) -> list[str]:
    """Tests that would not be traced, of the file above."""
    pytester.makepyfile(test_sampled=TESTS)
    plugin = ("-p", "fixtures.pytest_plugin.traced_sample", "-n0")
    items, _ = pytester.inline_genitems(*plugin, *words)
    assert len(items) == 56
    return sorted(item.name for item in items if item.stash.get(traced_sample.LEFT_OUT, False))


def test_more_parameters_than_the_sample_are_not_traced(pytester: pytest.Pytester) -> None:
    names = untraced(pytester)
    assert names.pop(0) == "test_long"
    assert len(names) == 50 - traced_sample.SAMPLE
    assert all(name.startswith("test_many[") for name in names)
    # Not one end of the table, nor every second row.
    numbers = [int(name.removeprefix("test_many[").removesuffix("]")) for name in names]
    assert min(numbers) < 10 < 40 < max(numbers)
    assert {number % 2 for number in numbers} == {0, 1}


def test_a_sample_is_the_same_in_every_process(pytester: pytest.Pytester) -> None:
    assert untraced(pytester) == untraced(pytester)


def test_a_run_that_asks_which_test_executes_what_traces_all(pytester: pytest.Pytester) -> None:
    assert untraced(pytester, "-p", "pytest_cov.plugin", "--cov-context=test") == []


@pytest.mark.parametrize(("marks", "is_traced"), [("", True), ("@pytest.mark.untraced", False)])
def test_fixtures_and_processes_are_traced_where_their_test_is(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, marks: str, is_traced: bool
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makepyfile(
        f"""
        import os, pytest
        from coverage import Coverage

        def traced():
            return [Coverage.current() is not None, *(name in os.environ for name in NAMES)]

        NAMES = {traced_sample.OF_PROCESSES}
        os.environ.update(dict.fromkeys(NAMES, "settings"))
        own = [Coverage(data_file=None), Coverage(data_file=None)]  # as in a worker of xdist
        own[0].start()
        own[1].start()

        @pytest.fixture
        def given():
            before = traced()
            yield before
            assert traced() == before, "a fixture's teardown is traced where its test is"

        {marks}
        def test_one(given):
            said = "a test, its fixtures and its processes are traced unless it is left out"
            assert given == traced() == [{is_traced}] * 3, said

        def test_next(given):
            assert given == traced() == [True] * 3, "behind a test that is left out all is traced"

        def test_last():
            running = []
            while (current := Coverage.current()) in own:
                current.stop()
                running.append(current)
            said = "behind a test that is left out each coverage that it stopped runs again"
            assert running == own[::-1], said + f": {{len(running)}} of 2, in their order"
        """
    )
    plugin = ("-p", "fixtures.pytest_plugin.traced_sample", "-n0")
    result = pytester.runpytest_subprocess(*plugin)
    red = [line for line in result.outlines if line.startswith("E  ")]
    assert not red, red[0].partition(": ")[2] or red[0]
    result.assert_outcomes(passed=3)
