"""Every unit is in exactly one batch with its neighbours, and no batch is longer than it may be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ci.cluster.batches import ROUNDS, SHORTEST_S, UNKNOWN_S, Batch, apart, batches

SECONDS = st.lists(st.floats(0.001, 100.0), min_size=1, max_size=60)


@given(seconds=SECONDS, slots=st.integers(1, 50))
def test_every_unit_once_and_no_batch_too_long(seconds: list[float], slots: int) -> None:
    units = [f"u{number}" for number in range(len(seconds))]
    recorded = dict(zip(units, seconds, strict=True))
    made = batches(units, recorded, slots)
    assert sorted(u for batch in made for u in batch.units) == sorted(units)
    places = {unit: place for place, unit in enumerate(units)}
    for batch in made:
        at = [places[unit] for unit in batch.units]
        assert at == list(range(at[0], at[0] + len(at)))
    most = max(sum(seconds) / (slots * ROUNDS), SHORTEST_S, *seconds)
    assert all(batch.seconds <= most * (1 + 1e-9) for batch in made)
    assert [b.seconds for b in made] == sorted((b.seconds for b in made), reverse=True)


def test_short_units_share_a_batch() -> None:
    # 0.5 s hold five units of 0.1 s; 20 of them on one slot make 2 s, of which an eighth is less.
    units = [f"u{number:02}" for number in range(20)]
    made = batches(units, dict.fromkeys(units, 0.099), 1)
    assert [len(batch.units) for batch in made] == [5, 5, 5, 5]


def test_what_was_never_timed_takes_the_median_of_the_others() -> None:
    recorded = {"a": 1.0, "b": 3.0, "c": 40.0}
    made = batches(["a", "b", "c", "new"], recorded, 2)
    assert {batch.units: batch.seconds for batch in made} == {
        ("c",): 40.0,
        ("new",): 3.0,
        ("b",): 3.0,
        ("a",): 1.0,
    }
    assert batches(["new"], {}, 1) == [Batch(units=("new",), seconds=UNKNOWN_S)]


def test_of_units_that_were_never_timed_the_last_go_alone() -> None:
    units = [f"u{number}" for number in range(4341)]
    made = batches(units, {}, 16)
    assert [unit for batch in made for unit in batch.units] == units
    sizes = [len(batch.units) for batch in made]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 4341 // (16 * ROUNDS)
    assert sizes[-100:] == [1] * 100


def test_apart_is_a_batch_for_each() -> None:
    assert apart(Batch(units=("a", "b"), seconds=3.0)) == [
        Batch(units=("a",), seconds=1.5),
        Batch(units=("b",), seconds=1.5),
    ]
