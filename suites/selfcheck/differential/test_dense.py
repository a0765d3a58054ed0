"""The dense problem: each token's rows, rotated for its position, however many are asked for."""

from __future__ import annotations

import pytest
import torch

from fixtures.tables import CASES
from harness.core.case import Case
from harness.differential.dense import dense_rows
from harness.differential.input_types import ROPE_THETA, VOCAB
from harness.differential.inputs import make_trial_inputs

ROWS = [CASES[f"{family}-target_verify-fp8_cache"] for family in ("mha", "mla")]
POSITIONS = (4097, 0, 9001, 5, 4095)
"""Most of them behind the longest request of these rows."""
TOKENS = (7, VOCAB - 1, 3, 7, 50)
each_family = pytest.mark.parametrize("case", ROWS, ids=lambda case: str(case.family))


def rotated(row: torch.Tensor, position: int) -> torch.Tensor:
    """A row [..., dim] turned by the angles of a position, each pair of halves by its own."""
    half = row.shape[-1] // 2
    angle = position / ROPE_THETA ** (torch.arange(half).double() / half)
    low, high = row.double().split(half, -1)
    turned = low * angle.cos() - high * angle.sin(), low * angle.sin() + high * angle.cos()
    return torch.cat(turned, -1)


@each_family
def test_a_row_is_its_tokens_turned_for_its_position(case: Case) -> None:
    weights = make_trial_inputs(case).weights
    tokens, positions = torch.tensor(TOKENS), torch.tensor(POSITIONS)
    found = dense_rows(weights, case, tokens, positions, queries=2)
    for i, (token, position) in enumerate(zip(TOKENS, POSITIONS, strict=True)):
        if weights.k_rope is None:
            key, value = rotated(weights.k[:, token], position), weights.v[:, token]
        else:
            value = weights.k[:, token]
            key = torch.cat((value.double(), rotated(weights.k_rope[:, token], position)), -1)
        said = f"token {token} at position {position}"
        torch.testing.assert_close(found.k[:, i].double(), key, rtol=2**-8, atol=1e-6, msg=said)
        assert torch.equal(found.v[:, i].float(), value.float()), said
    assert found.q.shape[1] == 2


@each_family
def test_few_tokens_and_many_have_the_same_rows(case: Case) -> None:
    weights = make_trial_inputs(case).weights
    tokens = torch.arange(2 * VOCAB).flip(0) % VOCAB
    positions = torch.arange(2 * VOCAB) * 3
    many = dense_rows(weights, case, tokens, positions, queries=2 * VOCAB)
    few = dense_rows(weights, case, tokens[5:9], positions[5:9], queries=4)
    for name in ("q", "k", "v"):
        assert torch.equal(getattr(few, name), getattr(many, name)[:, 5:9]), name
