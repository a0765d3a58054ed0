"""MHA alone: sinks, sliding windows, FP8 scales, packed masks, and its two baselines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fixtures.toys.toy_attention import ROWS, dense, mha_layer, mha_pool, slots, swa_pool
from fixtures.toys.toy_planning import batch_for, toy_backend
from fixtures.toys.toy_scenes import TOTALS, MHAScene, phase_id, toy_sized
from harness.attention.baselines import ContextKernelMHABackend, VerifyFixUpMHABackend
from harness.attention.trtllm_mha import TRTLLMHAAttnBackend
from harness.core.capability import REFERENCE, TRTLLM_GEN_MHA, XQA
from harness.errors import ContractError
from harness.upstream.forward_batch_info import ForwardMode
from harness.upstream.memory_pool import SWAKVPool, quantize

VERIFY, V1, V2 = ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2
# mode, query tokens per request
PHASES = (
    (ForwardMode.EXTEND, (2, 8)),
    (ForwardMode.DECODE, (1, 1)),
    (VERIFY, (3, 3)),
    (V1, (1, 3)),
    (V2, (3, 3)),
)
every_phase = pytest.mark.parametrize(("mode", "q_lens"), PHASES, ids=phase_id)


@every_phase
def test_a_strided_slice_of_a_fused_projection(mode: ForwardMode, q_lens: tuple[int, int]) -> None:
    scene, fused = MHAScene(), torch.randn(sum(q_lens), 8, 8)
    inputs = {"q": fused[:, :4], "k": fused[:, 4:6], "v": fused[:, 6:]}
    obtained = scene.run(scene.batch(mode, q_lens), inputs, scene.layer)
    torch.testing.assert_close(obtained, scene.expected(inputs, q_lens))


@every_phase
def test_a_model_may_hand_over_flat_keys_and_values(
    mode: ForwardMode, q_lens: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, handed = MHAScene(), list[torch.Tensor]()
    inputs = scene.inputs(sum(q_lens))
    flat = inputs | {name: inputs[name].flatten(1) for name in ("k", "v")}
    monkeypatch.setattr(scene.pool, "set_kv_buffer", lambda _, loc, *kv: handed.extend(kv))
    scene.run(scene.batch(mode, q_lens), flat, scene.layer)
    shapes = [inputs[name].shape for name in ("k", "v")]
    told = "keys of [tokens, heads * head_dim] are stored as [tokens, heads, head_dim]"
    assert [one.shape for one in handed] == shapes, told


@every_phase
def test_sinks_take_their_share_of_every_row(mode: ForwardMode, q_lens: tuple[int, int]) -> None:
    scene = MHAScene()
    batch, inputs = scene.batch(mode, q_lens), scene.inputs(sum(q_lens))
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    obtained = scene.run(batch, inputs, mha_layer(sinks=sinks))
    torch.testing.assert_close(obtained, scene.expected(inputs, q_lens, sinks=sinks))


@pytest.mark.parametrize("mode", [VERIFY, V2, V1, ForwardMode.DECODE], ids=phase_id)
def test_swa_layers_read_and_write_the_swa_pool(mode: ForwardMode) -> None:
    scene = MHAScene(pool=swa_pool())
    q_lens = (1, 1) if mode.is_decode() else (3, 3)
    batch, inputs = scene.batch(mode, q_lens), scene.inputs(sum(q_lens))
    mapping = scene.pool.full_to_swa_index_mapping.clone()
    scene.backend.init_forward_metadata(batch)
    # The scheduler may give the SWA slots away as soon as the plan has read the mapping.
    scene.pool.full_to_swa_index_mapping.fill_(40)
    full_before = scene.pool.full_pool.k_buffer[0].clone()
    obtained = scene.forward(batch, inputs, mha_layer(1, sliding_window_size=5))
    swa, out = scene.pool.swa_pool, []
    written = torch.equal(swa.k_buffer[0][mapping[batch.out_cache_loc]], inputs["k"])
    assert written, "keys of SWA layers go where full_to_swa_index_mapping said at planning"
    assert torch.equal(scene.pool.full_pool.k_buffer[0], full_before)
    for row, n, part in zip(ROWS, TOTALS, inputs["q"].split(q_lens), strict=True):
        at = mapping[slots(row, 0, n)]
        out.append(dense(part, swa.k_buffer[0][at], swa.v_buffer[0][at], 0.4, window_left=5))
    torch.testing.assert_close(obtained, torch.cat(out).flatten(1).float())
    # The full layer of the same forward stays in its own pool.
    obtained = scene.forward(batch, inputs, mha_layer(0))
    scene.pool = scene.pool.full_pool
    torch.testing.assert_close(obtained, scene.expected(inputs, q_lens))


@pytest.mark.parametrize(("layer_id", "window"), [(1, 5), (1, -1), (0, 5), (1, 0)], ids=str)
@every_phase
def test_the_pool_of_a_layer_follows_from_its_id_and_not_from_its_window(
    mode: ForwardMode, q_lens: tuple[int, int], layer_id: int, window: int
) -> None:
    scene = MHAScene(pool=swa_pool())
    batch, inputs = scene.batch(mode, q_lens), scene.inputs(sum(q_lens))
    obtained = scene.run(batch, inputs, mha_layer(layer_id, sliding_window_size=window))
    pool, mapping = scene.pool.full_pool, torch.arange(len(scene.pool.full_to_swa_index_mapping))
    if layer_id == 1:
        pool, mapping = scene.pool.swa_pool, scene.pool.full_to_swa_index_mapping
    written = torch.equal(pool.k_buffer[0][mapping[batch.out_cache_loc]], inputs["k"])
    assert written, "a layer writes to the pool of its id, full or SWA, whatever its window is"
    out = []
    for row, n, part in zip(ROWS, TOTALS, inputs["q"].split(q_lens), strict=True):
        at = mapping[slots(row, 0, n)]
        out.append(dense(part, pool.k_buffer[0][at], pool.v_buffer[0][at], 0.4, window))
    rule = "a query sees the sliding_window_size keys before its own, or all where that is -1"
    expected = torch.cat(out).flatten(1).float()
    torch.testing.assert_close(obtained, expected, msg=lambda found: f"{rule}: {found}")


def test_values_may_be_narrower_than_keys() -> None:
    scene, layer = MHAScene(pool=mha_pool(v_head_dim=4)), replace(mha_layer(), v_head_dim=4)
    batch, inputs = scene.batch(VERIFY, (3, 3)), scene.inputs(6)
    inputs["v"] = inputs["v"][..., :4]
    obtained = scene.run(batch, inputs, layer)
    torch.testing.assert_close(obtained, scene.expected(inputs, (3, 3)))


@pytest.mark.parametrize("capability", [REFERENCE, TRTLLM_GEN_MHA], ids=lambda c: c.name)
def test_fp8_cache_with_scales(capability: Any) -> None:
    fp8 = torch.float8_e4m3fn
    scene = MHAScene(pool=mha_pool(dtype=fp8), capability=toy_sized(capability))
    batch, inputs = scene.batch(VERIFY, (3, 3)), scene.inputs(6)
    obtained = scene.run(batch, inputs, mha_layer(k_scale=0.5, v_scale=2.0))
    written = scene.pool.v_buffer[0][batch.out_cache_loc]
    stored = torch.equal(written.float(), quantize(inputs["v"], 2.0, fp8).float())
    assert stored, "an FP8 cache holds values divided by v_scale"
    scene.pool.k_buffer = [scene.pool.k_buffer[0].float() * 0.5]
    scene.pool.v_buffer = [scene.pool.v_buffer[0].float() * 2.0]
    if capability.casts_query_to_kv_dtype:
        inputs["q"] = inputs["q"].to(fp8).float()
    rule = "cached FP8 keys are read times k_scale, and values times v_scale"
    expected = scene.expected(inputs, (3, 3))
    torch.testing.assert_close(obtained, expected, msg=lambda found: f"{rule}: {found}")


def test_scales_of_an_unscaled_cache_are_not_applied() -> None:
    scene = MHAScene()
    batch, inputs = scene.batch(VERIFY, (3, 3)), scene.inputs(6)
    obtained = scene.run(batch, inputs, mha_layer(k_scale=0.5, v_scale=2.0))
    torch.testing.assert_close(obtained, scene.expected(inputs, (3, 3)))


@pytest.mark.parametrize("capability", [REFERENCE, TRTLLM_GEN_MHA], ids=lambda c: c.name)
@pytest.mark.parametrize("fp8_layer", [0, 1], ids=["full", "swa"])
def test_scales_and_query_follow_the_dtype_of_the_layers_own_pool(
    fp8_layer: int, capability: Any
) -> None:
    fp8 = torch.float8_e4m3fn
    full, swa = (mha_pool(dtype=fp8 if i == fp8_layer else torch.float32) for i in range(2))
    pool = SWAKVPool(full_pool=full, swa_pool=swa, swa_layer_ids=frozenset({1}), num_layers=2)
    pool.full_to_swa_index_mapping.copy_(torch.arange(len(pool.full_to_swa_index_mapping)))
    scene = MHAScene(pool=pool, capability=toy_sized(capability))
    batch, inputs = scene.batch(VERIFY, (3, 3)), scene.inputs(6)
    scene.backend.init_forward_metadata(batch)
    rule = "keys, values and query have the scales and the dtype of the layer's own pool"
    for layer_id, part in enumerate((full, swa)):
        obtained = scene.forward(batch, inputs, mha_layer(layer_id, k_scale=0.5, v_scale=2.0))
        own = dict(inputs)
        if layer_id == fp8_layer:
            part.k_buffer = [part.k_buffer[0].float() * 0.5]
            part.v_buffer = [part.v_buffer[0].float() * 2.0]
            if capability.casts_query_to_kv_dtype:
                own["q"] = inputs["q"].to(fp8).float()
        scene.pool = part
        wanted = scene.expected(own, (3, 3))
        torch.testing.assert_close(obtained, wanted, msg=lambda found: f"{rule}: {found}")


def test_a_kernel_that_needs_a_mask_gets_one() -> None:
    scene = MHAScene(capability=toy_sized(XQA))
    for mode in (VERIFY, V2):
        batch, inputs = scene.batch(mode, (3, 3)), scene.inputs(6)
        obtained = scene.run(batch, inputs, scene.layer)
        torch.testing.assert_close(obtained, scene.expected(inputs, (3, 3)))


@pytest.mark.parametrize("mode", [VERIFY, V2], ids=phase_id)
def test_the_context_kernel_baseline_uses_the_context_kernel_and_agrees(mode: ForwardMode) -> None:
    scene = MHAScene(ContextKernelMHABackend)
    batch, inputs = scene.batch(mode, (3, 3)), scene.inputs(6)
    obtained = scene.run(batch, inputs, scene.layer)
    torch.testing.assert_close(obtained, scene.expected(inputs, (3, 3)))
    assert scene.kernel.calls == ["context"]


@pytest.mark.parametrize("kind", [TRTLLMHAAttnBackend, VerifyFixUpMHABackend])
def test_only_the_fix_up_baseline_fills_verify_metadata_again(kind: Any) -> None:
    scene = MHAScene(kind)
    batch = scene.batch(VERIFY, (3, 3))
    scene.backend.init_forward_metadata(batch)
    planned = scene.backend.forward_metadata.page_table.clone()
    scene.backend.forward_metadata.page_table.zero_()
    scene.backend.update_verify_buffers_to_fill_after_draft(batch.spec_info, None)
    refilled = scene.backend.forward_metadata.page_table
    wanted = planned if kind is VerifyFixUpMHABackend else torch.zeros_like(planned)
    assert torch.equal(refilled, wanted)


def test_a_fix_up_is_of_the_batch_that_was_planned_last() -> None:
    backend: Any = toy_backend(VerifyFixUpMHABackend)
    pair, single = (batch_for(backend, VERIFY, lens, 3 * len(lens)) for lens in ([9, 8], [5]))
    backend.init_cuda_graph_state(2, 6)
    for batch in (pair, single):
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata_out_graph(pair)
    backend.update_verify_buffers_to_fill_after_draft(pair.spec_info, 2)
    keys = backend.forward_metadata.cache_seqlens_int32.tolist()
    # Three draft tokens beyond 9 and 8 committed ones.
    assert keys == [12, 11], "a fix-up fills the batch planned last, not the one captured last"


def test_the_fix_up_baseline_needs_a_planned_verify() -> None:
    scene = MHAScene(VerifyFixUpMHABackend)
    with pytest.raises(ContractError, match=r"planned mode = None .* TARGET_VERIFY"):
        scene.backend.update_verify_buffers_to_fill_after_draft(None, None)
    scene.backend.init_forward_metadata(scene.batch(VERIFY, (3, 3)))
    scene.backend.init_forward_metadata(scene.batch(ForwardMode.DECODE, (1, 1)))
    with pytest.raises(ContractError, match=r"planned mode = 'DECODE' .* TARGET_VERIFY"):
        scene.backend.update_verify_buffers_to_fill_after_draft(None, None)
