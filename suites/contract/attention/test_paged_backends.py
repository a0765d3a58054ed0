"""Every phase of both backends writes its keys and attends to exactly its requests' tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fixtures.drivers.fp8_casts import CastsToFP8
from fixtures.toys.toy_attention import NUM_PAGES, PAGE, mha_pool, mla_pool
from fixtures.toys.toy_scenes import MHAScene, MLAScene, Scene, phase_id, toy_sized
from harness.attention.baselines import HostLengthsMLABackend
from harness.attention.trtllm_mha import TRTLLMHAAttnBackend
from harness.attention.trtllm_mla import TRTLLMMLABackend
from harness.core.capability import REFERENCE, TRTLLM_GEN_MHA, TRTLLM_GEN_MLA
from harness.kernels.shape_checks import FP8
from harness.upstream.forward_batch_info import ForwardMode

VERIFY, V1, V2 = ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2
# mode, query tokens per request, kernel of each family; [1, 3], [2, 2] and [3, 1] have one sum
PHASES = (
    (ForwardMode.EXTEND, (2, 8), "context", "mla_context"),
    (ForwardMode.DECODE, (1, 1), "decode", "mla_decode"),
    (VERIFY, (3, 3), "decode", "mla_decode"),
    (V1, (1, 3), "context", "mla_decode"),
    (V1, (2, 2), "context", "mla_decode"),
    (V1, (3, 1), "context", "mla_decode"),
    (V2, (3, 3), "decode", "mla_decode"),
)
KINDS: tuple[tuple[Any, Any, Any], ...] = (
    (MHAScene, TRTLLMHAAttnBackend, REFERENCE),
    (MLAScene, TRTLLMMLABackend, toy_sized(TRTLLM_GEN_MLA)),
    (MLAScene, HostLengthsMLABackend, toy_sized(TRTLLM_GEN_MLA)),
)


def kind_id(value: Any) -> str | None:
    return value.__name__ if isinstance(value, type) else value.name


def written(scene: Scene, loc: torch.Tensor) -> torch.Tensor:
    """Keys and values, or latents, that the pool holds at these locations."""
    if isinstance(scene, MHAScene):
        return torch.cat((scene.pool.k_buffer[0][loc], scene.pool.v_buffer[0][loc]), -1)
    held: torch.Tensor = scene.pool.kv_buffer[0][loc][:, None]
    return held


@pytest.mark.parametrize(("mode", "q_lens", "mha_entry", "mla_entry"), PHASES, ids=phase_id)
@pytest.mark.parametrize(("scene_of", "kind", "capability"), KINDS, ids=kind_id)
@pytest.mark.parametrize("padding", [0, 2])
def test_every_phase_equals_dense_and_pads_with_zeros(
    scene_of: Any,
    kind: Any,
    capability: Any,
    mode: ForwardMode,
    q_lens: tuple[int, int],
    mha_entry: str,
    mla_entry: str,
    padding: int,
) -> None:
    scene, tokens = scene_of(kind, capability=capability), sum(q_lens)
    batch, inputs = scene.batch(mode, q_lens), scene.inputs(tokens + padding)
    for part in inputs.values():
        part[tokens:] = torch.nan
    # DP padding may raise batch_size before planning; rows still count by seq_lens.
    bs = 2 + padding
    scene.backend.init_forward_metadata(batch.with_changes(batch_size=bs))
    loc = torch.cat((batch.out_cache_loc, batch.out_cache_loc.new_zeros(padding)))
    padded = batch.with_changes(batch_size=bs, out_cache_loc=loc)
    obtained = scene.forward(padded, inputs, scene.layer)
    # The keys were written before attention, at the batch's locations.
    own, other = ("k", "v") if scene_of is MHAScene else ("k", "k_rope")
    new = torch.cat((inputs[own], inputs[other]), -1)[:tokens]
    stored = torch.equal(written(scene, batch.out_cache_loc), new)
    assert stored, "a forward writes its keys, values or latents to out_cache_loc"
    finite = written(scene, torch.arange(scene.pool.num_pages * 4)).isfinite().all()
    assert finite, "keys of padding rows are written nowhere: they are NaN"
    rule = "a query attends to its own request's tokens up to itself"
    expected = scene.expected(inputs, q_lens)
    torch.testing.assert_close(obtained[:tokens], expected, msg=lambda found: f"{rule}: {found}")
    width = scene.layer.tp_q_head_num * scene.layer.v_head_dim
    zeros = torch.zeros(padding, width)
    assert torch.equal(obtained[tokens:], zeros), "rows of padding after the last query are zero"
    entry, calls = mha_entry if scene_of is MHAScene else mla_entry, scene.kernel.calls
    assert calls == [entry], f"{mode.name} runs on the {entry} kernel, once, not on {calls}"


@pytest.mark.parametrize(("mode", "q_lens"), [row[:2] for row in PHASES[1:]], ids=phase_id)
@pytest.mark.parametrize("scene_of", [MHAScene, MLAScene])
def test_seq_lens_cpu_and_its_sum_are_not_read(
    scene_of: Any, mode: ForwardMode, q_lens: tuple[int, int]
) -> None:
    scene = scene_of()
    batch, inputs = scene.batch(mode, q_lens), scene.inputs(sum(q_lens))
    plain = scene.run(batch, inputs, scene.layer)
    wrong = batch.with_changes(seq_lens_cpu=torch.tensor([10**6, 10**6]), seq_lens_sum=10**7)
    assert torch.equal(scene.run(wrong, inputs, scene.layer), plain)


def test_who_needs_lengths_on_the_host() -> None:
    needs = [kind.needs_cpu_seq_lens for _, kind, _ in KINDS]
    assert needs == [False, False, True]


@pytest.mark.parametrize("scene_of", [MHAScene, MLAScene])
def test_idle_gives_zeros(scene_of: Any) -> None:
    scene = scene_of()
    batch = scene.batch(ForwardMode.DECODE, (1, 1)).with_changes(forward_mode=ForwardMode.IDLE)
    obtained = scene.run(batch, scene.inputs(2), scene.layer)
    width = scene.layer.tp_q_head_num * scene.layer.v_head_dim
    assert torch.equal(obtained, torch.zeros(2, width))


@pytest.mark.parametrize("scene_of", [MHAScene, MLAScene])
def test_the_cache_is_kept_where_the_caller_saved_it(scene_of: Any) -> None:
    scene, every = scene_of(), torch.arange(NUM_PAGES * PAGE)
    batch, inputs = scene.batch(VERIFY, (3, 3)), scene.inputs(6)
    before = written(scene, every).clone()
    obtained = scene.run(batch, inputs | {"save_kv_cache": False}, scene.layer)
    assert torch.equal(written(scene, every), before)
    torch.testing.assert_close(obtained, scene.expected(inputs, (3, 3)))


@pytest.mark.parametrize("scene_of", [MHAScene, MLAScene])
def test_the_cache_is_written_unless_the_caller_saved_it(scene_of: Any) -> None:
    scene = scene_of()
    batch, inputs = scene.batch(VERIFY, (3, 3)), scene.inputs(6)
    scene.backend.init_forward_metadata(batch)
    scene.backend.forward_extend(layer=scene.layer, batch=batch, **inputs)
    new = torch.cat((inputs["k"], inputs["v" if scene_of is MHAScene else "k_rope"]), -1)
    assert torch.equal(written(scene, batch.out_cache_loc), new)


@pytest.mark.parametrize("value", [1e4, -1e4])
@pytest.mark.parametrize(
    ("scene_of", "pool_of", "capability"),
    [(MHAScene, mha_pool, TRTLLM_GEN_MHA), (MLAScene, mla_pool, TRTLLM_GEN_MLA)],
)
def test_no_query_beyond_fp8_is_left_to_the_cast(
    scene_of: Any, pool_of: Any, capability: Any, value: float
) -> None:
    scene = scene_of(pool=pool_of(dtype=FP8), capability=toy_sized(capability))
    batch, inputs = scene.batch(VERIFY, (3, 3)), scene.inputs(6)
    inputs["q"].flatten()[5:6].fill_(value)
    casts = CastsToFP8()
    with casts:
        scene.run(batch, inputs, scene.layer)
    assert casts.largest == torch.finfo(FP8).max


@pytest.mark.parametrize("scene_of", [MHAScene, MLAScene])
def test_heads_may_be_handed_over_flat(scene_of: Any) -> None:
    scene = scene_of()
    batch, inputs = scene.batch(VERIFY, (3, 3)), scene.inputs(6)
    flat = {name: part.flatten(1) for name, part in inputs.items()}
    try:
        obtained = scene.run(batch, flat, scene.layer)
    except RuntimeError as error:
        pytest.fail(f"{', '.join(flat)} may each be [tokens, heads * dim]: {error}")
    torch.testing.assert_close(obtained, scene.expected(inputs, (3, 3)))
