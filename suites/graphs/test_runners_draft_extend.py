"""A draft-extend graph packs v1's ragged tokens and keeps v2's uniform rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fixtures.toys.toy_graph import (
    HIDDEN,
    ToyBackend,
    shares_memory,
    toy_batch,
    toy_forward,
    toy_pools,
)
from harness.errors import ContractError
from harness.graphs.draft_extend_runner import BaselineDraftExtendRunner, DraftExtendRunner
from harness.graphs.tape import Tape
from harness.upstream.allocator import PADDING_ROW, PADDING_SLOT
from harness.upstream.forward_batch_info import (
    EagleDraftExtendInput,
    ForwardBatch,
    ForwardMode,
    LogitsProcessorOutput,
)

V1, V2 = ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2
WIDTH = 5
FACTORS = torch.tensor([1.0, 2.3, 3.7, 0.9, 1.7])


def uneven(batch: ForwardBatch) -> LogitsProcessorOutput:
    """The toy forward with logits so small that each row has another top-k."""
    output = toy_forward(batch)
    logits = (output.next_token_logits * FACTORS).sin()
    return replace(output, next_token_logits=logits)


def extender(
    mode: ForwardMode, kind: type[DraftExtendRunner] = DraftExtendRunner, **changes: Any
) -> Any:
    settings: dict[str, Any] = {
        "forward": toy_forward,
        "attn_backend": ToyBackend(fill=2),
        "new_graph": Tape,
        "capture_bs": (4, 2),
        "mode": mode,
        "num_tokens_per_req": WIDTH,
        "hidden_size": HIDDEN,
        **toy_pools(),
    }
    runner = kind(**(settings | changes))
    runner.capture()
    return runner


def extend_batch(mode: ForwardMode, seq_lens: list[int], accepted: list[int]) -> ForwardBatch:
    batch = toy_batch(mode, seq_lens, accepted if mode is V1 else [WIDTH] * len(seq_lens))
    hidden = batch.spec_info.hidden_states
    spec = EagleDraftExtendInput(hidden.float(), torch.tensor(accepted, dtype=torch.int32))
    return batch.with_changes(spec_info=spec)


def check_topk(output: LogitsProcessorOutput, rows: list[int]) -> None:
    """The two likeliest tokens of these rows, which no neighbouring row would give."""
    values, index = output.next_token_logits[rows].softmax(-1).sort(descending=True)
    assert output.topk_p is not None
    assert output.topk_index is not None
    torch.testing.assert_close(output.topk_p, values[:, :2], rtol=0, atol=0)
    assert output.topk_index.tolist() == index[:, :2].tolist()
    every = output.next_token_logits.softmax(-1).amax(-1)
    assert len(every[rows].unique()) == len(rows)


def poison(runner: Any) -> None:
    for buffer in runner.buffers.values():
        buffer.fill_(99)


def check_padding(runner: Any, batch: ForwardBatch) -> None:
    padding = runner.padding(batch)
    assert padding.keys() == runner.buffers.keys()
    for name, part in padding.items():
        assert part.numel(), name
        assert (part == runner.pads[name]).all(), name


@pytest.mark.parametrize(
    ("mode", "lens"),
    [
        (V1, {"seq_lens": 2, "num_accept_tokens": 1, "extend_seq_lens": 1}),
        (V2, {"seq_lens": WIDTH, "num_accept_tokens": WIDTH}),
    ],
)
def test_a_padded_request_reads_and_writes_what_is_reserved(
    mode: ForwardMode, lens: dict[str, int]
) -> None:
    assert extender(mode).pads == {
        "req_pool_indices": PADDING_ROW,
        "out_cache_loc": PADDING_SLOT,
        "input_ids": 0,
        "positions": 0,
        "hidden_states": 0,
        **lens,
    }


@pytest.mark.parametrize("accepted", [[1, 3, 2], [2, 2, 2], [5, 1, 4]], ids=str)
def test_v1_packs_ragged_tokens_and_selects_each_requests_last_row(accepted: list[int]) -> None:
    runner = extender(V1)
    runner.replay(extend_batch(V1, [30, 31, 32, 33], [5, 5, 5, 5]))
    poison(runner)
    batch = extend_batch(V1, [9, 6, 8], accepted)
    output = runner.replay(batch)
    request = [r for r, count in enumerate(accepted) for _ in range(count)]
    assert output.next_token_logits[:, 0].tolist() == batch.input_ids.tolist()
    assert output.next_token_logits[:, 3].tolist() == [[9, 6, 8][r] for r in request]
    assert torch.equal(output.hidden_states, batch.spec_info.hidden_states + 1)
    assert runner.buffers["num_accept_tokens"].tolist() == [*accepted, 1]
    assert runner.buffers["extend_seq_lens"].tolist() == [*accepted, 1]
    assert runner.buffers["seq_lens"].tolist() == [9, 6, 8, 2]
    check_padding(runner, batch)


@pytest.mark.parametrize("accepted", [[1, 3, 2], [2, 2, 2], [5, 1, 4]], ids=str)
def test_v1_takes_softmax_and_topk_of_each_requests_last_row(accepted: list[int]) -> None:
    output = extender(V1, forward=uneven, topk=2).replay(extend_batch(V1, [9, 6, 8], accepted))
    check_topk(output, [sum(accepted[: r + 1]) - 1 for r in range(3)])


def test_v1_topk_outlives_the_next_replay() -> None:
    runner = extender(V1, forward=uneven)
    output = runner.replay(extend_batch(V1, [9, 6], [1, 3]))
    index, p = output.topk_index.clone(), output.topk_p.clone()
    other = runner.replay(extend_batch(V1, [90, 60], [3, 1]))
    assert not torch.equal(other.topk_p, p)
    assert torch.equal(output.topk_index, index)
    assert torch.equal(output.topk_p, p)
    assert not shares_memory(output, runner.captured_outputs[2])


@pytest.mark.parametrize(("mode", "taken"), [(V1, [1, 3, 2, 1]), (V2, [WIDTH] * 4)], ids=str)
def test_host_lengths_count_the_rows_of_padded_requests(
    mode: ForwardMode, taken: list[int]
) -> None:
    runner = extender(mode)
    batch = extend_batch(mode, [9, 6, 8], [1, 3, 2]).with_changes(
        extend_seq_lens_cpu=taken[:3], seq_lens_cpu=torch.tensor([9, 6, 8]), seq_lens_sum=23
    )
    runner.replay(batch)
    planned, on_device = runner.attn_backend.plans[-1], runner.buffers["seq_lens"]
    lens = planned.extend_seq_lens_cpu
    assert lens == taken, f"extend_seq_lens_cpu counts a padded request's rows, {taken}, not {lens}"
    lens, due = planned.seq_lens_cpu.tolist(), on_device.tolist()
    assert lens == due, f"seq_lens_cpu of a padded bucket is seq_lens, {due}, not {lens}"
    told = f"seq_lens_sum counts padded requests, too, {due}, and is not {planned.seq_lens_sum}"
    assert planned.seq_lens_sum == on_device.sum(), told


def test_v2_keeps_uniform_rows_and_computes_no_topk() -> None:
    runner = extender(V2)
    runner.replay(extend_batch(V2, [30, 31, 32, 33], [5, 5, 5, 5]))
    poison(runner)
    batch = extend_batch(V2, [19, 16, 18], [1, 3, 2])
    output = runner.replay(batch)
    assert output.topk_p is None
    assert output.topk_index is None
    assert output.next_token_logits[:, 0].tolist() == batch.input_ids.tolist()
    assert output.next_token_logits[:, 3].tolist() == [19] * 5 + [16] * 5 + [18] * 5
    assert torch.equal(output.hidden_states, batch.spec_info.hidden_states + 1)
    assert runner.buffers["num_accept_tokens"].tolist() == [1, 3, 2, WIDTH]
    seq_lens = runner.buffers["seq_lens"].tolist()
    assert seq_lens == [19, 16, 18, WIDTH], "a padded request has as many keys as it has query rows"
    assert "extend_seq_lens" not in runner.buffers
    check_padding(runner, batch)
    assert not [name for name in runner.graphs[4].operations if "topk" in name or "softmax" in name]


def test_the_baseline_v2_computes_the_same_and_a_topk_besides() -> None:
    slow = extender(V2, BaselineDraftExtendRunner, forward=uneven, topk=2)
    batch = extend_batch(V2, [19, 16, 18], [1, 3, 2])
    expected, obtained = extender(V2, forward=uneven).replay(batch), slow.replay(batch)
    assert torch.equal(obtained.next_token_logits, expected.next_token_logits)
    assert torch.equal(obtained.hidden_states, expected.hidden_states)
    check_topk(obtained, [0, 7, 11])
    operations = slow.graphs[4].operations
    assert operations["aten.topk.default"] == operations["aten._softmax.default"] == 1


@pytest.mark.parametrize(("mode", "padded"), [(V1, 1), (V2, WIDTH)], ids=["v1", "v2"])
def test_the_host_knows_padded_accept_lengths_where_the_batch_did(
    mode: ForwardMode, padded: int
) -> None:
    runner = extender(mode, capture_bs=(7, 4))
    batch = extend_batch(mode, [19, 16, 18], [1, 3, 2])
    batch.spec_info.num_accept_tokens_cpu = [1, 3, 2]
    runner.replay(batch)
    kept = "a replay pads a copy: the batch's own num_accept_tokens_cpu is as long as before"
    assert batch.spec_info.num_accept_tokens_cpu == [1, 3, 2], kept
    planned = runner.attn_backend.plans[-1].spec_info
    count = len(planned.num_accept_tokens_cpu)
    assert count == 4, f"num_accept_tokens_cpu counts the 4 requests of the bucket, not {count}"
    told = "a padded request has accepted on the host what it has accepted on the device"
    assert planned.num_accept_tokens_cpu == [1, 3, 2, padded], told
    width = planned.num_tokens_per_req
    assert width == WIDTH, f"num_tokens_per_req of a plan is the graph's, {WIDTH}, not {width}"
    told = "a plan reads num_accept_tokens of the graph's static buffer"
    address = runner.buffers["num_accept_tokens"].data_ptr()
    assert planned.num_accept_tokens.data_ptr() == address, told
    runner.replay(extend_batch(mode, [19, 16, 18], [1, 3, 2]))
    lens = runner.attn_backend.plans[-1].spec_info.num_accept_tokens_cpu
    assert lens is None, (
        f"a batch without num_accept_tokens_cpu is planned without, not with {lens}"
    )


@pytest.mark.parametrize(
    ("mode", "tokens"), [(V1, 1), (V1, 11), (V2, 9), (V2, 4)], ids=lambda value: str(value)
)
def test_a_token_count_that_no_capture_holds_is_refused(mode: ForwardMode, tokens: int) -> None:
    batch = extend_batch(mode, [9, 6], [5, 5]).with_changes(out_cache_loc=torch.arange(tokens))
    runner = extender(mode)
    rule = f"can_run is False of {tokens} {mode.name} query tokens of two requests"
    assert not runner.can_run(batch), rule
    with pytest.raises(ContractError, match=f"query tokens = {tokens}"):
        runner.replay(batch)


def test_another_extend_than_captured_is_refused() -> None:
    runner, batch = extender(V2), extend_batch(V2, [9, 6], [1, 3])
    accepted = batch.spec_info.num_accept_tokens
    hidden = batch.spec_info.hidden_states
    others = {
        "forward_mode": extend_batch(V1, [9, 6], [5, 5]),
        "spec_info = 'NoneType'": batch.with_changes(spec_info=None),
        "num_tokens_per_req = 4": batch.with_changes(
            spec_info=EagleDraftExtendInput(hidden, accepted, num_tokens_per_req=4)
        ),
        "hidden_states = None": batch.with_changes(spec_info=EagleDraftExtendInput(None, accepted)),
    }
    for message, other in others.items():
        rule = f"a batch of {message} does not fit a graph that was captured otherwise"
        assert not runner.can_run(other), rule
        with pytest.raises(ContractError, match=message):
            runner.replay(other)


def test_a_draft_model_without_hidden_states_is_captured_without_them() -> None:
    runner = extender(V2, hidden_size=None)
    batch = extend_batch(V2, [9, 6], [1, 3])
    with pytest.raises(ContractError, match=r"hidden_states = \(10, 2\)"):
        runner.replay(batch)
    bare = EagleDraftExtendInput(None, batch.spec_info.num_accept_tokens)
    output = runner.replay(batch.with_changes(spec_info=bare))
    assert output.hidden_states.tolist() == [[1.0, 1.0]] * 10
