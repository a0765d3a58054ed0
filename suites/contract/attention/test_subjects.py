"""A subject is found by its name, and says what no graph of it serves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fixtures.tables import CASES
from harness.core.case import Case, Execution, Mode
from harness.errors import UsageError
from harness.subjects import SUBJECTS, find_subject

XQA = find_subject("trtllm_mha/xqa")


def first(mode: Mode) -> Case:
    return next(case for case in CASES.values() if (case.family, case.mode) == (XQA.family, mode))


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"subject = 'trtllm_mha' .*trtllm_mla/flash_mla"):
        find_subject("trtllm_mha")
    assert [find_subject(name).name for name in SUBJECTS] == list(SUBJECTS)


@pytest.mark.parametrize("mode", [Mode.EXTEND, Mode.IDLE])
def test_a_prefill_has_no_graph(mode: Mode) -> None:
    case = first(mode)
    assert XQA.refusal(case, Execution.GRAPH) == f"{mode} has no graph"
    assert XQA.refusal(case, Execution.EAGER) is None


def test_padding_after_the_planned_rows_is_no_graph() -> None:
    case = replace(first(Mode.DECODE), padded_rows=2)
    told = XQA.refusal(case, Execution.GRAPH)
    assert told is not None
    assert told.startswith("DP padding")
    assert XQA.refusal(case, Execution.EAGER) is None
