"""Any lengths, widths, layout, accept vector and order of modes agree with the oracle."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, example, given, note, seed, settings
from hypothesis import strategies as st

from fixtures.drivers.mode_orders import STEPS, AllModes, cases_of, decoy, row
from fixtures.tables import find, past_examples
from fixtures.tables.past_examples import ModeOrder, PastExample, written
from harness.core.case import Case, Dtype, Family, KVDtype, Layout, Mode
from harness.subjects import SUBJECTS, Subject

NAMES = (
    "trtllm_mha/xqa",
    "trtllm_mha/trtllm_gen",
    "trtllm_mla/flash_mla",
    "trtllm_mla/trtllm_gen",
)
EXAMPLES = settings(
    max_examples=10,
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    report_multiple_bugs=False,
)
"""One failure, shrunk and not explained: an example takes a good part of a second."""
MOST_REQUESTS, KV_HEADS = 12, (1, 2, 4)
NAMED = {kind.__name__: kind for kind in (Dtype, Family, KVDtype, Layout)}
BLOCK = 32
"""Lengths are so many times this and a rest: into an integer from 100 on Hypothesis mixes constants
of whatever modules are imported, so that a seed would not draw the same in another run."""
MOST_LONG = 4
"""Requests of a batch that may be long: what an example costs is their product."""
ROOM = 80
"""Of the context behind the longest committed prefix, for the decoy's longer one and an extend."""


# Hypothesis makes and checks a strategy once where all that it is made of can be hashed.
@cache
def lengths(most_blocks: int) -> st.SearchStrategy[int]:
    """Of a request that has fewer blocks."""
    return st.builds(
        lambda blocks, rest: BLOCK * blocks + rest,
        st.integers(0, most_blocks - 1),
        st.integers(0, BLOCK - 1),
    )


def any_of(values: Iterable[Any]) -> st.SearchStrategy[Any]:
    """One of a set."""
    return st.sampled_from(tuple(sorted(values)))


@st.composite
def mode_orders(draw: st.DrawFn, subject: Subject) -> ModeOrder:
    kernel = subject.capability
    bs = draw(st.integers(1, MOST_REQUESTS))
    most_blocks = draw(st.sampled_from((1, 5, 30) if bs <= MOST_LONG else (1, 5)))
    width = draw(st.integers(2, kernel.max_q_len))
    fields: dict[str, Any] = {
        "id": f"drawn{draw(st.integers(0, 99))}",
        "prefix_lens": draw(st.tuples(*[lengths(most_blocks)] * bs)),
        "max_context_len": BLOCK * most_blocks + ROOM * draw(st.integers(1, 3)),
        "num_draft_tokens": width,
        "num_steps": draw(st.integers(2, 8)),
        "page_size": draw(any_of(kernel.page_sizes)),
        "layout": draw(st.sampled_from(Layout)),
        "dtype": draw(any_of(kernel.dtypes)),
        "capture_bs": draw(st.sampled_from(((12,), (2, 14), (3, 7, 12)))),
    }
    kv_dtype = draw(any_of(kernel.kv_dtypes))
    if kv_dtype is KVDtype.FP8:
        fields |= {"kv_dtype": kv_dtype, "k_scale": 0.3, "v_scale": 0.7}
    of_family = mla_fields if subject.family is Family.MLA else mha_fields
    fields |= draw(of_family(subject))
    accept_lens = draw(st.tuples(*[st.integers(1, width)] * bs))
    steps = draw(st.lists(st.sampled_from(STEPS), min_size=2, max_size=5))
    geometry = Case(family=subject.family, mode=Mode.DECODE, **fields)
    return ModeOrder(geometry=geometry, accept_lens=accept_lens, steps=tuple(steps))


@st.composite
def mha_fields(draw: st.DrawFn, subject: Subject) -> dict[str, Any]:
    kernel = subject.capability
    heads, group = draw(st.sampled_from(KV_HEADS)), draw(st.sampled_from((1, 3, 8)))
    windows = (-1,) if kernel.max_window_q_len == 1 else (-1, 0, 17, 64)
    return {
        "num_kv_heads": heads,
        "num_q_heads": heads * group,
        "head_dim": draw(any_of(kernel.head_dims)),
        "window_left": draw(st.sampled_from(windows)),
        "sinks": draw(st.booleans()),
    }


@st.composite
def mla_fields(draw: st.DrawFn, subject: Subject) -> dict[str, Any]:
    rank, rotary = draw(any_of(subject.capability.mla_dims))
    heads = draw(st.sampled_from((1, 2, 5)))
    return {
        "num_kv_heads": 1,
        "num_q_heads": heads,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rotary,
    }


