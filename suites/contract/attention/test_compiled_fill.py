"""Compiled for any GPU, the fused fill orders its record's accesses, and is compiled once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from harness.core.paths import ROOT

CAPABILITIES = ("90", "100", "103", "120")


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    command = [sys.executable, "-m", "fixtures.drivers.compiled_fill", *CAPABILITIES]
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_no_number_of_a_batch_compiles_it_anew(compiled: dict[str, Any]) -> None:
    is_fixed = "bs" not in compiled["specialized"]
    assert is_fixed, "no batch size compiles the fill again: Triton does not specialize bs"
    # Triton looks at whether a tensor is aligned, and at numbers unless it is told not to.
    assert sorted(compiled["specialized"]) == [
        "cu_k",
        "cu_q",
        "filled",
        "lengths",
        "out_cache_loc",
        "page_table",
        "query_lens",
        "req_pool_indices",
        "req_to_token",
        "seq_lens",
        "swa_mapping",
        "swa_out_cache_loc",
        "swa_page_table",
    ]


def test_a_barrier_stands_between_the_record_s_read_and_its_write(
    compiled: dict[str, Any],
) -> None:
    # Without it a thread that is late reads what a faster one wrote: columns stay stale. No replay
    # on one GPU shows that it cannot happen; the code does.
    assert len(compiled["steps"]) == 4 * len(CAPABILITIES)
    for steps in compiled["steps"]:
        assert steps.count("barrier") == 1, steps
        at = steps.index("barrier")
        assert all(step.startswith("read ") for step in steps[:at]), steps
        first, last = steps[0], steps[-1]
        assert (first, last) == (f"read {first.split()[1]}", f"write {first.split()[1]}"), steps
        assert f"read {first.split()[1]}" not in steps[1:], steps
