"""Compiled for any GPU, the fused fill reads its record in every thread before one writes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from harness.core.paths import ROOT

CAPABILITIES = ("90", "100", "103", "120")


def test_a_barrier_stands_between_the_record_s_read_and_its_write() -> None:
    # Without it a thread that is late reads what a faster one wrote: columns stay stale. No replay
    # on one GPU shows that it cannot happen; the code does.
    command = [sys.executable, "-m", "fixtures.drivers.compiled_fill", *CAPABILITIES]
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 4 * len(CAPABILITIES)
    for steps in found:
        assert steps.count("barrier") == 1, steps
        at = steps.index("barrier")
        assert all(step.startswith("read ") for step in steps[:at]), steps
        first, last = steps[0], steps[-1]
        assert (first, last) == (f"read {first.split()[1]}", f"write {first.split()[1]}"), steps
        assert f"read {first.split()[1]}" not in steps[1:], steps
