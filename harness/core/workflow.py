"""The treatment of goldens in a run."""

from __future__ import annotations

from enum import StrEnum


class Workflow(StrEnum):
    """The values of ``--golden``: verify, add what is missing, or rewrite."""

    VERIFY = "verify"
    ADD = "add"
    REWRITE = "rewrite"
