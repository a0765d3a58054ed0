"""Goldens: answers of the oracle on disk, with their identity and origin."""

from __future__ import annotations

from harness.core.workflow import Workflow
from harness.differential.golden.golden_entry import (
    Golden,
    GoldenOutcome,
    Identity,
    digest,
    digest_of_tensors,
)
from harness.differential.golden.row import judge_by_golden, kept, project
from harness.differential.golden.store import GoldenStore

__all__ = [
    "Golden",
    "GoldenOutcome",
    "GoldenStore",
    "Identity",
    "Workflow",
    "digest",
    "digest_of_tensors",
    "judge_by_golden",
    "kept",
    "project",
]
