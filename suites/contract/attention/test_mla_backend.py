"""MLA alone: padded queries, the latent's scale, the verify mask, layers that it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fixtures.toys.toy_attention import CONTEXT, DRAFTS, RANK, ROWS, mla_layer, mla_pool, slots
from fixtures.toys.toy_scenes import TOTALS, MLAScene, toy_sized
from harness.attention.baselines import HostLengthsMLABackend
from harness.core.capability import REFERENCE, TRTLLM_GEN_MLA
from harness.errors import CapacityError, ContractError
from harness.upstream.forward_batch_info import ForwardMode
from harness.upstream.memory_pool import quantize
from harness.upstream.verify_mask import TreeMaskMode

VERIFY, V1, V2 = ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2


def test_nan_after_a_padded_request_stays_there() -> None:
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
    stored = torch.equal(written.float(), quantize(inputs["k"][:, 0], 0.5, fp8).float())
    assert stored, "an FP8 cache holds latents divided by k_scale"
    scene.pool.kv_buffer = [scene.pool.kv_buffer[0].float() * 0.5]
    if capability.casts_query_to_kv_dtype:
        inputs = {name: part.to(fp8).float() for name, part in inputs.items()}
    rule = "cached FP8 latents are read times k_scale, as keys and as values"
    expected = scene.expected(inputs, (3, 3))
    torch.testing.assert_close(obtained, expected, msg=lambda found: f"{rule}: {found}")


def test_the_mask_is_allocated_with_the_graphs() -> None:
    backend = MLAScene().backend
    assert backend.verify_mask is None, "no verify_mask before init_cuda_graph_state"
    backend.init_cuda_graph_state(4, 12)
    mask = backend.verify_mask
    assert mask is not None, "init_cuda_graph_state allocates verify_mask, not None"
    own = mask.buffer is backend.cuda_graph_custom_mask
    assert own, "verify_mask.buffer is cuda_graph_custom_mask"
    dtype, size = mask.buffer.dtype, mask.buffer.shape
    assert dtype == torch.bool, f"verify_mask.buffer is bool, not {dtype}"
    rule = "verify_mask.buffer has max_num_tokens * (max_context_len + num_draft_tokens) elements"
    assert size == (12 * (CONTEXT + DRAFTS),), f"{rule}, 12 * ({CONTEXT} + {DRAFTS}), not {size}"
    assert mask.max_bs == 4, "max_bs of the verify mask counts requests, not their draft tokens"
    assert mask.mode is TreeMaskMode.FULL_MASK, f"verify_mask.mode is FULL_MASK, not {mask.mode}"
    # A second runner that fits leaves the buffer where the first one's graphs read it.
    backend.init_cuda_graph_state(2, 6)
    kept = "init_cuda_graph_state of a smaller runner keeps verify_mask, which graphs read"
    assert vars(backend.verify_mask) == vars(mask), kept
    assert backend.verify_mask.buffer is mask.buffer, kept
    backend.init_cuda_graph_state(8, 24)
    numel, max_bs = backend.verify_mask.buffer.numel(), backend.verify_mask.max_bs
    rule = "verify_mask.buffer grows with a larger runner"
    assert numel == 24 * (CONTEXT + DRAFTS), f"{rule} to 24 * ({CONTEXT} + {DRAFTS}), not {numel}"
    assert max_bs == 8, f"max_bs of verify_mask grows with a larger runner to 8, not {max_bs}"


def test_a_mask_of_other_query_rows_holds_whole_verifies_alone() -> None:
    """A runner of 8 requests decodes one token each; a verify of 3 draft tokens has 3 rows."""
    backend = MLAScene().backend
    backend.init_cuda_graph_state(8, 8)
    mask = backend.verify_mask
    assert mask is not None
    told = f"8 rows of the mask are 2 verifies of {DRAFTS} rows and no third, not {mask.max_bs}"
    assert (DRAFTS, mask.max_bs, mask.fits(3)) == (3, 2, False), told


@pytest.mark.parametrize("changes", [{"num_draft_tokens": 0}, {"skip_prefill": True}], ids=str)
def test_no_mask_where_nothing_is_verified(changes: dict[str, Any]) -> None:
    backend = MLAScene(**changes).backend
    backend.init_cuda_graph_state(4, 12)
    assert backend.verify_mask is None


@pytest.mark.parametrize("name", ["q_rope", "k_rope"])
def test_a_missing_rotary_part_is_named(name: str) -> None:
    scene = MLAScene()
    batch, inputs = scene.batch(VERIFY, (3, 3)), scene.inputs(6)
    del inputs[name]
    with pytest.raises(ContractError, match=f"{name} = None"):
        scene.run(batch, inputs, scene.layer)


@pytest.mark.parametrize("mirror", [None, [26, 8], [9, 30]], ids=["device", "host", "bound"])
def test_the_host_lengths_baseline_reads_lengths_and_refuses_long_ones(mirror: Any) -> None:
    scene = MLAScene(HostLengthsMLABackend)
    host = None if mirror is None else torch.tensor(mirror)
    batch = scene.batch(VERIFY, (3, 3)).with_changes(seq_lens_cpu=host)
    with pytest.raises(CapacityError, match=r"\[26, 8\].* <= 25 each"):
        scene.backend.init_forward_metadata(batch.with_changes(seq_lens=torch.tensor([26, 8])))
    scene.backend.init_forward_metadata(batch.with_changes(seq_lens=torch.tensor([25, 8])))


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
    before = scene.pool.kv_buffer[0].clone()
    with pytest.raises(ContractError, match=text):
        scene.run(batch, inputs, mla_layer(**changes))
    untouched = torch.equal(scene.pool.kv_buffer[0], before)
    assert untouched, "a layer is refused before its latents are written to the MLA cache"
