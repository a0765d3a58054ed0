"""Property tests draw the same in every run unless given a budget; a failure can be repeated."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import hypothesis.core
import pytest

from fixtures.pytest_plugin import properties
from fixtures.tables import past_examples

pytestmark = pytest.mark.untraced
pytest_plugins = ["pytester"]

TESTS = """
import time
from pathlib import Path
from hypothesis import example, given, seed, settings, strategies as st

def test_a_property(seeds, past):
    @settings(max_examples=20, database=None, deadline=None)
    @given(number=st.integers(0, 99), text=st.sampled_from("abcdefgh"))
    def check(number, text):
        with open("drawn", "a") as file:
            file.write(f"{number}{text} ")
        assert number not in FORBIDDEN

    for known in past:
        check = example(number=known.example, text="a").via(known.found)(check)
    for number in seeds:
        seed(number)(check)()
        with open("seeds", "a") as file:
            file.write(f"{number} ")

def test_that_draws_nothing():
    Path("drew_nothing").touch()
"""
DRAWS_ON = "with --property-seconds a test draws from new seeds, one by one, until its time is over"
Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the tests, of which ``numbers`` fail; each look at the clock takes a quarter second."""
    monkeypatch.setattr(hypothesis.core, "global_force_seed", None)
    pytester.makeconftest('pytest_plugins = ["fixtures.pytest_plugin.properties"]')

    def run_(*options: object, numbers: object = "()") -> pytest.RunResult:
        for name in ("drawn", "seeds", "drew_nothing"):
            Path(name).unlink(missing_ok=True)
        monkeypatch.setattr(properties, "time", SimpleNamespace(monotonic=count(0, 0.25).__next__))
        pytester.makepyfile(test_numbers=f"FORBIDDEN = {numbers}\n{TESTS}")
        plugins = ("-p", "no:cacheprovider", "-p", "_hypothesis_pytestplugin")
        return pytester.runpytest_inprocess(*plugins, *map(str, options))

    return run_


def words(name: str) -> list[str]:
    return Path(name).read_text().split()


def test_two_runs_draw_the_same_and_another_seed_draws_others(run: Run) -> None:
    drawn = []
    for options in ((), (), ("--hypothesis-seed", 1)):
        run(*options).assert_outcomes(passed=2)
        drawn.append(words("drawn"))
    fixed, again, other = drawn
    assert len(set(fixed)) > 10
    assert fixed == again
    assert len(set(other) - set(fixed)) > 10
    assert words("seeds") == ["1"]


def test_a_budget_counts_on_from_a_random_seed_and_runs_nothing_else(run: Run) -> None:
    first = []
    for _ in range(2):
        run("--property-seconds", 1).assert_outcomes(passed=1, deselected=1)
        assert not Path("drew_nothing").exists()
        given = list(map(int, words("seeds")))
        assert given == [given[0], given[0] + 1, given[0] + 2, given[0] + 3], DRAWS_ON
        first.append(given[0])
    told = "each run with --property-seconds begins at a random seed of its own"
    assert first[0] != first[1], f"{told}: two began at {first[0]}"
    run("--property-seconds", 0.5, "--hypothesis-seed", 7)
    told = "--property-seconds counts on from the --hypothesis-seed that is named, 7"
    assert words("seeds") == ["7", "8"], f"{told}: {words('seeds')}"


def test_a_failure_says_its_seed_and_the_command_that_repeats_it(run: Run) -> None:
    # The simplest example of any seed is 0, so that a number in the middle needs a few seeds.
    result = run("--property-seconds", 99, numbers="range(41, 44)")
    assert result.ret == pytest.ExitCode.TESTS_FAILED, DRAWS_ON
    result.assert_outcomes(failed=1, deselected=1)
    text = result.stdout.str()
    smallest = re.search(r"^number = (\d+), ", text, re.M)
    [(found, node, again)] = re.findall(
        r"^E +Drawn from seed (\d+); again: pytest '(\S+)' --hypothesis-seed (\d+)$", text, re.M
    )
    assert smallest
    assert smallest[1] == "41"
    assert found == again
    result = run(node, "--hypothesis-seed", again, numbers="range(41, 44)")
    result.assert_outcomes(failed=1)
    assert f"Drawn from seed {found}; again" in result.stdout.str()


def test_the_seed_that_failed_is_told_and_not_the_first(run: Run) -> None:
    every_number_of_the_third = (
        "type('Third', (), {'__contains__': lambda *_: "
        "Path('seeds').exists() and len(Path('seeds').read_text().split()) == 2})()"
    )
    seeds = ("--property-seconds", 99, "--hypothesis-seed", 7)
    result = run(*seeds, numbers=every_number_of_the_third)
    assert words("seeds") == ["7", "8"]
    told = re.findall(
        r"Drawn from seed (\d+); again: .* --hypothesis-seed (\d+)", str(result.stdout)
    )
    assert set(told) == {("9", "9")}, "the seed that failed is repeated, not one that passed"


def test_a_row_is_replayed_before_anything_is_drawn(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run("--property-seconds", 99, numbers="range(41, 44)")
    assert result.ret == pytest.ExitCode.TESTS_FAILED, DRAWS_ON
    [row] = re.findall(r"^E +(PastExample\(.*\)),$", result.stdout.str(), re.M)
    known = eval(row.replace("…", "41"), vars(past_examples))
    monkeypatch.setattr(past_examples, "ROWS", (known,))
    run().assert_outcomes(passed=2)
    told = "an example that a property test once failed on is tried before any is drawn"
    assert words("drawn")[0] == "41a", f"{told}: 41a, not {words('drawn')[0]}"
    run(numbers="(41,)").assert_outcomes(failed=1, passed=1)
    told = "where the past example fails again, none is drawn"
    assert words("drawn") == ["41a"] * len(words("drawn")), f"{told}: {words('drawn')}"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--property-seconds", "-1"),
        ("--property-seconds", "inf"),
        ("--property-seconds", "nan"),
        ("--hypothesis-seed", "random"),
        ("--hypothesis-seed", "-3"),
    ],
)
def test_what_is_no_time_or_seed_is_refused(run: Run, option: str, value: str) -> None:
    result = run(f"{option}={value}")
    is_refused = result.ret == pytest.ExitCode.USAGE_ERROR
    assert is_refused, f"{option} is used: {value}, which cannot be, is refused and not ignored"
    result.stderr.fnmatch_lines([f"ERROR: {option} = *{value}* is not accepted; accepted: *"])


@pytest.mark.parametrize(
    ("tests", "workers", "expected"), [(1, 1, 60), (4, 1, 15), (4, 2, 30), (2, 8, 60), (0, 2, 0)]
)
def test_shares_of_a_budget_add_up_to_it(tests: int, workers: int, expected: float) -> None:
    assert properties.share_s(60, tests, workers) == expected


def test_rows_name_tests_that_exist() -> None:
    for row in past_examples.ROWS:
        path, _, name = row.test.partition("::")
        assert f"def {name.partition('[')[0]}(" in Path(path).read_text(), row.test
