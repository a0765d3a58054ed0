"""The project's metadata where nothing is installed: importlib.metadata finds its entry points."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.core.paths import ROOT
from harness.errors import UsageError

HOOK = "prepare_metadata_for_build_editable"
WRITE = f"import sys; from setuptools import build_meta; build_meta.{HOOK}(sys.argv[1])"


def write(into: Path, site: Path) -> None:
    """Write this checkout's ``dist-info``, as pip does for an editable install.

    Args:
        into: a folder that will be on Python's path.
        site: has setuptools.

    Raises:
        UsageError: setuptools fails; names what it said last.
    """
    with tempfile.TemporaryDirectory(dir=into) as folder:
        command = [sys.executable, "-c", WRITE, folder]
        environment = os.environ | {"PYTHONPATH": str(site)}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            said = done.stderr.strip().rpartition("\n")[2]
            raise UsageError(f"setuptools cannot write the project's metadata: {said}")
        [written] = Path(folder).glob("*.dist-info")
        written.rename(into / written.name)
