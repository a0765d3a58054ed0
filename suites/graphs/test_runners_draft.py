"""A draft graph keeps each step's and each request's row in its place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fixtures.toys.toy_graph import (
    HIDDEN,
    ToyDraftBackend,
    shares_memory,
    toy_draft,
    toy_draft_batch,
    toy_pools,
)
from harness.errors import ContractError, UsageError
from harness.graphs.draft_runner import DraftRunner, draft_input
from harness.graphs.tape import Tape
from harness.upstream.allocator import PADDING_ROW, PADDING_SLOT
from harness.upstream.forward_batch_info import DraftOutput, ForwardBatch

STEPS = 4


def drafter(**changes: Any) -> DraftRunner:
    settings: dict[str, Any] = {
        "forward": toy_draft,
        "attn_backend": ToyDraftBackend(STEPS),
        "new_graph": Tape,
        "capture_bs": (1, 4),
        "hidden_size": HIDDEN,
        **toy_pools(),
    }
    runner = DraftRunner(**(settings | changes))
    runner.capture()
    return runner


def test_every_step_of_a_padded_draft_has_its_own_cache_slots() -> None:
    runner = drafter()
    runner.replay(toy_draft_batch([9, 8, 7, 6], STEPS))
    for buffer in runner.buffers.values():
        buffer.fill_(99)
    batch = toy_draft_batch([5, 3, 8], STEPS)
    output = runner.replay(batch)
    assert output.draft_tokens.tolist() == [[5, 6, 7, 8], [12, 13, 14, 15], [19, 20, 21, 22]]
    assert output.next_token_logits.tolist() == [
        [[5, 10, 3], [6, 20, 3], [7, 30, 3]],
        [[3, 11, 2], [4, 21, 2], [5, 31, 2]],
        [[8, 12, 1], [9, 22, 1], [10, 32, 1]],
    ]
    assert output.hidden_states[1].tolist() == [[2.5, 3.5], [3.5, 4.5], [4.5, 5.5]]
    slots = runner.buffers["out_cache_loc"].tolist()
    assert slots == [10, 11, 12, 0, 20, 21, 22, 0, 30, 31, 32, 0]
    padding = runner.padding(batch)
    assert {name: part.numel() for name, part in padding.items()} == {
        "req_pool_indices": 1,
        "seq_lens": 1,
        "out_cache_loc": 3,
        "topk_index": 1,
        "topk_p": 1,
        "hidden_states": HIDDEN,
    }
    assert all((part == runner.pads[name]).all() for name, part in padding.items())


def test_a_padded_request_reads_and_writes_what_is_reserved() -> None:
    pads = drafter().pads
    assert {name: pads[name] for name in ("req_pool_indices", "out_cache_loc")} == {
        "req_pool_indices": PADDING_ROW,
        "out_cache_loc": PADDING_SLOT,
    }
    assert pads["hidden_states"] == pads["topk_p"] == pads["topk_index"] == 0


def test_a_draft_in_a_smaller_bucket_packs_its_steps_tightly() -> None:
    runner = drafter()
    assert runner.bucket(1) == 1, "a batch is replayed on the smallest captured graph that holds it"
    for buffer in runner.buffers.values():
        buffer.fill_(99)
    output = runner.replay(toy_draft_batch([5], STEPS))
    assert output.next_token_logits[0, :, 1].tolist() == [10, 20, 30]
    slots = runner.buffers["out_cache_loc"].tolist()
    assert slots[:3] == [10, 20, 30]
    assert slots[3:] == [0] * 9, "memory after the bucket is padded, not left as an earlier batch's"
    hidden = runner.buffers["hidden_states"].tolist()
    told = f"hidden states of the 3 requests after the bucket are padded, too: {hidden[1:]}"
    assert hidden[1:] == [[0.0] * HIDDEN] * 3, told


def test_draft_outputs_outlive_the_next_replay_and_no_length_leaks() -> None:
    runner = drafter()
    output = runner.replay(toy_draft_batch([5, 3], STEPS))
    tokens = output.draft_tokens.tolist()
    again = runner.replay(toy_draft_batch([8, 4], STEPS))
    assert output.draft_tokens.tolist() == tokens
    assert not shares_memory(output, runner.captured_outputs[4])
    assert again.next_token_logits[:, 0, 0].tolist() == [8, 4]
    assert runner.buffers["seq_lens"].tolist() == [8, 4, 1, 1]


def test_a_draft_counts_one_token_per_step() -> None:
    runner = drafter(num_tokens_per_req=STEPS - 1)
    assert runner.attn_backend.log[0] == "state 4 12"
    with pytest.raises(UsageError, match="num_tokens_per_req = 1"):
        drafter(num_tokens_per_req=1)


def test_a_captured_draft_is_told_the_steps_of_its_round() -> None:
    plans = drafter().attn_backend.plans
    told = {draft_input(batch).num_steps for batch in plans}
    rule = "num_steps of a captured draft counts the round's steps, one more than its forwards"
    assert told == {STEPS}, f"{rule}: {told}"


def test_another_draft_than_captured_is_refused() -> None:
    runner, batch = drafter(), toy_draft_batch([5, 3], STEPS)
    others = {
        "num_steps = 5": toy_draft_batch([5, 3], STEPS + 1),
        "query tokens = 4": batch.with_changes(out_cache_loc=batch.out_cache_loc[:4]),
        "spec_info = 'NoneType'": batch.with_changes(spec_info=None),
    }
    for message, other in others.items():
        assert not runner.can_run(other), f"can_run is False of a draft of {message}"
        with pytest.raises(ContractError) as refused:
            runner.replay(other)
        named = message in str(refused.value)
        assert named, f"a draft of {message} is refused for that, not for {refused.value}"


def without_hidden_states(batch: ForwardBatch) -> DraftOutput:
    """The toy draft of a model that takes no hidden states."""
    spec = replace(batch.spec_info, hidden_states=torch.zeros(batch.batch_size, HIDDEN))
    return toy_draft(batch.with_changes(spec_info=spec))


def test_hidden_states_are_drafted_from_as_captured_or_refused() -> None:
    batch = toy_draft_batch([5, 3], STEPS)
    bare = batch.with_changes(spec_info=replace(batch.spec_info, hidden_states=None))
    plain = drafter(hidden_size=None, forward=without_hidden_states)
    assert plain.can_run(bare), "a draft model may take no hidden states"
    rule = "a draft with hidden states needs a graph that was captured with them, and the reverse"
    for runner, other, given in ((plain, batch, r"\(2, 2\)"), (drafter(), bare, "None")):
        assert not runner.can_run(other), rule
        told = f"hidden_states = {given} .* hidden_size = {runner.hidden_size}"
        with pytest.raises(ContractError, match=told):
            runner.replay(other)
