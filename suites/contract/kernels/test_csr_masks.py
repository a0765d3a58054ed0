"""Masks of FlashInfer's prefill are packed from the lowest bit on, as its ``packbits`` does."""

from __future__ import annotations

import torch

from harness.kernels.csr_attention import pack_mask


def test_each_request_begins_with_a_byte_of_its_own() -> None:
    nine, three = [1, 1, 0, 0, 0, 0, 0, 1, 1], [0, 1, 1]
    packed, indptr = pack_mask(torch.tensor([*nine, *three]).bool(), torch.tensor([9, 3]))
    assert packed.dtype == torch.uint8
    assert packed.tolist() == [0b1000_0011, 0b1, 0b110]
    assert indptr.tolist() == [0, 2, 3]
