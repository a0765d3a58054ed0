"""The oracle answers every row as it did when recorded, and no golden is orphaned."""

from __future__ import annotations

import pytest
import torch

from fixtures.pytest_plugin.goldens import planned, settle_row
from fixtures.tables import CASES
from harness.core.case import Case
from harness.differential.golden import GoldenStore, Workflow

ROWS = [case for case in CASES.values() if case.bs]


@pytest.mark.parametrize("case", ROWS, ids=[case.id for case in ROWS])
def test_row(case: Case, goldens: GoldenStore) -> None:
    stored, now = settle_row(goldens, case)
    assert stored.tensors.keys() == now.tensors.keys()
    for name, tensor in now.tensors.items():
        torch.testing.assert_close(tensor, stored.tensors[name], rtol=1e-5, atol=1e-6)


def test_no_golden_is_orphaned(goldens: GoldenStore) -> None:
    orphans = goldens.orphans(planned())
    assert goldens.workflow is Workflow.REWRITE or not orphans, "\n".join(orphans)


def test_recording_ends_red(goldens: GoldenStore) -> None:
    assert goldens.workflow is Workflow.VERIFY, "goldens were recorded: look at them, run again"
