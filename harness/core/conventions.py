"""Conventions: what differs from backend to backend and is a defect of none."""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.case import Execution, Mode


@dataclass(frozen=True, kw_only=True)
class MoreOperations:
    """Operations that a baseline dispatches or records beyond our own backends.

    Args:
        eager: of an eager plan: once, and for each draft step.
        recorded: of a captured plan, likewise.
        on_host: before a replay.
        outputs: of what a graph makes of its logits.
    """

    eager: tuple[int, int] = (0, 0)
    recorded: tuple[int, int] = (0, 0)
    on_host: int = 0
    outputs: int = 0

    def of_plan(self, execution: Execution) -> tuple[int, int]:
        """Once, and for each draft step."""
        return self.eager if execution is Execution.EAGER else self.recorded


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """How a backend's authors agreed on what a kernel never sees.

    Args:
        zero_table_tail: whether a page table holds zeros after a request's live pages; otherwise
            whatever was there, which no kernel reads.
        shares_draft_table: whether the first step's page table of a captured draft serves the later
            ones, too, and so holds their pages already.
        lacks: fields of the metadata that it does not have because its kernels take none.
        freezes_host_numbers: whether a replay plans with the host numbers of its capture; otherwise
            it writes new ones, which no captured call reads.
        scales_mla_cache: whether MLA's latent is divided by k_scale before it is cached.
        waits: whether a forward may make the host wait for its device.
        context_modes: modes of uniform queries that go to a kernel's context entry and not to its
            decode entry; None where the backend's authors chose.
        more: operations beyond ours; None where nobody counted.
    """

    zero_table_tail: bool = True
    shares_draft_table: bool = True
    lacks: frozenset[str] = frozenset()
    freezes_host_numbers: bool = True
    scales_mla_cache: bool = True
    waits: bool = False
    context_modes: frozenset[Mode] | None = frozenset()
    more: MoreOperations | None = MoreOperations()


OURS = Conventions()
