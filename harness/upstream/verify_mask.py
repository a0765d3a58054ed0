"""The mask of a target verify, with what the tree builder must know to write it in place."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch


class TreeMaskMode(IntEnum):
    """The layout of a mask of trees of num_draft_tokens tokens, request after request.

    FULL_MASK: num_draft_tokens rows of seq_len + num_draft_tokens columns. QLEN_ONLY: without the
    columns of the committed tokens, which every draft token sees.
    """

    FULL_MASK = 0
    QLEN_ONLY = 1


def tree_mask_numel(
    mode: TreeMaskMode, bs: int, num_draft_tokens: int, max_context_len: int
) -> int:
    """Most elements that the trees of bs requests take."""
    history = max_context_len if mode is TreeMaskMode.FULL_MASK else 0
    return bs * num_draft_tokens * (history + num_draft_tokens)


@dataclass(frozen=True)
class VerifyMask:
    """The mask of the largest verify, by its name in SGLang 0.5.23 (since 0.5.18).

    SGLang's tells ``is_read`` too, whether a kernel reads it; here every element is written.

    Args:
        buffer: flat bool, of the address that captured graphs read.
        mode: its layout.
        max_bs: most requests whose trees it holds at any length.
    """

    buffer: torch.Tensor
    mode: TreeMaskMode
    max_bs: int

    def fits(self, bs: int) -> bool:
        """Whether the trees of bs requests stay inside the buffer."""
        return bs <= self.max_bs
