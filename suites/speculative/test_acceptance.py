"""Accepting a chain is the longest prefix the target agrees with, whatever else is in the batch."""

from __future__ import annotations

import pytest
import torch

from harness.engine.acceptance import (
    build_chain,
    fill_full_mask,
    last_ragged_rows,
    last_uniform_rows,
    verify_greedy,
)
from harness.errors import CapacityError, ContractError, UsageError

VOCAB = 10
# chain; the target's choice after each of its tokens; accept length; next bonus
VERDICTS = {
    "nothing accepted": ([7, 1, 2, 3], [9, 1, 2, 3], 1, 9),
    "everything accepted": ([7, 1, 2, 3], [1, 2, 3, 8], 4, 8),
    "a match after a mismatch does not count": ([7, 1, 2, 3], [1, 5, 3, 4], 2, 5),
    "only the last draft rejected": ([7, 1, 2, 3], [1, 2, 4, 6], 3, 4),
    "the bonus token itself is never compared": ([7, 7, 7, 7], [0, 7, 7, 7], 1, 0),
    "token 0 is a token": ([0, 0, 0, 0], [0, 0, 5, 0], 3, 5),
}


def logits_for(choices: list[list[int]]) -> torch.Tensor:
    """Rows whose argmax is given; everything else is negative and uneven."""
    flat = torch.tensor(choices).flatten()
    noise = -1 - torch.arange(len(flat) * VOCAB).view(-1, VOCAB) % 3
    return noise.float().scatter(1, flat[:, None], 0.5)


@pytest.mark.parametrize("name", VERDICTS)
def test_one_chain(name: str) -> None:
    chain, choices, length, bonus = VERDICTS[name]
    verdict = verify_greedy(torch.tensor([chain]), logits_for([choices]))
    said = "a chain is accepted up to its first draft token that the target does not predict"
    assert verdict.accept_lens.tolist() == [length], said
    dtype = verdict.accept_lens.dtype
    assert dtype == torch.int32, f"accept_lens are int32, not {dtype}"
    found = verdict.predicted.tolist()
    assert found == [choices], f"predictions are the target's argmax, {choices}, not {found}"
    said = f"the first accept_len = {length} predictions are emitted: {verdict.emitted.tolist()}"
    assert verdict.emitted.tolist() == [[i < length for i in range(4)]], said
    found = verdict.bonus.tolist()
    said = "the bonus is the target's prediction after the last accepted token"
    assert found == [bonus], f"{said}, {bonus}, not {found}"


def test_a_batch_is_its_chains() -> None:
    chains, choices, lengths, bonuses = zip(*VERDICTS.values(), strict=True)
    verdict = verify_greedy(torch.tensor(chains), logits_for(list(choices)))
    found = verdict.accept_lens.tolist()
    said = "each chain of a batch is accepted up to its first draft token that is not predicted"
    assert found == list(lengths), f"{said}: accept_lens {lengths}, not {found}"
    found = verdict.bonus.tolist()
    said = "the bonus is the target's prediction after the last accepted token of each chain"
    assert found == list(bonuses), f"{said}: {bonuses}, not {found}"


SIZES = ((1, 16), (9, 2), (17, 5), (64, 16))
"""Requests and tokens of a chain, as servers have them."""


def drawn(bs: int, most: int) -> list[int]:
    """Lengths or tokens, one per request, of no order."""
    return [(37 * i * i + 11 * i + 5) % most for i in range(bs)]


@pytest.mark.parametrize(("bs", "width"), SIZES)
def test_chains_of_any_number_and_width(bs: int, width: int) -> None:
    # Some agree to the end; of the others, drafts agree again after the mismatch.
    chains = [[token % 2 for token in drawn(width + i, 50 + i)[-width:]] for i in range(bs)]
    choices = [[*chain[1:], 7] for chain in chains]
    for i, choice in enumerate(choices):
        if (mismatch := (5 * i + width) % (width + 3)) < width:
            choice[mismatch] = 9
    lengths = [
        next((j for j, token in enumerate(c) if token in (7, 9)), width) + 1 for c in choices
    ]
    found = verify_greedy(torch.tensor(chains), logits_for(choices))
    said = "a chain is accepted up to its first draft token that the target does not predict"
    assert found.accept_lens.tolist() == lengths, said
    assert max(lengths) == width
    bonuses = [c[n - 1] for c, n in zip(choices, lengths, strict=True)]
    said = "the bonus is the target's prediction after the last accepted token"
    assert found.bonus.tolist() == bonuses, said
    assert found.emitted.sum(1).tolist() == lengths
    assert found.predicted.tolist() == choices
    rows = last_uniform_rows(found.accept_lens, width).tolist()
    assert rows == [i * width + n - 1 for i, n in enumerate(lengths)]
    ends = [sum(lengths[: i + 1]) - 1 for i in range(bs)]
    assert last_ragged_rows(found.accept_lens).tolist() == ends


@pytest.mark.parametrize(("bs", "width"), SIZES)
def test_masks_of_any_number_and_width(bs: int, width: int) -> None:
    seq_lens = drawn(bs, 300)
    cells = [
        column <= n + row for n in seq_lens for row in range(width) for column in range(n + width)
    ]
    buffer = torch.zeros(len(cells) + 3, dtype=torch.bool)
    fill_full_mask(buffer, torch.tensor(seq_lens), width)
    found = buffer.tolist()
    told = "no draft token sees one that follows it, in any request of a batch"
    assert not any(seen and not due for seen, due in zip(found, cells, strict=False)), told
    assert found == [*cells, False, False, False]


