"""What a scheduler writes for the next batch, as soon as a forward has read it for its own."""

from __future__ import annotations

from typing import Any

from harness.differential.forward_batches import FORWARD_MODES
from harness.differential.invariants import check_table
from harness.differential.rig import ForwardOutput, Rig
from harness.graphs.runner import GraphRunner
from harness.upstream.base_attn_backend import SharedReadEnds
from harness.upstream.forward_batch_info import ForwardBatch
from harness.upstream.memory_pool import SWAKVPool


class SchedulerWrites:
    """Rewrites the request-to-token table and the SWA mapping where a backend says reads end.

    Every entry becomes the padding slot's, so a later read shows in the answer. A forward whose
    backend does not say is left alone.

    Args:
        rig: whose forwards they are.
        ends: when reads end, by default as the rig's backend says of the case's mode.
    """

    def __init__(self, rig: Rig, ends: SharedReadEnds | None = None) -> None:
        if ends is None and rig.planners:
            ends = rig.planners[0].shared_read_ends(FORWARD_MODES[rig.case.mode])
        self.ends = ends or SharedReadEnds.UNKNOWN
        pool = rig.pool_state.token_to_kv_pool
        self._memory = [rig.pool_state.req_to_token_pool.req_to_token]
        if isinstance(pool, SWAKVPool):
            self._memory.append(pool.full_to_swa_index_mapping)
        self._next = [tensor.clone() for tensor in self._memory]

    @property
    def recorded_writes(self) -> int:
        """Operations of ``after_metadata`` in a graph."""
        return len(self._memory) if self.ends is SharedReadEnds.IN_REPLAY else 0

    def after_metadata(self) -> None:
        """Recorded between metadata and forward of a graph; changes nothing until ``replay``."""
        if self.ends is SharedReadEnds.IN_REPLAY:
            self._write()

    def replay(self, runner: GraphRunner[Any, Any], batch: ForwardBatch) -> ForwardOutput:
        """A replay during which the scheduler writes."""
        if self.ends is SharedReadEnds.IN_REPLAY:
            self._empty()
        runner.prepare(batch)
        self.after_plan()
        output: ForwardOutput = runner.run(batch)
        return output

    def after_plan(self) -> None:
        """Between the plan of a forward on the host and the forward."""
        if self.ends is SharedReadEnds.PRE_REPLAY:
            self._empty()
            self._write()

    def check(self) -> list[str]:
        """The request-to-token table, its padding row too, holds what the scheduler wrote last."""
        return check_table(self._next[0], self._memory[0])

    def _empty(self) -> None:
        for tensor in self._next:
            tensor.zero_()

    def _write(self) -> None:
        for tensor, value in zip(self._memory, self._next, strict=True):
            tensor.copy_(value)
