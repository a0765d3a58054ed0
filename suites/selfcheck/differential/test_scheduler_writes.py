"""Where a backend says that its reads of the request table end, the next batch's rows follow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from harness.differential.scheduler_writes import SchedulerWrites
from harness.upstream.base_attn_backend import SharedReadEnds

LATE = "a read of req_to_token that comes too late sees other slots than one in time"


class Reader:
    """A runner that reads the request table for its plan, in its metadata, and after that."""

    def __init__(self, ends: SharedReadEnds) -> None:
        self.table = torch.arange(1, 13, dtype=torch.int32).view(3, 4)
        pools = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=self.table), token_to_kv_pool=None
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
