"""Where a backend says that its reads of the request table end, the next batch's rows follow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.differential.scheduler_writes import SchedulerWrites
from harness.upstream.base_attn_backend import SharedReadEnds
from harness.upstream.memory_pool import MHATokenToKVPool, SWAKVPool

LATE = "a read of req_to_token that comes too late sees other slots than one in time"
LATE_MAPPING = "a read of the SWA mapping that comes too late sees other slots than one in time"


class Reader:
    """A runner that reads the request table for its plan, in its metadata, and after that.

    Args:
        ends: when its reads end.
        pool: of a hybrid model, whose SWA mapping is read instead.
    """

    def __init__(self, ends: SharedReadEnds, pool: SWAKVPool | None = None) -> None:
        req_to_token = torch.arange(1, 13, dtype=torch.int32).view(3, 4)
        self.table = req_to_token if pool is None else pool.full_to_swa_index_mapping
        pools = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=req_to_token), token_to_kv_pool=pool
        )
        rig: Any = SimpleNamespace(pool_state=pools)
        self.writes = SchedulerWrites(rig, ends)
        self.planned = self.metadata = self.late = self.table

    def prepare(self, _: Any) -> None:
        self.planned = self.table.clone()

    def run(self, _: Any) -> None:
        self.metadata = self.table.clone()
        self.writes.after_metadata()
        self.late = self.table.clone()

    def replay(self) -> None:
        runner: Any = self
        batch: Any = None
        self.writes.replay(runner, batch)


def test_a_graph_that_reads_req_to_token_after_its_metadata_reads_the_next_batch() -> None:
    reader = Reader(SharedReadEnds.IN_REPLAY)
    own = reader.table.clone()
    reader.replay()
    assert torch.equal(reader.planned, own)
    assert torch.equal(reader.metadata, own)
    assert not torch.equal(reader.late, own), LATE


def test_a_forward_that_reads_req_to_token_after_its_plan_reads_the_next_batch() -> None:
    reader = Reader(SharedReadEnds.PRE_REPLAY)
    own = reader.table.clone()
    reader.replay()
    assert torch.equal(reader.planned, own)
    assert not torch.equal(reader.metadata, own), LATE


@pytest.mark.parametrize("ends", [SharedReadEnds.IN_REPLAY, SharedReadEnds.PRE_REPLAY])
def test_the_mapping_of_a_hybrid_pool_is_the_next_batch_s_as_soon_as_the_table_is(
    ends: SharedReadEnds,
) -> None:
    full, window = (
        MHATokenToKVPool(
            num_pages=pages, page_size=4, num_layers=1, num_kv_heads=1, head_dim=2,
            dtype=torch.float32, device=torch.device("cpu"),
        )
        for pages in (3, 2)
    )  # fmt: skip
    pool = SWAKVPool(full_pool=full, swa_pool=window, swa_layer_ids=frozenset({1}), num_layers=2)
    pool.full_to_swa_index_mapping.copy_(torch.arange(12).flip(0))
    reader = Reader(ends, pool)
    own = reader.table.clone()
    reader.replay()
    assert torch.equal(reader.planned, own)
    assert not torch.equal(reader.late, own), LATE_MAPPING
