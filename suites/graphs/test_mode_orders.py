"""No mode leaves anything for the next one, whatever the two are and however they run."""

from __future__ import annotations

from functools import cache, lru_cache
from itertools import product
from typing import Any

import pytest

from fixtures.drivers.mode_orders import STEPS, AllModes, cases_of
from fixtures.tables.past_examples import Step
from harness.core.case import Case, Mode
from harness.differential import expected
from harness.subjects import SUBJECTS

pytestmark = pytest.mark.untraced
LENS, ACCEPT_LENS = (33, 64, 95), (1, 4, 2)
# XQA has no window with several queries; trtllm-gen has no packed mask.
GEOMETRIES: dict[str, dict[str, Any]] = {
    "trtllm_mha/xqa": {},
    "trtllm_mha/trtllm_gen": {"window_left": 40},
    "trtllm_mla/trtllm_gen": {"num_q_heads": 2, "num_kv_heads": 1},
}
ANSWERS = lru_cache(maxsize=64)(expected._expected.__wrapped__)


@cache
def all_modes(name: str) -> AllModes:
    base = Case(
        id=f"orders-{name}",
        family=SUBJECTS[name].family,
        mode=Mode.DECODE,
        prefix_lens=LENS,
        page_size=32,
        capture_bs=(2, 4),
        **GEOMETRIES[name],
    )
    return AllModes(SUBJECTS[name], cases_of(LENS, ACCEPT_LENS, base))


@pytest.fixture(autouse=True)
def asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second is the second of many: the oracle is asked for its answer by the first of them."""
    monkeypatch.setattr(expected, "_expected", ANSWERS)


# Neighbours have another second: one that ran on what it left itself would hide a kept plan.
@pytest.mark.parametrize(
    ("first", "second"),
    [pytest.param(a, b, id="-then-".join(map("_".join, (a, b)))) for a, b in product(STEPS, STEPS)],
)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_second_is_right_after_the_first(name: str, first: Step, second: Step) -> None:
    modes = all_modes(name)
    modes.forward(first, with_decoy=True)
    wrong = modes.run(second)
    assert not wrong, wrong[0].message
