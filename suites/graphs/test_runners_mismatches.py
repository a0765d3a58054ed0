"""A runner refuses a batch that it was not captured for, naming the field that differs."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from fixtures.toys.toy_graph import ToyBackend, toy_batch, toy_forward, toy_pools
from harness.errors import CapacityError, CaptureViolation, ContractError, UsageError
from harness.graphs.static_inputs import Extent, Field, Rows, StaticInputs
from harness.graphs.tape import Tape
from harness.graphs.target_verify_runner import TargetVerifyRunner
from harness.upstream.forward_batch_info import (
    EagleDraftInput,
    EagleVerifyInput,
    ForwardBatch,
    ForwardMode,
    LogitsProcessorOutput,
    SpecInput,
)

VERIFY = ForwardMode.TARGET_VERIFY
IDS = torch.arange(6)

SHAPE: dict[str, dict[str, Any]] = {
    "forward_mode": {"forward_mode": ForwardMode.EXTEND},
    "batch_size": {"batch_size": 0},
    "query tokens": {"out_cache_loc": torch.arange(4)},
    "spec_info": {"spec_info": None},
    "draft_token_num": {"spec_info": EagleVerifyInput(IDS, 2)},
}
CONTENT: dict[str, dict[str, Any]] = {
    "seq_lens.dtype": {"seq_lens": torch.tensor([5, 9], dtype=torch.int32)},
    "seq_lens.shape": {"seq_lens": torch.tensor([5, 9, 7])},
    "req_pool_indices.dtype": {"req_pool_indices": torch.tensor([5, 9], dtype=torch.int32)},
    "positions.shape": {"positions": torch.arange(5)},
    "input_ids.shape": {"input_ids": torch.arange(12).view(6, 2)},
    "out_cache_loc.dtype": {"out_cache_loc": torch.arange(6, dtype=torch.int32)},
}


def make(mask_size: int = 0, **changes: Any) -> TargetVerifyRunner:
    settings: dict[str, Any] = {
        "forward": toy_forward,
        "attn_backend": ToyBackend(mask_size=mask_size),
        "new_graph": Tape,
        "capture_bs": (2, 4),
        "mode": VERIFY,
        "num_tokens_per_req": 3,
        **toy_pools(),
    }
    runner = TargetVerifyRunner(**(settings | changes))
    runner.capture()
    return runner


def verify(*seq_lens: int) -> ForwardBatch:
    return toy_batch(VERIFY, seq_lens, [3] * len(seq_lens))


@pytest.mark.parametrize("field", SHAPE)
def test_another_shape_cannot_run(field: str) -> None:
    runner, batch = make(), verify(5, 9)
    assert runner.can_run(batch), "can_run is True of a batch that was captured for"
    other = batch.with_changes(**SHAPE[field])
    rule = "can_run is False of a batch that was not captured for"
    assert not runner.can_run(other), f"{rule}: {SHAPE[field]}"
    with pytest.raises(ContractError, match=rf"^{field} = "):
        runner.replay(other)


@pytest.mark.parametrize(
    "spec",
    [EagleVerifyInput(IDS[:2], 1), EagleDraftInput(IDS[:2, None], torch.ones(2, 1), None, 3)],
    ids=lambda spec: type(spec).__name__,
)
def test_a_plain_decode_has_no_eagle_input(spec: SpecInput) -> None:
    runner = make(mode=ForwardMode.DECODE, num_tokens_per_req=1)
    batch = toy_batch(ForwardMode.DECODE, [5, 9], [1, 1])
    assert runner.can_run(batch), "can_run is True of a decode without spec_info"
    other, name = batch.with_changes(spec_info=spec), type(spec).__name__
    rule = f"a graph of plain decoding reads no spec_info: it must be refused a batch with {name}"
    assert not runner.can_run(other), rule
    with pytest.raises(ContractError, match=f"spec_info = '{name}' .* NoneType"):
        runner.replay(other)


@pytest.mark.parametrize("field", CONTENT)
def test_another_dtype_or_length_of_one_tensor_is_named(field: str) -> None:
    batch = verify(5, 9).with_changes(**CONTENT[field])
    with pytest.raises(ContractError, match=rf"^{field} = "):
        make().replay(batch)


def test_a_missing_tensor_is_named() -> None:
    batch = toy_batch(VERIFY, [5, 9], [3, 3], positions=None)
    with pytest.raises(ContractError, match=r"^positions = None"):
        make().replay(batch)


def masked(mask: torch.Tensor | None) -> EagleVerifyInput:
    return EagleVerifyInput(IDS, 3, mask)


def seen(runner: TargetVerifyRunner, mask: torch.Tensor | None) -> list[float]:
    batch = toy_batch(VERIFY, [5, 9], [3, 3], spec_info=masked(mask))
    logits = runner.replay(batch).next_token_logits
    ids = batch.input_ids.tolist()
    assert logits[:, 0].tolist() == ids, "a replay computes the draft tokens of its own batch"
    return logits[:, 5].tolist()


def test_a_custom_mask_begins_with_true_whatever_its_memory_held() -> None:
    mask = torch.zeros(15, dtype=torch.bool)
    field = Field(
        name="custom_mask", read=lambda _: None, pad=True, dtype=mask.dtype, rows=Rows.ANY
    )
    StaticInputs((), Extent(2, 6, 2, 6), mask.device).adopt(field, mask)
    assert mask.all(), "a backend's mask buffer is filled with True when a runner takes it over"


def test_a_mask_is_copied_into_the_backends_buffer_and_padded_with_true() -> None:
    runner = make(mask_size=15)
    mask = runner.attn_backend.verify_mask
    assert mask is not None
    buffer = mask.buffer
    assert runner.buffers["custom_mask"] is buffer
    assert buffer.all()
    buffer.zero_()
    assert seen(runner, torch.tensor([True, False, False, True, False, True])) == [1, 0, 0, 1, 0, 1]
    assert buffer.tolist() == [True, False, False, True, False, True] + [True] * 9


def test_a_plain_decode_leaves_the_verify_mask_of_its_backend_alone() -> None:
    runner = make(mask_size=15, mode=ForwardMode.DECODE, num_tokens_per_req=1)
    mask = runner.attn_backend.verify_mask
    assert mask is not None
    rule = "a decode adopts no verify mask: its capture would write over what verify graphs read"
    assert "custom_mask" not in runner.buffers, rule
    assert not mask.buffer.any(), rule


def test_a_mask_written_in_place_is_left_as_it_is() -> None:
    runner = make(mask_size=15)
    buffer = runner.buffers["custom_mask"]
    buffer.copy_(torch.tensor([0, 1, 1, 0, 1] + [0] * 10))
    assert seen(runner, None) == [0, 1, 1, 0, 1, 0]
    assert not buffer[6:].any()
    assert "custom_mask" not in runner.padding(verify(5, 9))
    assert seen(runner, buffer[:6]) == [0, 1, 1, 0, 1, 0]
    assert buffer[6:].all()


def test_a_mask_longer_than_its_buffer_does_not_fit() -> None:
    longest = torch.ones(15, dtype=torch.bool)
    longest[2] = False
    told = "a custom_mask as long as the backend's buffer fits, to its last element"
    try:
        found = seen(make(mask_size=15), longest)
    except CapacityError as error:
        pytest.fail(f"{told}: {error}")
    assert found == [1, 1, 0, 1, 1, 1], f"{told}, and is read as it is: {found}"
    with pytest.raises((CapacityError, RuntimeError)) as refused:
        seen(make(mask_size=15), torch.ones(16, dtype=torch.bool))
    told = "a custom_mask longer than its buffer is refused as CapacityError, before it is copied"
    assert isinstance(refused.value, CapacityError), f"{told}, not {refused.value}"
    assert refused.match(r"len\(custom_mask\) = 16 .* at most 15")


def is_refused(runner: TargetVerifyRunner, batch: ForwardBatch) -> bool:
    try:
        runner.run(batch)
    except ContractError:
        return True
    return False


def test_run_wants_its_own_prepare() -> None:
    runner = make()
    batch = verify(5, 9, 7)
    late = [field.name for field in runner.fields() if field.filled_after_draft]
    assert late == ["input_ids"], "run copies the draft tokens; prepare comes before they are known"
    with pytest.raises(ContractError, match="run follows prepare"):
        runner.run(batch)
    runner.prepare(verify(1, 2))
    with pytest.raises(ContractError, match="run follows prepare"):
        runner.run(batch)
    runner.prepare(verify(6, 9, 7))
    with pytest.raises(ContractError, match=r"other \['req_pool_indices', 'seq_lens', "):
        runner.run(batch)
    runner.prepare(batch)
    # Token ids and mask come with the draft, everything else as it was prepared.
    drafted = batch.with_changes(input_ids=batch.input_ids.clone())
    runner.run(drafted)
    runner.prepare(batch)
    with pytest.raises(ContractError, match=r"prepared with other \['seq_lens'\]"):
        runner.run(drafted.with_changes(seq_lens=batch.seq_lens.clone()))
    runner.prepare(batch)
    told = "a batch that lacks what was prepared is another one"
    assert is_refused(runner, drafted.with_changes(positions=None)), told
    runner.replay(batch)
    with pytest.raises(ContractError, match="run follows prepare"):
        runner.run(batch)


def test_a_prepare_that_fails_leaves_nothing_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, batch = make(), verify(5, 9, 7)
    rule = "run without a prepare is refused: it would replay on another batch's metadata"
    assert is_refused(runner, batch), rule
    runner.prepare(batch)
    with monkeypatch.context() as broken:
        fails = Mock(side_effect=ContractError("no plan"))
        broken.setattr(runner.attn_backend, "init_forward_metadata_out_graph", fails)
        unplanned = verify(1, 2)
        with pytest.raises(ContractError, match="no plan"):
            runner.prepare(unplanned)
    with pytest.raises(ContractError, match="run follows prepare"):
        runner.run(batch)
    rule = "a batch whose plan failed is not prepared: run would replay on another's metadata"
    assert is_refused(runner, unplanned), rule


def test_what_cannot_be_recorded_is_refused_at_capture() -> None:
    def reads(batch: ForwardBatch) -> LogitsProcessorOutput:
        assert batch.seq_lens.max() < 100
        return toy_forward(batch)

    with pytest.raises(CaptureViolation, match=r"test_runners_mismatches\.py"):
        make(forward=reads)


def test_a_forward_that_bumps_its_input_is_named_at_capture() -> None:
    def bumps(batch: ForwardBatch) -> LogitsProcessorOutput:
        batch.seq_lens.add_(1)
        return toy_forward(batch)

    with pytest.raises(ContractError, match=r"changed its static inputs \['seq_lens'\]"):
        make(forward=bumps)


def test_a_forward_that_bumps_a_part_of_its_input_leaves_no_graph_to_replay() -> None:
    runner = make()
    kept = runner.graphs[2]

    def bumps(batch: ForwardBatch) -> LogitsProcessorOutput:
        batch.seq_lens.add_(1)
        return toy_forward(batch)

    runner.forward = bumps
    # Two of the four rows of the largest bucket.
    with pytest.raises(ContractError, match=r"changed its static inputs \['seq_lens'\]"):
        runner.record(2)
    told = "a graph that counts up its own input at every replay is not kept"
    assert runner.graphs[2] is kept, told


@pytest.mark.parametrize(
    "changes",
    [
        {"capture_bs": ()},
        {"capture_bs": (0, 2)},
        {"capture_bs": (2, 1, 2)},
        {"num_tokens_per_req": 0},
        {"mode": ForwardMode.EXTEND},
    ],
    ids=lambda changes: " ".join(map(str, changes)),
)
def test_impossible_settings_are_named(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(changes))):
        make(**changes)


def test_a_runner_captures_once_and_before_it_replays() -> None:
    runner = make()
    with pytest.raises(ContractError, match="captures once"):
        pytest.fail(f"a runner captures once: a second time is refused, not {runner.capture()}")
    runner.graphs.clear()
    with pytest.raises(ContractError, match="after its capture"):
        pytest.fail(f"a replay before any capture is refused, not {runner.replay(verify(3))}")


def test_a_batch_larger_than_every_bucket_names_both() -> None:
    runner = make()
    batch = verify(1, 2, 3, 4, 5)
    assert not runner.can_run(batch)
    with pytest.raises(CapacityError, match=r"batch_size = 5 .*\(2, 4\)"):
        runner.replay(batch)
