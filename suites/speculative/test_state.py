"""Requests keep their state when others leave, join or change places."""

from __future__ import annotations

import torch

from harness.engine.batch_state import (
    BatchState,
    DraftState,
    StepOutput,
    concatenate,
    gather,
    join,
    select,
)


def state(*numbers: int, needs_cpu_seq_lens: bool = True, draft_state: bool = True) -> BatchState:
    """One request per number; every field of a request is made from its number."""
    told = torch.tensor(numbers)
    column = told[:, None]
    drafted = DraftState(column / 10, column * 1000, column * torch.ones(2))
    return BatchState(
        rows=told,
        seq_lens=told * 10,
        bonus=told * 100,
        seq_lens_cpu=told * 10 + 4 if needs_cpu_seq_lens else None,
        draft_state=drafted if draft_state else None,
    )


def assert_same(obtained: BatchState, expected: BatchState) -> None:
    for name in ("rows", "seq_lens", "bonus", "seq_lens_cpu"):
        mine, due = (getattr(each, name).tolist() for each in (obtained, expected))
        assert mine == due, f"{name} stays with its request: {due}, not {mine}"
    assert obtained.draft_state is not None
    assert expected.draft_state is not None
    for name in ("topk_p", "topk_index", "hidden_states"):
        mine, due = (getattr(each.draft_state, name).tolist() for each in (obtained, expected))
        assert mine == due, f"{name} of a draft stays with its request: {due}, not {mine}"


def test_those_who_stay_keep_every_field_of_theirs() -> None:
    assert_same(select(state(3, 5, 7, 9), [1, 3]), state(5, 9))


def test_a_selection_may_reorder() -> None:
    assert_same(select(state(3, 5, 7), [2, 0]), state(7, 3))


def test_every_request_of_a_large_batch_takes_its_fields_along() -> None:
    many = [3 * i + 1 for i in range(40)]
    kept = [i for i in reversed(range(40)) if i % 7]
    assert_same(select(state(*many), kept), state(*(many[i] for i in kept)))
    order = [(11 * i + 3) % 40 for i in range(40)]
    assert_same(select(state(*many), order), state(*(many[i] for i in order)))


def test_new_requests_follow_the_running_ones() -> None:
    assert_same(join(state(3, 5), state(2)), state(3, 5, 2))


def test_nobody_joined_by_somebody() -> None:
    assert_same(join(select(state(3), []), state(2, 8)), state(2, 8))


def test_without_host_lengths_or_a_draft_there_are_none_after() -> None:
    bare = state(3, 5, needs_cpu_seq_lens=False, draft_state=False)
    for after in (select(bare, [1]), join(bare, bare)):
        assert after.seq_lens_cpu is None
        assert after.draft_state is None


def test_draft_states_are_concatenated_in_order() -> None:
    first, second = state(3, 5).draft_state, state(2).draft_state
    assert first is not None
    assert second is not None
    both = concatenate([first, second])
    assert both.topk_index.flatten().tolist() == [3000, 5000, 2000]
    assert gather(both, torch.tensor([2, 0])).topk_index.flatten().tolist() == [2000, 3000]


def test_a_round_emits_what_was_accepted_of_each_row() -> None:
    output = StepOutput(
        torch.tensor([2, 3, 1]).int(), torch.tensor([[4, 5, 6], [7, 8, 9], [1, 2, 3]])
    )
    assert output.tokens() == [[4, 5], [7, 8, 9], [1]]
