"""Every forward costs exactly what its row says: host syncs, operations, kernels, moved memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fixtures.drivers.forward_cost import cost, cost_record
from fixtures.drivers.rigs import new_rig
from fixtures.tables import find
from fixtures.tables.budgets import BUCKET, BUDGETS, OWN, Budget
from harness.core.case import Execution, Mode
from harness.core.record import Record
from harness.subjects import GRAPH_MODES, SUBJECTS


@pytest.mark.parametrize("budget", [pytest.param(row, id=row.id) for row in BUDGETS.values()])
def test_effects_of_a_forward(budget: Budget, record_trial: Callable[[Record], None]) -> None:
    # Counted on the CPU whatever --device is: the tape is the instrument.
    found = cost(new_rig(budget.subject, find(budget.case_id)), budget.execution, BUCKET)
    record = cost_record(budget, found, "cpu", __name__)
    record_trial(record)
    if record.message:
        pytest.fail(record.message, pytrace=False)


def test_the_table_has_a_row_for_every_mode_of_both_families() -> None:
    for subject in ("trtllm_mha/trtllm_gen", "trtllm_mla/trtllm_gen"):
        assert SUBJECTS[subject].modes == frozenset(Mode)
        for execution, modes in (
            (Execution.EAGER, frozenset(Mode)),
            (Execution.GRAPH, GRAPH_MODES),
        ):
            rows = {
                row.mode
                for row in BUDGETS.values()
                if (row.subject, row.execution) == (subject, execution)
            }
            assert rows == modes


def test_no_optimized_forward_reads_the_host_or_moves_memory() -> None:
    for name in ("host_syncs", "moved", "prepared_bytes"):
        assert {row.counts.get(name, 0) for row in OWN.values()} == {0}
    v2 = [row for row in OWN.values() if row.mode is Mode.DRAFT_EXTEND_V2]
    assert {row.counts.get("topk", 0) for row in v2} == {0}


def test_a_row_tells_counts_above_and_below_it() -> None:
    row = Budget("trtllm_mha/xqa", Mode.DECODE, Execution.EAGER, {"planning": 25}, "")
    assert row.over({"planning": 25, "topk": 0}) == {}
    assert row.over({"planning": 24, "host_syncs": 1}) == {
        "planning": (24, 25),
        "host_syncs": (1, 0),
    }


def test_a_cost_names_the_line_of_a_host_sync_and_what_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget = BUDGETS["target_verify-trtllm_mla/trtllm_gen-graph"]
    rig = new_rig(budget.subject, find(budget.case_id))
    plan = rig.backend.init_forward_metadata_out_graph

    def reading(batch: object, in_capture: bool = False) -> None:
        plan(batch, in_capture)
        metadata = rig.backend.forward_metadata
        int(metadata.cache_seqlens_int32[0])
        if not in_capture:
            tables = metadata.page_table.clone()
            object.__setattr__(metadata, "page_table", tables)

    monkeypatch.setattr(rig.backend, "init_forward_metadata_out_graph", reading)
    found = cost(rig, Execution.GRAPH, BUCKET)
    line = reading.__code__.co_firstlineno + 3
    assert found.host_syncs == (f"aten._local_scalar_dense.default at {__file__}:{line}",)
    assert found.moved == ("metadata page_table of step 0",)
    assert budget.over(found.counts)["host_syncs"] == (1, 0)
