"""What well-formed metadata and pools look like, whatever the outputs are.

Every check returns one line a violation, with the likely class of defect in brackets; an empty
list is the answer wished for. Checks take plain tensors, numbers and anything with the right
attributes; an attribute that is not there is a violation, not a reason to look away.
"""

from __future__ import annotations

from harness.differential.invariants.memory import (
    check_frozen,
    check_padding,
    check_pool,
    check_writes,
    frozen,
)
from harness.differential.invariants.planning import check_metadata

__all__ = [
    "check_frozen",
    "check_metadata",
    "check_padding",
    "check_pool",
    "check_writes",
    "frozen",
]
