"""No mode leaves anything for the next one, whatever the two are and however they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise, product
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


def every_pair(steps: Sequence[Step]) -> Iterator[Step]:
    """The shortest sequence in which each step comes once after each, itself among them."""
    for i, step in enumerate(steps):
        yield step
        for other in steps[i + 1 :]:
            yield from (step, other)
    yield steps[0]


def test_a_sequence_has_every_pair_once() -> None:
    sequence = list(every_pair(STEPS))
    assert Counter(pairwise(sequence)) == Counter(product(STEPS, STEPS))


@pytest.mark.parametrize("name", GEOMETRIES)
def test_each_step_is_right_after_each(name: str) -> None:
    modes = all_modes(name)
    before, wrong = "nothing", []
    for i, step in enumerate(every_pair(STEPS)):
        found = modes.run(step, with_decoy=bool(i % 2))
        now = "_".join(step)
        wrong += [f"{now} after {before}: {one.message}" for one in found[:1]]
        before = now
    assert not wrong, "\n".join(wrong)
