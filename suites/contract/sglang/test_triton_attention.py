"""What stands in for the Triton backend's decode kernel: scales, sinks, and where its slots lie."""

from __future__ import annotations

import pytest
import torch

from harness.oracle import attend
from harness.sglang.triton_attention import decode_attention_fwd, extend_attention_fwd

HEADS, KV_HEADS, DIM = 4, 2, 16
# A request of two keys and one of three, behind what an earlier kernel was given.
BEHIND = torch.tensor([99, 99, 7, 1, 9, 3, 2], dtype=torch.int32)
REQUESTS = ((0, [7, 1]), (1, [9, 3, 2]))


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])], ids=str)
def test_decode_scales_both_caches_and_gives_sinks_their_share(sinks: torch.Tensor | None) -> None:
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(2, HEADS, DIM, generator=generator)
    keys, values = torch.randn(2, 10, KV_HEADS, DIM, generator=generator)
    out = torch.empty_like(q)
    for said, k_scale, v_scale, given in (
        ("each request reads its own slots", 1.0, 1.0, None),
        ("cached keys are multiplied by k_scale", 0.5, 1.0, None),
        ("cached values are multiplied by v_scale", 0.5, 2.0, None),
        ("the softmax includes the sinks", 0.5, 2.0, sinks),
    ):
        try:
            decode_attention_fwd(
                q,
                keys,
                values,
                out,
                torch.tensor([0, 2, 5], dtype=torch.int32),
                BEHIND[2:3],  # a kernel takes where the slots begin, however long the view is
                *(torch.empty(0) for _ in range(3)),
                max_kv_splits=1,
                sm_scale=0.3,
                k_scale=k_scale,
                v_scale=v_scale,
                sinks=given,
            )
        except RuntimeError as error:
            pytest.fail(f"kv_indices reach from where they begin to their memory's end: {error}")
        for row, slots in REQUESTS:
            expected = attend(
                q[row : row + 1],
                keys[slots] * k_scale,
                values[slots] * v_scale,
                prefix_len=len(slots) - 1,
                scale=0.3,
                sinks=given,
            )
            torch.testing.assert_close(
                out[row : row + 1].double(),
                expected,
                rtol=1e-5,
                atol=1e-5,
                msg=lambda found, said=said: f"{said}\n{found}",
            )


def test_extend_scales_its_scores_and_its_cache_and_not_what_is_new() -> None:
    generator = torch.Generator().manual_seed(6)
    q, new_keys, new_values = (
        torch.randn(3, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    keys, values = torch.randn(2, 10, KV_HEADS, DIM, generator=generator)
    sinks, out = torch.tensor([0.5, -1.0, 2.0, 0.0]), torch.empty_like(q)
    for said, k_scale, v_scale in (
        ("scores are multiplied by sm_scale, the layer's, not by 1 / sqrt(head_dim)", 1.0, 1.0),
        ("cached keys are multiplied by k_scale, and new ones are not", 0.5, 1.0),
        ("cached values are multiplied by v_scale, and new ones are not", 0.5, 2.0),
    ):
        extend_attention_fwd(
            *(q, new_keys, new_values, out, keys, values),
            torch.tensor([0, 2, 3], dtype=torch.int32),
            torch.tensor([0, 2, 5], dtype=torch.int32),
            BEHIND[2:3],
            None,
            True,
            None,
            2,
            k_scale=k_scale,
            v_scale=v_scale,
            sm_scale=0.3,
            sinks=sinks,
        )
        for (_, slots), rows in zip(REQUESTS, (slice(2), slice(2, 3)), strict=True):
            expected = attend(
                q[rows],
                torch.cat((keys[slots] * k_scale, new_keys[rows])),
                torch.cat((values[slots] * v_scale, new_values[rows])),
                prefix_len=len(slots),
                scale=0.3,
                sinks=sinks,
            )
            torch.testing.assert_close(
                out[rows].double(),
                expected,
                rtol=1e-5,
                atol=1e-5,
                msg=lambda found, said=said: f"{said}\n{found}",
            )
