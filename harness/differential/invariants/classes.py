"""Classes of defects that a broken invariant points at."""

from __future__ import annotations

LENGTHS = "length arithmetic"
INDEX_SPACE = "index space or capacity"
GEOMETRY = "geometry frozen at capture"
PADDING = "stale or undeclared padding"
LIFETIME = "identity and lifetime"
HOST_SYNC = "device-to-host sync"
DISPATCH = "kernel dispatch"
OPERATIONS = "operations beyond the formula"
