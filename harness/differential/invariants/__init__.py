"""Invariants of metadata and pools, whatever the outputs are.

Every check returns one line per violation, with the likely class of defect in brackets. Checks
take plain tensors, numbers and anything with the right attributes; a missing attribute is a
violation.
"""

from __future__ import annotations

from harness.differential.invariants.effects import check_entries, check_operations, check_waits
from harness.differential.invariants.memory import (
    check_frozen,
    check_padding,
    check_table,
    check_writes,
    frozen,
)
from harness.differential.invariants.planning import check_metadata

__all__ = [
    "check_entries",
    "check_frozen",
    "check_metadata",
    "check_operations",
    "check_padding",
    "check_table",
    "check_waits",
    "check_writes",
    "frozen",
]
