"""On a GPU every replay is one launch of its graph, and no forward's plan waits for the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fixtures.drivers.forward_cost import cost_record, device_cost
from fixtures.drivers.rigs import new_rig, ragged_rig, replayed
from fixtures.tables import find
from fixtures.tables.budgets import BUCKET, DEVICE, FLASH_MLA, XQA, Budget
from harness.core.case import Mode
from harness.core.record import Record
from harness.graphs.cuda import CudaGraph
from harness.graphs.effects import observe, waits_refused

PLANNED = [mode for mode in Mode if mode is not Mode.IDLE]


@pytest.mark.parametrize("budget", [pytest.param(row, id=row.id) for row in DEVICE.values()])
def test_effects_of_a_replay(
    budget: Budget, cuda: torch.device, record_trial: Callable[[Record], None]
) -> None:
    found = device_cost(new_rig(budget.subject, find(budget.case_id), cuda), BUCKET)
    record = cost_record(budget, found, str(cuda), __name__)
    record_trial(record)
    if record.message:
        pytest.fail(record.message, pytrace=False)


@pytest.mark.parametrize("mode", PLANNED)
@pytest.mark.parametrize("subject", [XQA, FLASH_MLA])
@torch.no_grad()
def test_no_plan_waits(subject: str, mode: Mode, cuda: torch.device) -> None:
    rig = ragged_rig(subject, mode, cuda)
    rig.backend.init_forward_metadata(rig.batch)
    with waits_refused():
        rig.backend.init_forward_metadata(rig.batch)
    if mode is Mode.EXTEND:
        return
    runner = replayed(rig, BUCKET)
    with waits_refused():
        runner.replay(rig.batch)


@pytest.mark.parametrize(("subject", "launches"), [(XQA, 0), ("trtllm_mha-verify_fix_up/xqa", 1)])
@torch.no_grad()
def test_the_hook_after_drafting_launches_nothing_but_in_the_baseline(
    subject: str, launches: int, cuda: torch.device
) -> None:
    rig = ragged_rig(subject, Mode.TARGET_VERIFY, cuda)
    replayed(rig, BUCKET).prepare(rig.batch)
    with observe(cuda) as effects:
        rig.backend.update_verify_buffers_to_fill_after_draft(rig.batch.spec_info, BUCKET)
    assert effects.activity.launched.total() == launches
    assert effects.host_syncs == []


def test_a_wait_is_told_with_its_line_and_a_graph_apart_from_launches(cuda: torch.device) -> None:
    x = torch.arange(8.0, device=cuda)
    graph = CudaGraph(cuda)
    graph.warm_up(lambda: x * 2 + 1)
    out = graph.capture(lambda: x * 2 + 1)
    graph.replay()

    def act() -> float:
        graph.replay()
        x.mul_(2)
        return out[1].item()

    with observe(cuda) as effects:
        assert act() == 3
    line = act.__code__.co_firstlineno + 3
    assert effects.host_syncs == [f"synchronisation at {__file__}:{line}"]
    assert effects.activity.graph_launches == 1
    assert effects.activity.replayed == 2
    assert effects.activity.kernels.total() == 3
    assert effects.activity.copies == {"DtoH": 1}
    assert effects.bytes_allocated == 0


def test_memory_that_a_region_takes_is_counted(cuda: torch.device) -> None:
    with observe(cuda) as effects:
        torch.zeros(1024, device=cuda)
    assert effects.bytes_allocated == 4096
    assert effects.host_syncs == []
    assert effects.activity.launched.total() == 1


def test_a_refused_wait_raises_and_the_next_one_does_not(cuda: torch.device) -> None:
    x = torch.ones(3, device=cuda)
    with pytest.raises(RuntimeError, match="synchronizing"), waits_refused():
        x.sum().item()
    assert x.sum().item() == 3
