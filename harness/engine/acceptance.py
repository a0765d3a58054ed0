"""Acceptance of drafts: batched, pure functions of tensors without host syncs.

A chain is a draft tree with topk = 1. Its first token is the *bonus* token, the last one that the
target emitted, without keys and values yet; the others are drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harness.errors import CapacityError, ContractError, UsageError, rejected


@dataclass(frozen=True)
class Acceptance:
    """The result of a greedy verify of bs chains of num_draft_tokens tokens.

    Args:
        accept_lens: [bs] int32, 1 + the matched drafts: the tokens the round emits.
        predicted: [bs, num_draft_tokens] int64, the target's choice after every chain token.
        emitted: [bs, num_draft_tokens] bool, which of ``predicted`` are emitted.
        bonus: [bs] int64, the last emitted token: the next chain starts with it.
    """

    accept_lens: torch.Tensor
    predicted: torch.Tensor
    emitted: torch.Tensor
    bonus: torch.Tensor


def build_chain(
    bonus: torch.Tensor, draft_tokens: torch.Tensor, num_draft_tokens: int
) -> torch.Tensor:
    """Chains [bs, num_draft_tokens] int64: bonus [bs], then the first drafts of [bs, num_steps].

    Raises:
        UsageError: the chain would need more drafts than there are.
    """
    available = draft_tokens.shape[1] + 1
    if not 1 <= num_draft_tokens <= available:
        raise UsageError(rejected("num_draft_tokens", num_draft_tokens, f"1 … {available}"))
    return torch.cat((bonus[:, None], draft_tokens[:, : num_draft_tokens - 1]), dim=1)


def fill_full_mask(mask: torch.Tensor, seq_lens: torch.Tensor, num_draft_tokens: int) -> None:
    """Write the FULL_MASK of bs chains into a flat bool buffer, in place.

    A request has num_draft_tokens rows of seq_len + num_draft_tokens columns, request after
    request. Row j sees the committed tokens and the chain up to and including j. Elements after
    the last request stay unchanged.

    Args:
        mask: flat bool buffer, at least as long as the mask.
        seq_lens: [bs] committed tokens, any integer dtype.
        num_draft_tokens: tokens per chain.

    Raises:
        ContractError: the buffer is not flat bool.
        CapacityError: the buffer could not even hold chains without history.
    """
    if mask.dtype != torch.bool or mask.dim() != 1:
        shown = f"{mask.dtype} of {mask.dim()} dimensions"
        raise ContractError(rejected("mask", shown, "a flat torch.bool buffer"))
    bs = seq_lens.shape[0]
    if not bs:
        return
    shortest = bs * num_draft_tokens * num_draft_tokens
    if mask.numel() < shortest:
        raise CapacityError(rejected("mask elements", mask.numel(), f"at least {shortest}"))
    widths = seq_lens.long() + num_draft_tokens
    ends = (widths * num_draft_tokens).cumsum(0)
    # Lengths live on the device, so the request of every element of the buffer is searched for.
    place = torch.arange(mask.numel(), device=mask.device)
    owner = torch.searchsorted(ends, place, right=True)
    request = owner.clamp(max=bs - 1)
    width = widths[request]
    inside = place - (ends[request] - width * num_draft_tokens)
    row, column = inside // width, inside % width
    visible = column <= row + width - num_draft_tokens
    mask.copy_(torch.where(owner < bs, visible, mask))


def verify_greedy(chain: torch.Tensor, logits: torch.Tensor) -> Acceptance:
    """Accept the longest prefix of drafts that equal the target's choices.

    Args:
        chain: [bs, num_draft_tokens] int64.
        logits: [bs * num_draft_tokens, vocab], the target's, one row per chain token.
    """
    predicted = logits.argmax(-1).view(chain.shape)
    matched = (predicted[:, :-1] == chain[:, 1:]).long().cumprod(1)
    accept_lens = 1 + matched.sum(1)
    steps = torch.arange(chain.shape[1], device=chain.device)
    return Acceptance(
        accept_lens=accept_lens.int(),
        predicted=predicted,
        emitted=steps < accept_lens[:, None],
        bonus=predicted.gather(1, accept_lens[:, None] - 1).squeeze(1),
    )


def last_uniform_rows(accept_lens: torch.Tensor, num_tokens_per_req: int) -> torch.Tensor:
    """[bs] int64 rows of each request's last accepted token where requests have equal widths."""
    starts = torch.arange(accept_lens.shape[0], device=accept_lens.device) * num_tokens_per_req
    return starts + accept_lens.long() - 1


def last_ragged_rows(lens: torch.Tensor) -> torch.Tensor:
    """[bs] int64 rows of each request's last token where rows are packed request after request."""
    return lens.long().cumsum(0) - 1