def test_no_chain_at_all() -> None:
    verdict = verify_greedy(torch.zeros(0, 4, dtype=torch.int64), torch.zeros(0, VOCAB))
    assert verdict.accept_lens.shape == (0,)
    assert verdict.bonus.shape == (0,)


def test_a_chain_is_the_bonus_and_the_first_drafts() -> None:
    bonus, drafts = torch.tensor([4, 6]), torch.tensor([[1, 2, 3], [7, 8, 9]])
    assert build_chain(bonus, drafts, 4).tolist() == [[4, 1, 2, 3], [6, 7, 8, 9]]
    assert build_chain(bonus, drafts, 2).tolist() == [[4, 1], [6, 7]]
    with pytest.raises(UsageError, match=r"num_draft_tokens = 5 .* 1 … 4"):
        build_chain(bonus, drafts, 5)


def test_the_mask_by_hand() -> None:
    """Two requests with 2 and 0 committed tokens and chains of 3; x is seen, . is not."""
    rows = "xxx.. xxxx. xxxxx" + " x.. xx. xxx"
    expected = [cell == "x" for cell in rows.replace(" ", "")]
    buffer = torch.zeros(30, dtype=torch.bool)
    fill_full_mask(buffer, torch.tensor([2, 0]), 3)
    first, second = buffer[:15].view(3, 5), buffer[15:24].view(3, 3)
    assert first[:, :2].all(), "every draft token attends to the whole history"
    for drafts in (first[:, 2:], second):
        assert drafts.diagonal().all(), "every draft token attends to itself"
    said = "a draft token attends to the history, itself and the drafts before it"
    found = "".join(".x"[cell] for cell in buffer[:24].tolist())
    assert buffer[:24].tolist() == expected, f"{said}: {rows.replace(' ', '')}, not {found}"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("before", [False, True], ids=["over_false", "over_true"])
def test_the_mask_is_written_in_place_and_nothing_behind_it(
    dtype: torch.dtype, before: bool
) -> None:
    seq_lens, width = [5, 1, 0, 16, 3], 4
    cells = [
        column <= n + row for n in seq_lens for row in range(width) for column in range(n + width)
    ]
    buffer = torch.full((len(cells) + 7,), before)
    address = buffer.data_ptr()
    fill_full_mask(buffer, torch.tensor(seq_lens, dtype=dtype), width)
    assert buffer.data_ptr() == address
    sizes = [width * (n + width) for n in seq_lens]
    for n, part in zip(seq_lens, buffer[: len(cells)].split(sizes), strict=True):
        seen = part.view(width, n + width)
        assert seen[:, :n].all(), "every draft token attends to the whole history"
        assert seen[:, n:].diagonal().all(), "every draft token attends to itself"
    assert buffer.tolist() == cells + [before] * 7


def test_a_mask_of_exactly_the_buffer_fits() -> None:
    buffer = torch.zeros(2 * (3 + 2), dtype=torch.bool)
    fill_full_mask(buffer, torch.tensor([3]), 2)
    seen = buffer.view(2, 3 + 2)
    assert seen[:, :3].all(), "every draft token attends to the whole history"
    assert seen[:, 3:].diagonal().all(), "every draft token attends to itself"
    assert buffer.tolist() == [True] * 4 + [False] + [True] * 5


def test_chains_without_history_fit_a_buffer_of_their_own_columns() -> None:
    """QLEN_ONLY: as many columns as tokens, and a full batch fills the buffer."""
    buffer = torch.zeros(2 * 3 * 3, dtype=torch.bool)
    fill_full_mask(buffer, torch.tensor([0, 0]), 3)
    assert (
        buffer.view(2, 3, 3).tolist()
        == [[[True, False, False], [True, True, False], [True, True, True]]] * 2
    )


def test_an_empty_batch_leaves_the_mask_alone() -> None:
    buffer = torch.ones(3, dtype=torch.bool)
    fill_full_mask(buffer, torch.zeros(0, dtype=torch.int64), 4)
    assert buffer.all()


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (torch.zeros(64, dtype=torch.uint8), ContractError, "torch.uint8"),
        (torch.zeros(8, 8, dtype=torch.bool), ContractError, "2 dimensions"),
        (torch.zeros(17, dtype=torch.bool), CapacityError, "mask elements = 17 .* at least 18"),
    ],
    ids=["dtype", "shape", "size"],
)
def test_a_wrong_buffer_is_refused(
    mask: torch.Tensor, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fill_full_mask(mask, torch.tensor([1, 2]), 3)


def test_the_row_of_each_requests_last_token() -> None:
    lens = torch.tensor([2, 4, 1], dtype=torch.int32)
    said = f"the row of the last accepted token, of accept_lens {lens.tolist()}"
    found = last_uniform_rows(lens, 4).tolist()
    assert found == [1, 7, 8], f"{said} in v2's uniform rows of 4, is [1, 7, 8], not {found}"
    found = last_ragged_rows(lens).tolist()
    assert found == [1, 5, 6], f"{said} in v1's ragged rows, is [1, 5, 6], not {found}"
