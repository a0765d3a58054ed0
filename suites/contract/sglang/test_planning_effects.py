"""What planning costs, on the releases between which it changed; each needs its own process."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

from fixtures.drivers.release_effects import count_effects
from fixtures.tables import CASES
from harness.core.case import Execution
from harness.core.record import Verdict
from harness.differential.planning_effects import planning_effects
from harness.sglang.releases import find_release, source_of
from harness.sglang_subjects import sglang_subjects


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        pytest.param(
            "0.5.13",
            (4, 72, Verdict.OVER_BUDGET, True, True),
            id="0.5.13_reads_the_device_once_per_step",
        ),
        pytest.param(
            "0.5.14", (0, 40, Verdict.OVER_BUDGET, True, False), id="0.5.14_reads_nothing"
        ),
        pytest.param(
            "0.5.16", (0, 0, Verdict.PASSED, False, False), id="0.5.16_plans_in_the_graph"
        ),
    ],
)
def test_replay_preparation_of_a_draft(
    version: str, expected: tuple[int, int, Verdict, bool, bool]
) -> None:
    if not (source_of(find_release(version)) / "sglang").is_dir():
        pytest.skip(f"sglang {version} is not installed: specgate upstream --install {version}")
    # A fork has torch already, and is of no use where CUDA is: a release is kept from seeing it.
    start = get_context("spawn" if torch.cuda.is_available() else "fork")
    with ProcessPoolExecutor(1, start) as process:
        assert process.submit(planned, version).result(timeout=300) == expected


def planned(version: str) -> tuple[int, int, Verdict, bool, bool]:
    """Host reads, operations, verdict, and what the verdict's message names."""
    case = CASES["mha-multi_step_draft-bs2_ragged"]
    subjects = sglang_subjects(find_release(version))
    subject = next(s for s in subjects if s.name.endswith("trtllm_mha/trtllm_gen"))
    effects = planning_effects(subject, case, Execution.GRAPH)
    record = count_effects(case, subject, Execution.GRAPH)
    told = "host_planning" in record.message, "host_syncs" in record.message
    return len(effects.host_syncs), effects.operations.total(), record.verdict, *told