@pytest.mark.untraced
@pytest.mark.parametrize("name", NAMES)
def test_every_step_of_any_order_agrees(
    name: str, seeds: Iterator[int], past: list[PastExample]
) -> None:
    subject = SUBJECTS[name]

    @EXAMPLES
    @given(order=mode_orders(subject))
    def check(order: ModeOrder) -> None:
        note(f"example={written(order)}")
        cases = cases_of(order.geometry.prefix_lens, order.accept_lens, order.geometry)
        modes = AllModes(subject, cases)
        for i, step in enumerate(order.steps):
            case = next(case for case in cases if case.mode is step[0])
            case = decoy(case) if i % 2 else case
            note(f"{' '.join(step)}: {row(case)}")
            wrong = modes.run(step, with_decoy=bool(i % 2))
            assert not wrong, wrong[0].message

    for known in past:
        check = example(order=known.example).via(known.found)(check)
    for number in seeds:
        seed(number)(check)()


def drawn(name: str, number: int, count: int = EXAMPLES.max_examples) -> list[ModeOrder]:
    """What a seed draws."""
    orders = []

    @seed(number)
    @settings(EXAMPLES, max_examples=count)
    @given(order=mode_orders(SUBJECTS[name]))
    def keep(order: ModeOrder) -> None:
        orders.append(order)

    keep()
    return orders


def axes(orders: list[ModeOrder]) -> dict[str, set[Any]]:
    """Axis -> the values that were drawn."""
    cases = [order.geometry for order in orders]
    names = ("bs", "num_draft_tokens", "num_steps", "page_size", "layout", "dtype", "kv_dtype")
    values = {name: {getattr(case, name) for case in cases} for name in names}
    return values | {
        "steps": {step for order in orders for step in order.steps},
        "accepted": {n for order in orders for n in order.accept_lens},
        "blocks": {n // BLOCK for case in cases for n in case.prefix_lens},
        "rests": {n % BLOCK for case in cases for n in case.prefix_lens},
    }


@pytest.mark.parametrize("blocks", [1, 5])
def test_the_context_of_an_order_holds_its_longest_requests(blocks: int) -> None:
    geometry = Case(
        id="drawn",
        family=Family.MLA,
        mode=Mode.DECODE,
        prefix_lens=(0, 0),
        max_context_len=BLOCK * blocks + ROOM,
        num_draft_tokens=2,
        num_steps=2,
    )
    longest = min(36, BLOCK * blocks - 1)  # of extend_lens
    pairs = [lens for n in range(BLOCK * blocks) for lens in ((n, longest), (longest, n))]
    cases = [case for lens in pairs for case in cases_of(lens, (1, 2), geometry)]
    extends = [case for case in cases if case.mode is Mode.EXTEND]
    for case in (*extends, *map(decoy, extends)):
        told = f"{case.id} of prefixes {case.prefix_lens}: total_lens <= max_context_len"
        assert max(case.total_lens) <= case.max_context_len, told


@pytest.mark.parametrize("name", ["trtllm_mha/xqa", "trtllm_mla/trtllm_gen"])
def test_many_examples_reach_every_value_of_every_axis(name: str) -> None:
    kernel = SUBJECTS[name].capability
    found = axes(drawn(name, 0, count=250))
    assert found["bs"] == set(range(1, 13))
    assert found["num_draft_tokens"] == set(range(2, 17))
    assert found["accepted"] >= set(range(1, 13))
    assert found["num_steps"] == set(range(2, 9))
    assert found["steps"] == set(STEPS)
    assert found["rests"] == set(range(32))
    assert found["blocks"] >= {0, 1, 2, 3, 4}
    assert max(found["blocks"]) > 20
    assert found["layout"] == set(Layout)
    assert found["page_size"] == kernel.page_sizes
    assert (found["dtype"], found["kv_dtype"]) == (kernel.dtypes, kernel.kv_dtypes)


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_draws_the_same_again_and_another_seed_draws_others(name: str) -> None:
    first, again, other = drawn(name, 0), drawn(name, 0), drawn(name, 1)
    assert first == again
    # The simplest example begins every seed's.
    assert sum(order in first for order in other) <= 2


def test_a_seed_draws_the_same_whatever_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [drawn("trtllm_mha/xqa", number) for number in range(5)]
    (tmp_path / "constants.py").write_text(f"NUMBERS = {list(range(100, 1000))}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "constants", raising=False)
    assert import_module("constants").NUMBERS[-1] == 999
    assert [drawn("trtllm_mha/xqa", number) for number in range(5)] == before


def test_an_example_to_paste_is_the_order_it_came_from() -> None:
    for order in drawn("trtllm_mha/trtllm_gen", 0):
        assert eval(written(order), vars(past_examples) | NAMED) == order


def test_a_row_to_paste_is_the_case_it_came_from() -> None:
    case = find("mha-draft_extend_v2-accept_1_3")
    name, fields = eval(row(case).rstrip(","), NAMED)
    assert name == "name_the_edge"
    assert Case(id=case.id, family=case.family, mode=case.mode, **fields) == case
