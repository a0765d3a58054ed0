"""Rows of our plugin are planned on what sglang's own rows are planned on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from harness.core.paths import ROOT


def test_a_checkout_is_what_every_row_runs_on(tmp_path: Path) -> None:
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    given = ["-n0", "--release", "0.5.23", "--sglang-source", str(tmp_path)]
    rows = "suites/upstream/test_releases.py"
    done = subprocess.run(
        [*collect, *given, rows], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = [line for line in done.stdout.splitlines() if "test_releases.py::" in line]
    assert sum("specgate_" in name for name in names) > 100
    assert [name for name in names if "-sglang-source/" not in name] == []
