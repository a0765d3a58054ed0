"""What planning costs, on the releases between which it changed; each needs its own process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from harness.sglang.releases import find_release, source_of

MEASURE = """
import sys
from fixtures.drivers.release_effects import count_effects
from fixtures.tables import CASES
from harness.core.case import Execution
from harness.differential.planning_effects import planning_effects
from harness.sglang.releases import find_release
from harness.sglang_subjects import sglang_subjects

case = CASES["mha-multi_step_draft-bs2_ragged"]
subjects = sglang_subjects(find_release(sys.argv[1]))
subject = next(s for s in subjects if s.name.endswith("trtllm_mha/trtllm_gen"))
effects = planning_effects(subject, case, Execution.GRAPH)
record = count_effects(case, subject, Execution.GRAPH)
told = "host_planning" in record.message, "host_syncs" in record.message
print(len(effects.host_syncs), effects.operations.total(), record.verdict, *told)
"""


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        pytest.param(
            "0.5.13", "4 72 over_budget True True", id="0.5.13_reads_the_device_once_per_step"
        ),
        pytest.param("0.5.14", "0 40 over_budget True False", id="0.5.14_reads_nothing"),
        pytest.param("0.5.16", "0 0 passed False False", id="0.5.16_plans_in_the_graph"),
    ],
)
def test_replay_preparation_of_a_draft(version: str, expected: str) -> None:
    if not (source_of(find_release(version)) / "sglang").is_dir():
        pytest.skip(f"sglang {version} is not installed: specgate upstream --install {version}")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEASURE, version],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.stdout.splitlines()[-1:] == [expected], done.stderr[-2000:]
