"""Shared reads end where a backend says: what the scheduler writes from then on changes nothing.

The scheduler owns the request-to-token table and the SWA mapping. One stage earlier its write does
change the answer, so nobody waits for longer than is needed either.
"""

from __future__ import annotations

import pytest
import torch

from fixtures.drivers.rigs import ragged_rig
from fixtures.tables.budgets import BUCKET
from harness.core.case import Mode
from harness.differential.forward_batches import FORWARD_MODES
from harness.differential.rig import Rig
from harness.upstream.base_attn_backend import SharedReadEnds
from harness.upstream.memory_pool import SWAKVPool

PRE, IN = SharedReadEnds.PRE_REPLAY, SharedReadEnds.IN_REPLAY
MHA, XQA, MLA = "trtllm_mha/trtllm_gen", "trtllm_mha/xqa", "trtllm_mla/trtllm_gen"
HOST = "trtllm_mla-host_lengths/trtllm_gen"
TABLE, MAPPING = "req_to_token", "full_to_swa_index_mapping"
MODES = (Mode.DECODE, Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND, Mode.DRAFT_EXTEND_V2)
SUBJECTS = (
    (MHA, IN, TABLE),
    (MHA, IN, MAPPING),
    (XQA, IN, TABLE),
    (MLA, IN, TABLE),
    (HOST, PRE, TABLE),
)
GRAPHS = [
    pytest.param(subject, mode, end, name, id=f"{subject}-{mode}-{name}")
    for subject, end, name in SUBJECTS
    for mode in MODES
]


def rig_of(subject: str, mode: Mode, name: str) -> Rig:
    """Ragged requests, in a windowed case where the mapping is written."""
    return ragged_rig(subject, mode, window_left=24 if name == MAPPING else -1)


def shared(rig: Rig, name: str) -> torch.Tensor:
    """What the scheduler writes."""
    if name == TABLE:
        return rig.pool_state.req_to_token_pool.req_to_token
    pool = rig.pool_state.token_to_kv_pool
    assert isinstance(pool, SWAKVPool)
    return pool.full_to_swa_index_mapping


def replayed(rig: Rig, name: str, stage: str = "") -> torch.Tensor:
    """Logits of a replay; after a stage, the scheduler writes something else."""
    memory = shared(rig, name)
    later = memory.clone()

    def rewrite() -> None:
        memory.copy_(later)

    runner = rig.capture((BUCKET,), after_metadata=rewrite if stage == "metadata" else None)
    later.zero_()
    if stage == "start":
        rewrite()
    runner.prepare(rig.batch)
    if stage == "prepare":
        rewrite()
    logits: torch.Tensor = runner.run(rig.batch).next_token_logits
    assert bool(memory.any()) is (stage == "")
    return logits


@pytest.mark.parametrize(("subject", "mode", "end", "name"), GRAPHS)
def test_a_replay_has_read_all_where_its_backend_says(
    subject: str, mode: Mode, end: SharedReadEnds, name: str
) -> None:
    rig = rig_of(subject, mode, name)
    assert rig.planners[0].shared_read_ends(FORWARD_MODES[mode]) is end
    before, at = ("start", "prepare") if end is PRE else ("prepare", "metadata")
    due = replayed(rig, name)
    assert torch.equal(replayed(rig_of(subject, mode, name), name, at), due)
    assert not torch.equal(replayed(rig_of(subject, mode, name), name, before), due)


@pytest.mark.parametrize(("subject", "name"), [(row[0], row[2]) for row in SUBJECTS])
def test_a_planned_prefill_has_read_all(subject: str, name: str) -> None:
    outputs = []
    for stage in ("", "start", "planned"):
        rig = rig_of(subject, Mode.EXTEND, name)
        if stage == "start":
            shared(rig, name).zero_()
        rig.backend.init_forward_metadata(rig.batch)
        ends = rig.planners[0].resolve_prefill_shared_read_ends(
            rig.batch, num_qo_tokens=len(rig.batch.input_ids)
        )
        assert ends is PRE
        if stage == "planned":
            shared(rig, name).zero_()
        outputs.append(rig.forward(rig.batch).next_token_logits)
    due, early, late = outputs
    assert torch.equal(late, due)
    assert not torch.equal(early, due)
