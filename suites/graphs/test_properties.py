"""Any lengths, layout, accept vector and order of modes agree with the oracle."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from fixtures.drivers.mode_orders import STEPS, AllModes, Step, cases_of, decoy, row
from fixtures.tables import find
from harness.core.case import Case, Family, KVDtype, Layout, Mode
from harness.subjects import SUBJECTS, Subject

WIDTH = 5


@st.composite
def rounds(draw: st.DrawFn, subject: Subject) -> tuple[list[Case], list[Step]]:
    family = subject.family
    lens = draw(st.lists(st.integers(0, 150), min_size=1, max_size=5))
    accept = draw(st.lists(st.integers(1, WIDTH), min_size=len(lens), max_size=len(lens)))
    fields: dict[str, Any] = {
        "page_size": draw(st.sampled_from([32, 64])),
        "layout": draw(st.sampled_from(Layout)),
        "num_draft_tokens": WIDTH,
        "num_steps": draw(st.integers(2, 7)),
        "num_kv_heads": draw(st.sampled_from([1, 2, 8])),
    }
    if family is Family.MLA:
        fields |= {"num_q_heads": 2, "num_kv_heads": 1}
    if draw(st.booleans()):
        fields |= {"kv_dtype": KVDtype.FP8, "k_scale": 0.3, "v_scale": 0.7}
    if family is Family.MHA:
        several_queries = not subject.capability.needs_packed_mask
        fields["window_left"] = draw(st.sampled_from([-1, 17, 64] if several_queries else [-1]))
        fields["sinks"] = draw(st.booleans())
    base = Case(id="drawn", family=family, mode=Mode.DECODE, prefix_lens=tuple(lens), **fields)
    steps = draw(st.lists(st.sampled_from(STEPS), min_size=2, max_size=4))
    return cases_of(lens, accept, base), steps


@pytest.mark.parametrize(
    "name", ["trtllm_mha/xqa", "trtllm_mha/trtllm_gen", "trtllm_mla/trtllm_gen"]
)
def test_every_step_of_any_order_agrees(name: str) -> None:
    subject = SUBJECTS[name]

    @settings(max_examples=15, deadline=None, derandomize=True, database=None)
    @given(rounds(subject))
    def check(drawn: tuple[list[Case], list[Step]]) -> None:
        cases, steps = drawn
        modes = AllModes(subject, cases)
        for i, step in enumerate(steps):
            case = next(case for case in cases if case.mode is step[0])
            case = decoy(case) if i % 2 else case
            note(f"{' '.join(step)}: {row(case)}")
            wrong = modes.run(step, with_decoy=bool(i % 2))
            assert not wrong, wrong[0].message

    check()


def test_a_row_to_paste_is_the_case_it_came_from() -> None:
    case = find("mha-draft_extend_v2-accept_1_3")
    name, fields = eval(row(case).rstrip(","), {"Layout": Layout, "KVDtype": KVDtype})
    assert name == "name_the_edge"
    assert Case(id=case.id, family=case.family, mode=case.mode, **fields) == case
