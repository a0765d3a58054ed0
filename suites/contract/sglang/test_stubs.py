"""Stand-ins of FlashInfer and sgl_kernel: what they compute, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from harness.core.capability import CAPABILITIES
from harness.core.case import Family
from harness.errors import KernelRefusal
from harness.kernels.reference import TorchPaged
from harness.oracle import attend
from harness.sglang.patches import fused_fp8_qkv_kv_cache
from harness.sglang.stubs.flashinfer import (
    served_by,
    trtllm_batch_context_with_kv_cache,
    trtllm_batch_decode_with_kv_cache,
    trtllm_batch_decode_with_kv_cache_mla,
    trtllm_fmha_v2_prefill,
)
from harness.sglang.stubs.rope import mla_rope_quantize_fp8, no_rotation, rotated
from harness.sglang.stubs.sgl_kernel import sgl_per_tensor_quant_fp8

FP8 = torch.float8_e4m3fn


def decode(
    query: torch.Tensor, bmm1_scale: float | torch.Tensor, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """One request of two keys on trtllm-gen, whose cache is FP8."""
    generator = torch.Generator().manual_seed(1)
    cache = torch.randn(2, 1, 16, 64, generator=generator).to(FP8)
    with served_by(TorchPaged(CAPABILITIES[Family.MHA, "trtllm_gen"])):
        return trtllm_batch_decode_with_kv_cache(
            query,
            (cache, cache),
            torch.empty(0),
            torch.tensor([[1]], dtype=torch.int32),
            torch.tensor([2], dtype=torch.int32),
            16,
            bmm1_scale=bmm1_scale,
            out_dtype=torch.bfloat16,
            sinks=sinks,
        )


def test_a_sink_takes_its_part_of_a_decode() -> None:
    query = torch.zeros(1, 2, 64).to(FP8)
    plain, sunk = (decode(query, 0.25, sinks) for sinks in (None, torch.tensor([0.0, 2.0]).log()))
    # Two equal keys of weight 1 each, beside nothing and beside a sink of weight 2.
    expected = plain.double() * torch.tensor([[[1.0], [0.5]]], dtype=torch.float64)
    close(sunk, expected, "a head's sink is one more key without a value")


def test_a_scale_on_the_device_is_the_same_scale() -> None:
    query = torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(2)).to(FP8)
    expected = decode(query, 0.25)
    obtained = decode(query, torch.tensor([0.25]))
    torch.testing.assert_close(obtained, expected, rtol=0, atol=0)
    assert not torch.equal(decode(query, torch.tensor([1.0])), expected)


def test_a_scale_on_the_device_hides_no_dtype() -> None:
    with pytest.raises(KernelRefusal, match=r"q\.dtype"):
        decode(torch.ones(1, 2, 64, dtype=torch.bfloat16), torch.tensor([1.0]))


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        pytest.param([448.0, -224.0], [448.0, -224.0], id="greatest_is_the_limit"),
        pytest.param([896.0, 2.0], [448.0, 1.0], id="scaled"),
        pytest.param([0.0, 0.0], [448.0, 448.0], id="zeros_as_fmin_leaves_them"),
    ],
)
def test_a_dynamic_scale_follows_from_the_greatest(x: list[float], expected: list[float]) -> None:
    given, made, scale = torch.tensor(x), torch.empty(2, dtype=FP8), torch.empty(1)
    sgl_per_tensor_quant_fp8(given, made, scale, False)
    assert scale.item() == max(map(abs, x)) / 448
    assert made.float().tolist() == expected
    assert torch.equal(made.float() * scale, given)


@pytest.mark.parametrize("is_neox", [True, False])
def test_the_fused_rotation_turns_pairs_and_casts(is_neox: bool) -> None:
    angle = torch.tensor([[0.5, 2.0], [1.25, -0.75]])
    cache = torch.cat((angle.cos(), angle.sin()), -1)
    q_rope, k_rope = torch.randn(3, 2, 4), torch.randn(3, 4)
    q_nope, k_nope = torch.randn(3, 2, 6), torch.full((3, 6), 1000.0)
    positions = torch.tensor([1, 0, 1])
    q, k = torch.empty(3, 2, 10, dtype=FP8), torch.empty(3, 10, dtype=FP8)
    mla_rope_quantize_fp8(
        q_rope,
        k_rope,
        q_nope,
        k_nope,
        cache,
        positions,
        is_neox,
        q_rope_out=q[..., 6:],
        k_rope_out=k[..., 6:],
        q_nope_out=q[..., :6],
        k_nope_out=k[..., :6],
    )
    pairs = [(0, 2), (1, 3)] if is_neox else [(0, 1), (2, 3)]
    for token, at in enumerate(positions):
        for frequency, (first, second) in enumerate(pairs):
            turn = torch.polar(torch.tensor(1.0), angle[at, frequency])
            turned = torch.complex(k_rope[token, first], k_rope[token, second]) * turn
            expected = torch.stack((turned.real, turned.imag)).to(FP8)
            assert torch.equal(k[token, [6 + first, 6 + second]].float(), expected.float())
    assert torch.equal(q[..., :6].float(), q_nope.to(FP8).float())
    assert k[:, :6].float().unique().tolist() == [448.0]
    still = rotated(q_rope, *no_rotation(2, 4)[positions].chunk(2, -1), is_neox)
    assert torch.equal(still, q_rope)


def test_positions_of_another_batch_are_refused() -> None:
    with pytest.raises(KernelRefusal, match=r"pos_ids = \[2\] is not accepted; accepted: \[3\]"):
        mla_rope_quantize_fp8(
            *(torch.zeros(3, 2, 4), torch.zeros(3, 4), torch.zeros(3, 2, 6), torch.zeros(3, 6)),
            torch.zeros(8, 4),
            torch.tensor([0, 1]),
        )


def xqa_decode(workspace: torch.Tensor) -> torch.Tensor:
    """One request of two keys on XQA."""
    cache = torch.ones(2, 1, 16, 64, dtype=torch.bfloat16)
    with served_by(TorchPaged(CAPABILITIES[Family.MHA, "xqa"])):
        return trtllm_batch_decode_with_kv_cache(
            torch.ones(1, 2, 64, dtype=torch.bfloat16),
            (cache, cache),
            workspace,
            torch.tensor([[1]], dtype=torch.int32),
            torch.tensor([2], dtype=torch.int32),
            16,
        )


def test_xqa_refuses_a_workspace_whose_semaphores_another_kernel_overwrote() -> None:
    workspace = torch.zeros((8 << 20) + 64, dtype=torch.uint8)
    workspace[8 << 20 :] = 7
    assert torch.equal(xqa_decode(workspace), torch.ones(1, 2, 64, dtype=torch.bfloat16))
    workspace[(8 << 20) - 1] = 1
    with pytest.raises(KernelRefusal, match=r"workspace_buffer = '1 words left by another kernel'"):
        xqa_decode(workspace)


# Two requests of 3 and 5 keys, of which the last 2 and the last one are new.
PREFILL = {
    "seq_lens": torch.tensor([3, 5], dtype=torch.int32),
    "max_q_len": 2,
    "max_kv_len": 5,
    "bmm1_scale": 0.25,
    "bmm2_scale": 1.0,
    "batch_size": 2,
    "cum_seq_lens_q": torch.tensor([0, 2, 3], dtype=torch.int32),
    "cum_seq_lens_kv": torch.tensor([0, 3, 8], dtype=torch.int32),
}
SINKS = torch.tensor([1.0, -2.0])


def prefilled(
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]:
    """Query, caches [pages, 1, 16, 64] and the oracle's answer; requests are on pages 2 and 1."""
    drawn = torch.randn(3 + 2 * 3 * 16, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    query, caches = torch.stack((drawn[:3], drawn[3:6]), 1), drawn[3:].view(2, 3, 1, 16, 64)
    parts = [
        attend(
            query[rows],
            *(cache[page, 0, :total, None] for cache in caches),
            prefix_len=prefix,
            scale=0.25,
            sinks=sinks,
        )
        for rows, page, prefix, total in ((slice(2), 2, 1, 3), (slice(2, 3), 1, 4, 5))
    ]
    return query, tuple(caches), torch.cat(parts)


def close(
    obtained: torch.Tensor,
    expected: torch.Tensor,
    said: str = "a prefill is causal over the request's own pages, with the sinks that it is given",
) -> None:
    torch.testing.assert_close(
        obtained.double(), expected, rtol=0.01, atol=0.01, msg=lambda found: f"{said}\n{found}"
    )


def test_a_prefill_sees_each_requests_keys_up_to_its_own() -> None:
    query, caches, expected = prefilled(None)
    tables = torch.tensor([[2], [1]], dtype=torch.int32)
    with served_by(TorchPaged(CAPABILITIES[Family.MHA, "trtllm_gen"])):
        out = trtllm_batch_context_with_kv_cache(query, caches, torch.empty(0), tables, **PREFILL)
    close(out, expected)


@pytest.mark.parametrize(
    ("entry", "changes", "named"),
    [
        (trtllm_batch_context_with_kv_cache, {"batch_size": 1}, "batch_size = 1 .* 2"),
        (trtllm_batch_context_with_kv_cache, {"causal": False}, "causal = False"),
        (trtllm_fmha_v2_prefill, {"mask_mode": "padding"}, "mask_mode = 'padding' .* causal"),
    ],
    ids=["batch_size", "causal", "mask_mode"],
)
def test_a_prefill_refuses_another_batch_and_another_mask(
    entry: Callable[..., torch.Tensor], changes: dict[str, object], named: str
) -> None:
    query, caches, _ = prefilled(None)
    tables = torch.tensor([[2], [1]], dtype=torch.int32)
    given = (
        (query, caches)
        if entry is trtllm_batch_context_with_kv_cache
        else ((query, caches), "Q_PAGED_KV_HND")
    )
    arguments = PREFILL | {"workspace_buffer": torch.zeros(1 << 12), "block_tables": tables}
    with (
        served_by(TorchPaged(CAPABILITIES[Family.MHA, "trtllm_gen"])),
        pytest.raises(KernelRefusal, match=named),
    ):
        entry(*given, **arguments | changes)


def test_a_prefill_on_sm90_has_sinks_and_leaves_its_workspace_dirty() -> None:
    query, caches, expected = prefilled(SINKS)
    tables = torch.tensor([[[2], [2]], [[1], [1]]], dtype=torch.int32)
    workspace = torch.zeros((8 << 20) + 64, dtype=torch.uint8)
    with served_by(TorchPaged(CAPABILITIES[Family.MHA, "xqa"])):
        out = trtllm_fmha_v2_prefill(
            (query, caches),
            "Q_PAGED_KV_HND",
            workspace,
            block_tables=tables,
            sinks=SINKS,
            **PREFILL,
        )
    close(out, expected, "the softmax of a prefill on SM90 includes the sinks that it is given")
    with pytest.raises(KernelRefusal, match="left by another kernel"):
        xqa_decode(workspace)


def test_a_prefill_on_sm90_takes_both_caches_in_one_tensor_layer_after_layer() -> None:
    query, (keys, values), expected = prefilled(None)
    both = torch.stack((keys, values), 1).transpose(2, 3)  # [pages, 2, page_size, heads, dim]
    tables = torch.tensor([[2], [1]], dtype=torch.int32)
    workspace = torch.zeros((8 << 20) + 64, dtype=torch.uint8)
    with served_by(TorchPaged(CAPABILITIES[Family.MHA, "xqa"])):
        for _ in range(2):  # the kernel that serves a layer serves the next one
            try:
                out = trtllm_fmha_v2_prefill(
                    (query, both), "Q_PAGED_KV_NHD", workspace, block_tables=tables, **PREFILL
                )
            except KernelRefusal as refusal:
                pytest.fail(f"every layer of a forward is served, after a prefill, too: {refusal}")
            close(out, expected, "of [pages, 2, page_size, heads, dim] keys are 0 and values are 1")


@pytest.mark.parametrize("has_heads", [True, False])
def test_a_latent_cache_is_read_with_or_without_its_head(has_heads: bool) -> None:
    pages, size, rank, rope = 3, 32, 512, 64
    drawn = torch.randn(pages, size, rank + rope, generator=torch.Generator().manual_seed(4))
    latent = drawn.bfloat16()
    with served_by(TorchPaged(CAPABILITIES[Family.MLA, "trtllm_gen"])):
        try:
            out = trtllm_batch_decode_with_kv_cache_mla(
                torch.zeros(1, 1, 2, rank + rope, dtype=torch.bfloat16),
                latent[:, None] if has_heads else latent,
                torch.empty(0),
                128,
                rank,
                rope,
                torch.tensor([[2, 1, 0, 0]], dtype=torch.int32),
                torch.tensor([40], dtype=torch.int32),
                40,
                bmm2_scale=0.5,
            )
        except KernelRefusal as refusal:
            pytest.fail(f"page_size is a latent's last axis but one, head axis or not: {refusal}")
    # A query of zeros weighs its 40 keys alike: all of page 2 and the first 8 of page 1.
    seen = torch.cat((latent[2], latent[1, :8]))[:, :rank].double().mean(0)
    told = f"a result is [1, 1, 2, kv_lora_rank] in bfloat16, not {list(out.shape)} in {out.dtype}"
    assert (out.shape, out.dtype) == ((1, 1, 2, rank), torch.bfloat16), told
    told = "a value is the first kv_lora_rank columns of the latent, with or without a head axis"
    close(out, 0.5 * seen.expand(1, 1, 2, rank), f"{told}, times bmm2_scale")


def test_a_fused_cast_scales_keys_and_values_and_not_the_query() -> None:
    cache = torch.zeros(2, 3, 1, 2, dtype=FP8)
    rows = torch.tensor([[[1.0, 3.0]]])
    query = fused_fp8_qkv_kv_cache(
        rows, rows, rows, *cache, torch.tensor([2]), torch.tensor(0.5), torch.tensor(0.25)
    )
    assert query is not None
    assert query.float().tolist() == [[1.0, 3.0]], "the query is cast as it is"
    assert cache[:, 2, 0].float().tolist() == [[2.0, 6.0], [4.0, 12.0]]
    assert not cache[:, :2].float().any()
