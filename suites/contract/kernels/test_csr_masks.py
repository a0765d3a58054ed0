"""Masks of FlashInfer's prefill are packed from the lowest bit on, as its ``packbits`` does."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.errors import KernelRefusal
from harness.kernels.csr_attention import csr_attention, pack_mask

PLAIN = {
    "kv_indices": None,
    "kv_lens": None,
    "planned": None,
    "packed_mask": None,
    "mask_indptr": None,
    "is_causal": False,
    "window_left": -1,
    "scale": 1.0,
    "out_scale": 1.0,
    "out_dtype": torch.float32,
}
"""Arguments that change nothing."""


def test_each_request_begins_with_a_byte_of_its_own() -> None:
    nine, three = [1, 1, 0, 0, 0, 0, 0, 1, 1], [0, 1, 1]
    packed, indptr = pack_mask(torch.tensor([*nine, *three]).bool(), torch.tensor([9, 3]))
    assert packed.dtype == torch.uint8
    assert packed.tolist() == [0b1000_0011, 0b1, 0b110]
    assert indptr.tolist() == [0, 2, 3]


def test_a_mask_that_lacks_the_last_bit_of_a_request_is_refused() -> None:
    """Three queries and three keys are nine bits: one more than a byte."""
    indptr, entries = torch.tensor([0, 3], dtype=torch.int32), torch.ones(3, 1, 4)
    given = {"q": entries, "keys": entries, "values": entries}
    mask = {
        "packed_mask": torch.tensor([0b1111_1111], dtype=torch.uint8),
        "mask_indptr": torch.tensor([0, 1], dtype=torch.int32),
    }
    with pytest.raises(KernelRefusal, match=r"custom_mask bits of a request = 8 .* >= 9"):
        csr_attention(**PLAIN | given | mask, qo_indptr=indptr, kv_indptr=indptr)


def test_shapes_are_known_before_it_runs() -> None:
    with FakeTensorMode():
        q, keys, values = (torch.empty(n, 3, dim) for n, dim in ((5, 24), (9, 24), (9, 16)))
        indptr, lens = torch.empty(3, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
        given = {"q": q, "keys": keys, "values": values, "kv_lens": lens}
        changes = {"is_causal": True, "out_dtype": torch.bfloat16}
        out, lse = csr_attention(**PLAIN | given | changes, qo_indptr=indptr, kv_indptr=indptr)
    assert (out.shape, out.dtype) == ((5, 3, 16), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((5, 3), torch.float32)
