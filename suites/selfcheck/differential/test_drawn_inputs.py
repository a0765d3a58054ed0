"""Inputs of a trial have the edges that their row is about."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fixtures.tables import find
from harness.differential.inputs import make_trial_inputs


@pytest.mark.parametrize(("prefix", "evicted"), [(51, 1), (52, 2), (53, 2), (67, 2), (68, 3)])
def test_a_page_is_evicted_as_soon_as_it_is_left_of_the_window(prefix: int, evicted: int) -> None:
    # The query at 52 sees 20 keys to its left: 32 and later, the third page of 16.
    row = find("mha-decode-window_shorter_than_prefix")
    case = replace(row, prefix_lens=(prefix,), window_left=20, page_size=16)
    inputs = make_trial_inputs(case)
    assert inputs.swa_page_of is not None
    (pages,) = inputs.tested.pages
    mapped = [inputs.swa_page_of[page] for page in pages]
    assert mapped[:evicted] == [0] * evicted
    assert 0 not in mapped[evicted:]
