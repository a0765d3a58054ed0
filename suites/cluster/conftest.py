"""Suites of Ray clusters: collected where Ray is, which the lane ``cluster-test`` brings along."""

from __future__ import annotations

from importlib.util import find_spec


def _has_ray() -> bool:
    try:
        return find_spec("ray") is not None
    except ValueError:  # a process in which it must not be imported
        return False


collect_ignore_glob = [] if _has_ray() else ["test_*.py"]
