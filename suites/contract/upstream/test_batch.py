"""A mode answers one question at a time, and a changed batch leaves the first one alone."""

from __future__ import annotations

import pytest
import torch

from fixtures.toys.toy_attention import make_batch, mha_pool, request_table
from harness.upstream.forward_batch_info import ForwardMode

# is_extend, is_decode, is_idle, is_target_verify, draft_extend, draft_extend with v2, v2
TRUTH = {
    ForwardMode.EXTEND: (1, 0, 0, 0, 0, 0, 0),
    ForwardMode.DECODE: (0, 1, 0, 0, 0, 0, 0),
    ForwardMode.IDLE: (0, 0, 1, 0, 0, 0, 0),
    ForwardMode.TARGET_VERIFY: (0, 0, 0, 1, 0, 0, 0),
    ForwardMode.DRAFT_EXTEND: (0, 0, 0, 0, 1, 1, 0),
    ForwardMode.DRAFT_EXTEND_V2: (0, 0, 0, 0, 0, 1, 1),
}


@pytest.mark.parametrize("mode", ForwardMode, ids=lambda mode: mode.name.lower())
def test_predicates_of_a_mode(mode: ForwardMode) -> None:
    told = (
        mode.is_extend(),
        mode.is_decode(),
        mode.is_idle(),
        mode.is_target_verify(),
        mode.is_draft_extend(),
        mode.is_draft_extend(include_v2=True),
        mode.is_draft_extend_v2(),
    )
    assert told == tuple(map(bool, TRUTH[mode]))


def test_a_changed_batch_shares_its_tensors_and_leaves_the_first_alone() -> None:
    batch = make_batch(ForwardMode.DECODE, request_table(), mha_pool(), [9, 4], torch.arange(4, 6))
    changed = batch.with_changes(forward_mode=ForwardMode.IDLE, batch_size=7)
    assert (batch.forward_mode, batch.batch_size) == (ForwardMode.DECODE, 2)
    assert (changed.forward_mode, changed.batch_size) == (ForwardMode.IDLE, 7)
    assert changed.seq_lens is batch.seq_lens
    assert (batch.seq_lens_cpu, batch.seq_lens_sum, batch.spec_info) == (None, None, None)
