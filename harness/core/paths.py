"""Paths of the project's folders."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "fixtures" / "models"
GOLDEN = ROOT / "golden"


def python_path() -> str:
    """``PYTHONPATH`` of processes that this one starts: the checkout, then what it has itself."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
