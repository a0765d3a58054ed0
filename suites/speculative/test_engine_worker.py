"""A worker has no races, runs idle without requests and refuses parts that do not fit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from fixtures.toys.toy import expected_generation
from fixtures.toys.toy_backend import DenseBackend
from fixtures.toys.toy_engine import PROMPTS, eagle_phases, kv_pool, spec_config, toy_engine
from harness.engine.eagle_worker import EagleWorker
from harness.engine.hazards import Hazard
from harness.engine.plan_stream import RecordedStreams
from harness.errors import UsageError
from harness.upstream.allocator import ReqToTokenPool
from harness.upstream.forward_batch_info import EagleVerifyInput, ForwardMode
from harness.upstream.verify_mask import TreeMaskMode, VerifyMask

NEW = 12
BOTH = pytest.mark.parametrize("version", [1, 2], ids=["draft_extend_v1", "draft_extend_v2"])


class NoPlanWaits(RecordedStreams):
    """A plan queue that never waits for the main one."""

    def plan_waits(self) -> None:
        """Forgotten."""


class NoMainWaits(RecordedStreams):
    """A main queue that uses the plan's results without waiting for them."""

    def main_waits(self) -> None:
        """Run the deferred operations without a wait."""
        self._drain()


LAID_OUT, PLANNED, VERIFIED = "lay out verify", "plan verify", "verify"
FORGOTTEN: dict[type[RecordedStreams], set[Hazard]] = {
    NoPlanWaits: {
        Hazard("RAW", "reserve", PLANNED, "req_to_token"),
        Hazard("RAW", LAID_OUT, PLANNED, "verify batch"),
        Hazard("WAR", VERIFIED, PLANNED, "verify metadata"),
    },
    NoMainWaits: {
        Hazard("RAW", PLANNED, VERIFIED, "verify metadata"),
        Hazard("WAR", PLANNED, "reserve", "req_to_token"),
        Hazard("WAR", PLANNED, LAID_OUT, "verify batch"),
    },
}


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
@pytest.mark.parametrize("needs_cpu", [True, False], ids=["host_lengths", "no_host_lengths"])
def test_overlap_changes_no_answer_and_races_nowhere(late: bool, needs_cpu: bool) -> None:
    streams = RecordedStreams(late=late)
    toy = toy_engine(spec_config(4, 3), streams=streams, needs_cpu=needs_cpu, max_bs=2)
    for prompt, generation in zip(PROMPTS, toy.engine.generate(PROMPTS, NEW), strict=True):
        expected = expected_generation(prompt, NEW, 4, 3)
        assert generation.token_ids == expected.tokens
        assert generation.accept_lengths == expected.accept_lengths
    assert streams.hazards() == []
    assert streams.ran.index("plan verify") > streams.ran.index("lay out verify")
    assert (streams.ran.index("plan verify") > streams.ran.index("draft")) is late


@pytest.mark.parametrize("streams", [NoPlanWaits, NoMainWaits])
def test_a_forgotten_wait_is_reported(streams: type[RecordedStreams]) -> None:
    recorded = streams()
    toy_engine(spec_config(4, 3), streams=recorded).engine.generate(PROMPTS[:2], 6)
    found = set(recorded.hazards())
    unordered = Hazard("RAW", LAID_OUT, PLANNED, "verify batch") in found
    said = "a plan waits until the batch that it reads is laid out, where that is not forgotten"
    assert unordered is (streams is NoPlanWaits), said
    assert found == FORGOTTEN[streams]


@BOTH
def test_rounds_without_requests_run_idle_in_every_phase(version: int) -> None:
    toy = toy_engine(spec_config(3, 4, version))
    toy.trace.clear()
    state = toy.worker.prefill([], [], [])
    for _ in range(2):
        state, output = toy.worker.step(state)
        assert output.tokens() == []
        assert state.bs == 0
    phases = ["target_extend", "draft_prefill"] + ["draft", "target_verify", "draft_extend"] * 2
    assert [forward.phase for forward in toy.trace] == phases
    assert {forward.batch.forward_mode for forward in toy.trace} == {ForwardMode.IDLE}


def test_target_only_rounds_without_requests_run_idle() -> None:
    toy = toy_engine()
    toy.trace.clear()
    toy.engine.step()
    assert [(f.phase, f.batch.forward_mode) for f in toy.trace] == [("decode", ForwardMode.IDLE)]


