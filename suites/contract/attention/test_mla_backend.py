"""Every phase of the MLA backend attends to its requests' latents, and never asks the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fixtures.toys.toy_attention import CONTEXT, DRAFTS, RANK, ROWS, mla_layer, mla_pool, slots
from fixtures.toys.toy_scenes import TOTALS, MLAScene, phase_id, toy_sized
from harness.attention.baselines import HostLengthsMLABackend
from harness.attention.trtllm_mla import TRTLLMMLABackend
from harness.core.capability import REFERENCE, TRTLLM_GEN_MLA
from harness.errors import CapacityError, ContractError
from harness.upstream.forward_batch_info import ForwardMode
from harness.upstream.memory_pool import quantize

VERIFY, V1, V2 = ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2
# mode, query tokens a request, kernel; [1, 3], [2, 2] and [3, 1] have one sum
PHASES = (
    (ForwardMode.EXTEND, (2, 8), "mla_context"),
    (ForwardMode.DECODE, (1, 1), "mla_decode"),
    (VERIFY, (3, 3), "mla_decode"),
    (V1, (1, 3), "mla_decode"),
    (V1, (2, 2), "mla_decode"),
    (V1, (3, 1), "mla_decode"),
    (V2, (3, 3), "mla_decode"),
)


@pytest.mark.parametrize(("mode", "q_lens", "kernel"), PHASES, ids=phase_id)
@pytest.mark.parametrize("kind", [TRTLLMMLABackend, HostLengthsMLABackend])
def test_every_phase_equals_dense_and_pads_with_zeros(
    kind: Any, mode: ForwardMode, q_lens: tuple[int, int], kernel: str
) -> None:
    scene, tokens = MLAScene(kind, capability=toy_sized(TRTLLM_GEN_MLA)), sum(q_lens)
    batch, inputs = scene.batch(mode, q_lens), scene.inputs(tokens + 2)
    for part in inputs.values():
        part[tokens:] = torch.nan
    # DP padding may raise batch_size before planning; rows still count by seq_lens.
    scene.backend.init_forward_metadata(batch.with_changes(batch_size=4))
    padding = torch.zeros(2, dtype=torch.int64)
    slots_and_padding = torch.cat((batch.out_cache_loc, padding))
    padded = batch.with_changes(batch_size=4, out_cache_loc=slots_and_padding)
    obtained = scene.forward(padded, inputs, scene.layer)
    written = torch.cat((inputs["k"], inputs["k_rope"]), -1)[:tokens, 0]
    assert torch.equal(scene.pool.kv_buffer[0][batch.out_cache_loc], written)
    assert scene.pool.kv_buffer[0].isfinite().all()
    torch.testing.assert_close(obtained[:tokens], scene.expected(inputs, q_lens))
    assert torch.equal(obtained[tokens:], torch.zeros(2, 4 * RANK))
    assert scene.kernel.calls == [kernel]


@pytest.mark.parametrize(("mode", "q_lens", "kernel"), PHASES[1:], ids=phase_id)
def test_host_mirrors_are_not_looked_at(
    mode: ForwardMode, q_lens: tuple[int, int], kernel: str
) -> None:
    scene = MLAScene()
    batch, inputs = scene.batch(mode, q_lens), scene.inputs(sum(q_lens))
    plain = scene.run(batch, inputs, scene.layer)
    lying = batch.with_changes(seq_lens_cpu=torch.tensor([10**6, 10**6]), seq_lens_sum=10**7)
    assert torch.equal(scene.run(lying, inputs, scene.layer), plain)


def test_who_needs_lengths_on_the_host() -> None:
    assert TRTLLMMLABackend.needs_cpu_seq_lens is False
    assert HostLengthsMLABackend.needs_cpu_seq_lens is True


def test_nan_behind_a_padded_request_stays_there() -> None:
    scene = MLAScene()
    batch, inputs = scene.batch(V1, (1, 3)), scene.inputs(4)
    owned = torch.cat([slots(row, 0, n) for row, n in zip(ROWS, TOTALS, strict=True)])
    poison = torch.full_like(scene.pool.kv_buffer[0], torch.nan)
    poison[owned] = scene.pool.kv_buffer[0][owned]
    scene.pool.kv_buffer[0].copy_(poison)
    obtained = scene.run(batch, inputs, scene.layer)
    torch.testing.assert_close(obtained, scene.expected(inputs, (1, 3)))


@pytest.mark.parametrize("capability", [REFERENCE, TRTLLM_GEN_MLA], ids=lambda c: c.name)
def test_fp8_latents_carry_the_keys_scale(capability: Any) -> None:
    fp8 = torch.float8_e4m3fn
    scene = MLAScene(pool=mla_pool(fp8), capability=toy_sized(capability))
    batch, inputs = scene.batch(VERIFY, (3, 3)), scene.inputs(6)
    obtained = scene.run(batch, inputs, mla_layer(k_scale=0.5, v_scale=7.0))
    written = scene.pool.kv_buffer[0][batch.out_cache_loc, :RANK]
    assert torch.equal(written.float(), quantize(inputs["k"][:, 0], 0.5, fp8).float())
    scene.pool.kv_buffer = [scene.pool.kv_buffer[0].float() * 0.5]
    if capability.casts_query_to_kv_dtype:
        inputs = {name: part.to(fp8).float() for name, part in inputs.items()}
    torch.testing.assert_close(obtained, scene.expected(inputs, (3, 3)))


def test_the_mask_is_allocated_with_the_graphs() -> None:
    backend = MLAScene().backend
    with pytest.raises(ContractError, match="call init_cuda_graph_state first"):
        backend.get_verify_buffers_to_fill_after_draft()
    assert backend.cuda_graph_custom_mask is None
    backend.init_cuda_graph_state(4, 12)
    mask, positions = backend.get_verify_buffers_to_fill_after_draft()
    assert positions is None
    assert mask is backend.cuda_graph_custom_mask
    assert (mask.dtype, mask.shape) == (torch.bool, (12 * (CONTEXT + DRAFTS),))
    # A second runner that fits leaves the buffer where the first one's graphs read it.
    backend.init_cuda_graph_state(2, 6)
    assert backend.get_verify_buffers_to_fill_after_draft()[0] is mask
    backend.init_cuda_graph_state(8, 24)
    assert backend.cuda_graph_custom_mask.numel() == 24 * (CONTEXT + DRAFTS)


@pytest.mark.parametrize("changes", [{"num_draft_tokens": 0}, {"skip_prefill": True}], ids=str)
def test_no_mask_where_nothing_is_verified(changes: dict[str, Any]) -> None:
    backend = MLAScene(**changes).backend
    backend.init_cuda_graph_state(4, 12)
    assert list(backend.get_verify_buffers_to_fill_after_draft()) == [None, None]


@pytest.mark.parametrize("name", ["q_rope", "k_rope"])
def test_a_missing_rotary_part_is_named(name: str) -> None:
    scene = MLAScene()
    batch, inputs = scene.batch(VERIFY, (3, 3)), scene.inputs(6)
    del inputs[name]
    with pytest.raises(ContractError, match=f"{name} = None"):
        scene.run(batch, inputs, scene.layer)


@pytest.mark.parametrize(
    "changes",
    [{"seq_lens_cpu": torch.tensor([26, 8])}, {"seq_lens": torch.tensor([9, 26])}],
    ids=["mirror", "device"],
)
def test_the_host_lengths_peer_reads_lengths_and_refuses_long_ones(changes: Any) -> None:
    scene = MLAScene(HostLengthsMLABackend)
    batch = scene.batch(VERIFY, (3, 3)).with_changes(**changes)
    with pytest.raises(CapacityError, match=r"26.* <= 25 each"):
        scene.backend.init_forward_metadata(batch)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"sliding_window_size": 0}, r"sliding_window_size = 0"),
        ({"sliding_window_size": 5}, r"sliding_window_size = 5"),
        ({"sinks": torch.zeros(4)}, r"sinks = 'a tensor' .* None"),
    ],
    ids=["window_of_one", "window", "sinks"],
)
def test_a_layer_with_a_window_or_sinks_is_refused(changes: dict[str, Any], text: str) -> None:
    scene = MLAScene()
    batch, inputs = scene.batch(VERIFY, (3, 3)), scene.inputs(6)
    with pytest.raises(ContractError, match=text):
        scene.run(batch, inputs, mla_layer(**changes))
