"""The collector is as it was after what it is kept out of, which later collections leave out."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from harness.core.collector import collector_off, importing


@pytest.mark.parametrize("was_on", [True, False])
@pytest.mark.parametrize("kept_out_of", [collector_off, importing])
def test_the_collector_is_off_inside_and_as_it_was_after_an_error(
    kept_out_of: Callable[[], AbstractContextManager[None]], was_on: bool
) -> None:
    def fail() -> None:
        with kept_out_of():
            assert not gc.isenabled()
            raise ImportError

    before = gc.isenabled()
    (gc.enable if was_on else gc.disable)()
    try:
        with pytest.raises(ImportError):
            fail()
        assert gc.isenabled() == was_on
    finally:
        (gc.enable if before else gc.disable)()


def test_what_is_imported_is_collected_no_more() -> None:
    with importing():
        made = [[]]
        frozen = gc.get_freeze_count()
    assert gc.get_freeze_count() > frozen
    assert not any(one is made for one in gc.get_objects())