@BOTH
def test_requests_join_after_idle_rounds(version: int) -> None:
    toy = toy_engine(spec_config(3, 4, version))
    toy.engine.step()
    (generation,) = toy.engine.generate(PROMPTS[:1], NEW)
    assert generation.token_ids == expected_generation(PROMPTS[0], NEW, 3, 4).tokens


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no_overlap"])
@pytest.mark.parametrize("mode", TreeMaskMode, ids=lambda mode: mode.name.lower())
def test_the_mask_is_filled_in_its_layout_and_the_backend_told_after_the_draft(
    mode: TreeMaskMode, overlap: bool
) -> None:
    toy = toy_engine(spec_config(3, 3), streams=RecordedStreams(late=False) if overlap else None)
    mask = torch.zeros(2 * 3 * 40, dtype=torch.bool)
    toy.target.mask = VerifyMask(mask, mode, max_bs=2)
    toy.trace.clear()
    prompts = PROMPTS[:2]
    requests = [toy.engine.submit(prompt, 20) for prompt in prompts]
    toy.engine.step()
    (verify,) = toy.trace.of("target_verify")
    histories = [len(p) if mode is TreeMaskMode.FULL_MASK else 0 for p in prompts]
    seen = [
        column <= history + row
        for history in histories
        for row in range(3)
        for column in range(history + 3)
    ]
    said = f"a verify fills the backend's mask in its layout, {mode.name}"
    assert mask.any(), f"{said}, and none of its elements is True"
    columns = "history and drafts" if mode is TreeMaskMode.FULL_MASK else "drafts alone"
    assert mask[: len(seen)].tolist() == seen, f"{said}: each row has columns of {columns}"
    assert not mask[len(seen) :].any(), f"{said}, and nothing behind the batch's {len(seen)} cells"
    spec = verify.spec_info
    assert isinstance(spec, EagleVerifyInput)
    assert spec.custom_mask is not None, "a verify has the mask that was filled for it"
    assert spec.custom_mask.tolist() == mask.tolist(), "custom_mask is the backend's own buffer"
    at = verify.positions.tolist()
    assert at == [7, 8, 9, 1, 2, 3], f"positions of a verify count on from seq_lens [7, 1]: {at}"
    due, told = [(verify.input_ids.tolist(), 2)], toy.target.updates
    said = "update_verify_buffers_to_fill_after_draft is called once, with the drafted batch of 2"
    assert told == due, f"{said}: {due}, not {told}"
    bonus = [request.tokens[len(prompt)] for request, prompt in zip(requests, prompts, strict=True)]
    chains = verify.input_ids.view(2, 3).tolist()
    said = f"a chain begins with its request's first generated token, {bonus}: {chains}"
    assert bonus == [chain[0] for chain in chains], said


def test_a_batch_that_the_mask_does_not_fit_is_verified_without() -> None:
    """Three requests exceed the largest bucket, and the mask is as large as that."""
    toy = toy_engine(spec_config(3, 3))
    mask = torch.zeros(3 * 3 * 40, dtype=torch.bool)
    toy.target.mask = VerifyMask(mask, TreeMaskMode.FULL_MASK, max_bs=2)
    for prompt in PROMPTS[:3]:
        toy.engine.submit(prompt, 20)
    toy.engine.step()
    (verify,) = toy.trace.of("target_verify")
    spec = verify.spec_info
    assert isinstance(spec, EagleVerifyInput)
    assert spec.custom_mask is None, "the mask holds two requests, and three are verified"
    assert not mask.any()
    said = "update_verify_buffers_to_fill_after_draft is called once a round, here without a bucket"
    assert [bucket for _, bucket in toy.target.updates] == [None], said


@pytest.mark.parametrize("width", [0, 1, 5])
def test_a_chain_longer_than_its_drafts_is_refused(width: int) -> None:
    with pytest.raises(UsageError, match=rf"num_draft_tokens = {width} .* 2 … num_steps \+ 1 = 4"):
        spec_config(3, width)


def test_parts_that_do_not_fit_are_refused() -> None:
    spec, pool = spec_config(3, 3), kv_pool(8, 4)
    phases = eagle_phases(spec, DenseBackend(), needs_cpu=False)
    make = partial(EagleWorker, req_to_token_pool=ReqToTokenPool(1, 16), target_pool=pool)
    with pytest.raises(UsageError, match=r"streams = 'RecordedStreams' .* None under spec v1"):
        make(phases, spec_config(3, 3, 1), draft_pool=pool, streams=RecordedStreams())
    with pytest.raises(UsageError, match=r"phases.draft = None .* num_steps > 1"):
        make(replace(phases, draft=None), spec, draft_pool=pool)
    with pytest.raises(UsageError, match=r"draft pool \(pages, page size\) = \(9, 4\) .* \(8, 4\)"):
        make(phases, spec, draft_pool=kv_pool(9, 4))
