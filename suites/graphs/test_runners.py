"""A runner answers any batch that fits as its forward would, whatever ran before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fixtures.toys.toy_graph import ToyBackend, shares_memory, toy_batch, toy_forward, toy_pools
from fixtures.toys.toy_scenes import MLAScene
from harness.attention.baselines import HostLengthsMLABackend
from harness.attention.paged_backend import PagedBackend
from harness.attention.trtllm_mla import TRTLLMMLABackend
from harness.errors import CapacityError, ContractError
from harness.graphs.effects import observe
from harness.graphs.tape import Tape
from harness.graphs.target_verify_runner import TargetVerifyRunner, custom_mask
from harness.upstream.forward_batch_info import (
    EagleVerifyInput,
    ForwardBatch,
    ForwardMode,
    LogitsProcessorOutput,
)

VERIFY = ForwardMode.TARGET_VERIFY
WIDTH = 3


def make(**changes: Any) -> TargetVerifyRunner:
    settings: dict[str, Any] = {
        "forward": toy_forward,
        "attn_backend": ToyBackend(fill=2),
        "new_graph": Tape,
        "capture_bs": (4, 1, 2),
        "mode": VERIFY,
        "num_tokens_per_req": WIDTH,
        **toy_pools(),
    }
    runner = TargetVerifyRunner(**(settings | changes))
    runner.capture()
    return runner


def verify(*seq_lens: int, **changes: Any) -> ForwardBatch:
    return toy_batch(VERIFY, seq_lens, [WIDTH] * len(seq_lens), **changes)


def spelled(batch: ForwardBatch, width: int = WIDTH) -> list[list[float]]:
    """The logits the toy forward owes a batch."""
    rows = []
    for t, (token, position, slot) in enumerate(
        zip(batch.input_ids, batch.positions, batch.out_cache_loc, strict=True)
    ):
        lens, row = batch.seq_lens[t // width], batch.req_pool_indices[t // width]
        rows.append([float(x) for x in (token, position, slot, lens, row)])
    return rows


def poison(runner: TargetVerifyRunner) -> None:
    for buffer in runner.buffers.values():
        buffer.fill_(99)


def test_capture_follows_the_contract_and_takes_the_largest_bucket_first() -> None:
    runner = make()
    one = ["warm"]
    expected = ["state 4 12"]
    for bucket in (4, 2, 1):
        expected += [f"capture {bucket}", f"in graph {bucket}", *one, f"in graph {bucket}"]
    log = runner.attn_backend.log
    rule = "on_after_cuda_graph_warmup is called once per graph, after its warm-up"
    assert log.count("warm") == 3, rule
    rule = "a graph's warm-up and its capture each run init_forward_metadata_in_graph"
    assert [log.count(f"in graph {bucket}") for bucket in (4, 2, 1)] == [2, 2, 2], rule
    assert log == expected
    assert sorted(runner.graphs) == sorted(runner.captured_outputs) == [1, 2, 4]


def test_what_comes_after_the_metadata_comes_before_the_forward() -> None:
    """A scheduler that writes too early is caught by what the forward reads after it."""
    backend = ToyBackend()

    def logged(batch: ForwardBatch) -> LogitsProcessorOutput:
        backend.log.append("forward")
        return toy_forward(batch)

    make(
        attn_backend=backend,
        capture_bs=(2,),
        forward=logged,
        after_metadata=lambda: backend.log.append("after metadata"),
    )
    once = ["in graph 2", "after metadata", "forward"]
    rule = "after_metadata is recorded behind the metadata of a graph and ahead of its forward"
    found = [entry for entry in backend.log if entry in once]
    assert found == once * 2, f"{rule}, in warm-up and capture: {found}"


def test_a_decode_has_one_token_per_request_unless_told_otherwise() -> None:
    runner = TargetVerifyRunner(
        forward=toy_forward,
        attn_backend=ToyBackend(fill=1),
        new_graph=Tape,
        capture_bs=(2,),
        mode=ForwardMode.DECODE,
        **toy_pools(),
    )
    assert [*runner.token_counts(2)] == [2]


def test_growing_and_shrinking_batches_answer_exactly() -> None:
    runner = make()
    for seq_lens in [(5, 9, 7, 3), (6,), (2, 8, 4), (11, 1)]:
        batch = verify(*seq_lens)
        poison(runner)
        assert runner.replay(batch).next_token_logits.tolist() == spelled(batch)


def test_every_padded_element_holds_its_declared_pad_after_a_larger_batch() -> None:
    runner = make()
    runner.replay(verify(5, 9, 7, 3))
    batch = verify(6, 2, 4)
    poison(runner)
    runner.replay(batch)
    buffers = runner.buffers
    assert runner.pads == {
        "req_pool_indices": 0,
        "seq_lens": 2,
        "positions": 0,
        "out_cache_loc": 0,
        "input_ids": 0,
    }
    assert buffers["seq_lens"].tolist() == [6, 2, 4, 2]
    assert buffers["req_pool_indices"].tolist() == [3, 2, 1, 0]
    for name in ("positions", "out_cache_loc", "input_ids"):
        assert buffers[name].tolist() == [*getattr(batch, name).tolist(), 0, 0, 0]
    padding = runner.padding(batch)
    assert {name: part.numel() for name, part in padding.items()} == {
        "req_pool_indices": 1,
        "seq_lens": 1,
        "positions": 3,
        "out_cache_loc": 3,
        "input_ids": 3,
    }
    assert all((part == runner.pads[name]).all() for name, part in padding.items())


def test_padding_after_the_bucket_is_reset_too() -> None:
    runner = make()
    poison(runner)
    runner.replay(verify(6))
    assert runner.buffers["seq_lens"].tolist() == [6, 2, 2, 2]


@pytest.mark.parametrize(("bs", "bucket"), [(1, 1), (2, 2), (3, 4), (4, 4)])
def test_the_smallest_bucket_that_holds_the_batch_is_chosen(bs: int, bucket: int) -> None:
    runner = make()
    batch = verify(*range(3, 3 + bs))
    assert runner.bucket(bs) == bucket
    assert runner.can_run(batch), "it would run eagerly, unnoticed"
    runner.replay(batch)
    assert runner.attn_backend.plans[-1].batch_size == bucket
    runs = dict(runner.replays)
    assert runs == {bucket: 1}, f"replays counts by bucket: {{{bucket}: 1}}, not {runs}"


def test_outputs_are_copies_that_outlive_the_next_replay() -> None:
    runner = make()
    first, second = verify(5, 9), verify(6, 2)
    output = runner.replay(first)
    runner.replay(second)
    assert output.next_token_logits.tolist() == spelled(first)
    assert not shares_memory(output, runner.captured_outputs[2])


def test_addresses_never_change() -> None:
    runner = make()
    addresses = {name: buffer.data_ptr() for name, buffer in runner.buffers.items()}
    runner.replay(verify(5, 9, 7))
    assert {name: buffer.data_ptr() for name, buffer in runner.buffers.items()} == addresses


def test_a_replay_reads_nothing_on_the_host() -> None:
    runner, batch = make(), verify(5, 9, 7)
    with observe() as effects:
        runner.replay(batch)
    assert effects.host_syncs == []


def test_prepare_runs_before_the_draft_tokens_are_known() -> None:
    runner = make()
    batch = verify(5, 9, 7)
    unknown = torch.zeros(1, dtype=torch.int32)
    try:
        runner.prepare(batch.with_changes(input_ids=unknown))
    except ContractError as error:
        pytest.fail(f"prepare reads no input_ids, which the draft fills after it: {error}")
    planned = runner.attn_backend.log[-1]
    rule = "a batch is planned with the requests of its padded bucket"
    assert planned == "plan 4", f"{rule}, 4, not as {planned}"
    logits = runner.run(batch).next_token_logits.tolist()
    rule = "run copies the batch's own input_ids, as they are after the draft"
    wanted = spelled(batch)
    assert logits == wanted, f"{rule}: the first row is {wanted[0]}, not {logits[0]}"
    done = runner.attn_backend.log[-1]
    assert done == "plan 4", f"run plans nothing after prepare, not {done}"


def test_seq_lens_cpu_is_padded_where_it_is_carried_and_not_missed_where_not() -> None:
    runner = make(capture_bs=(2, 4, 7))  # three fill neither their bucket nor the largest
    runner.replay(verify(5, 9, 7))
    kept = runner.attn_backend.plans[-1].seq_lens_cpu
    assert kept is None, f"a batch without seq_lens_cpu is planned without, not with {kept}"
    lens = torch.tensor([5, 9, 7])
    batch = verify(5, 9, 7, seq_lens_cpu=lens, seq_lens_sum=21, extend_seq_lens_cpu=[3, 3, 3])
    runner.replay(batch)
    planned = runner.attn_backend.plans[-1]
    assert planned.seq_lens_cpu is not None, "a batch with seq_lens_cpu is planned with it"
    told = "a replay's host lengths are as many as its bucket has requests"
    assert planned.seq_lens_cpu.tolist() == [5, 9, 7, 2], told
    told = f"seq_lens_sum counts padded requests, too: 23, not {planned.seq_lens_sum}"
    assert planned.seq_lens_sum == int(runner.buffers["seq_lens"][:4].sum()) == 23, told
    rows = planned.extend_seq_lens_cpu
    assert rows == [3, 3, 3, 3], f"extend_seq_lens_cpu counts a padded request's rows: {rows}"
    told = "a replay pads copies: the batch's own host lengths are as before"
    assert (batch.seq_lens_sum, batch.extend_seq_lens_cpu) == (21, [3, 3, 3]), told
    runner.replay(verify(5, 9, 7))
    kept = runner.attn_backend.plans[-1].seq_lens_cpu
    told = f"a batch without seq_lens_cpu is planned without, not with {kept} of the batch before"
    assert kept is None, told


def test_a_backend_that_reads_host_lengths_has_them_at_capture() -> None:
    backend = ToyBackend(fill=2)
    backend.needs_cpu_seq_lens = True
    make(attn_backend=backend)
    first = backend.plans[0]
    assert first.seq_lens_cpu is not None
    assert (first.seq_lens_cpu.tolist(), first.seq_lens_sum) == ([2, 2, 2, 2], 8)


def test_a_batch_without_host_lengths_has_not_those_of_the_capture() -> None:
    backend = ToyBackend(fill=2)
    backend.needs_cpu_seq_lens = True
    make(attn_backend=backend).replay(verify(5, 9, 7))
    planned = backend.plans[-1]
    found = planned.seq_lens_cpu, planned.seq_lens_sum
    assert found == (None, None), f"host lengths of a batch that carries none are none: {found}"


def test_plain_decode_is_the_same_runner_one_token_wide() -> None:
    runner = make(mode=ForwardMode.DECODE, num_tokens_per_req=1)
    batch = toy_batch(ForwardMode.DECODE, [4, 8, 6], [1, 1, 1])
    assert runner.replay(batch).next_token_logits.tolist() == spelled(batch, 1)
    assert runner.attn_backend.log[0] == "state 4 4"


def test_a_verify_outlives_the_growth_of_its_backends_mask() -> None:
    """A larger runner of the same backend takes a longer mask; graphs read the one before it."""
    scene = MLAScene()
    backend = scene.backend

    def tell_the_mask(batch: ForwardBatch) -> LogitsProcessorOutput:
        mask = custom_mask(batch)
        assert mask is not None
        told = mask[: batch.input_ids.shape[0], None].float()
        return LogitsProcessorOutput(told, told)

    pools = {"req_to_token_pool": scene.table, "token_to_kv_pool": scene.pool}
    runner = make(forward=tell_the_mask, attn_backend=backend, capture_bs=(2,), **pools)
    backend.init_cuda_graph_state(16, 16)
    grown = backend.verify_mask.buffer
    assert len(grown) > len(runner.buffers["custom_mask"])
    grown.copy_(torch.arange(len(grown)) % 3 == 1)
    batch = scene.batch(VERIFY, (WIDTH, WIDTH))
    drafted = EagleVerifyInput(batch.input_ids, WIDTH, grown)
    rule = "a verify captured before its backend's mask grew reads what the tree builder wrote"
    try:
        read = runner.replay(batch.with_changes(spec_info=drafted)).next_token_logits.flatten()
    except CapacityError as error:
        pytest.fail(f"{rule}: {error}")
    assert read.tolist() == [0, 1, 0, 0, 1, 0], rule


@pytest.mark.parametrize("kind", [TRTLLMMLABackend, HostLengthsMLABackend])
def test_a_graph_follows_its_batch_after_a_larger_runner_of_its_backend(
    kind: type[PagedBackend],
) -> None:
    """Both runners capture two requests, in metadata of their own."""
    scene = MLAScene(kind)

    def tell_the_lengths(batch: ForwardBatch) -> LogitsProcessorOutput:
        told = scene.backend.planned(batch).cache_seqlens_int32[:, None].float()
        return LogitsProcessorOutput(told, told)

    arguments = {"forward": tell_the_lengths, "attn_backend": scene.backend}
    arguments |= {"req_to_token_pool": scene.table, "token_to_kv_pool": scene.pool}
    runners = [make(capture_bs=sizes, **arguments) for sizes in ((2,), (4, 2))]
    rule = "a graph reads the lengths of its own batch, whoever captured its bucket after it"
    for totals in ((13, 8), (9, 20)):
        batch = scene.batch(VERIFY, (WIDTH, WIDTH), totals)
        drafted = batch.with_changes(spec_info=EagleVerifyInput(batch.input_ids, WIDTH))
        read = [runner.replay(drafted).next_token_logits.flatten().tolist() for runner in runners]
        assert read == [[*totals], [*totals]], f"{rule}: {totals}, not {read}"
