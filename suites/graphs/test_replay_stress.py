"""However many replays of a capture, on whatever lengths and layouts, are eager forwards."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import pytest
import torch

from fixtures.drivers.replays import CAPTURED, Replays, differences
from fixtures.tables.past_examples import PastExample
from harness.core.case import Mode
from harness.differential.forward import tensors
from harness.subjects import GRAPH_MODES

pytestmark = pytest.mark.untraced
MODES = sorted(GRAPH_MODES)
SUBJECTS = (
    "trtllm_mha/xqa",
    "trtllm_mla/flash_mla",
    "trtllm_mha/reference",
    "trtllm_mla/reference",
)
REPLAYS = {"cpu": 12, "cuda": 500}
LOOKED_AT = {"cpu": 3, "cuda": 25}
"""Every how many-th replay is run eagerly too."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("subject", SUBJECTS)
@torch.no_grad()
def test_replays_are_eager_forwards(
    subject: str,
    mode: Mode,
    device: torch.device,
    seeds: Iterator[int],
    past: list[PastExample],
) -> None:
    for seed in chain((known.example for known in past), seeds):
        replays = Replays(subject, mode, device, seed=seed)
        before, held, buckets = replays.addresses(), [], set()
        for index in range(REPLAYS[device.type]):
            batch = replays.draw()
            output = replays.runner.replay(batch)
            buckets.add(replays.runner.bucket(batch.batch_size))
            if index % LOOKED_AT[device.type] == 0:
                assert replays.padding(batch) == []
                held.append((output, {k: v.clone() for k, v in tensors(output).items()}))
                assert replays.compare(index, batch, output) == []
        assert buckets == set(CAPTURED)
        assert replays.addresses() == before
        for output, copies in held:
            changed = [k for k, x in tensors(output).items() if not torch.equal(x, copies[k])]
            assert not changed, "outputs are copies, which no later replay changes"


@torch.no_grad()
def test_a_replay_of_another_batch_is_told_apart(device: torch.device) -> None:
    replays = Replays("trtllm_mha/xqa", Mode.TARGET_VERIFY, device)
    batch = replays.draw()
    output = replays.runner.replay(batch)
    shorter = batch.with_changes(seq_lens=batch.seq_lens.sub(1).clamp_min(1))
    assert replays.compare(0, shorter, output)
    assert not differences(output, output, replays.pool_state.case)
