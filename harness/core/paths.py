"""Paths of the project's folders."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "fixtures" / "models"
GOLDEN = ROOT / "golden"
