"""Each layer of a planned forward has its own numbers, whatever layers ran before it."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch

from fixtures.toys.toy_attention import mha_layer, mha_pool, mla_layer, mla_pool
from fixtures.toys.toy_scenes import MHAScene, MLAScene, Scene, phase_id
from harness.attention.baselines import ContextKernelMHABackend
from harness.attention.trtllm_mha import TRTLLMHAAttnBackend
from harness.upstream.forward_batch_info import ForwardMode
from harness.upstream.radix_attention import RadixAttention

FP8 = torch.float8_e4m3fn
PHASES = (
    (ForwardMode.EXTEND, (2, 8)),
    (ForwardMode.DECODE, (1, 1)),
    (ForwardMode.TARGET_VERIFY, (3, 3)),
    (ForwardMode.DRAFT_EXTEND, (1, 3)),
    (ForwardMode.DRAFT_EXTEND_V2, (3, 3)),
)
MHA_LAYERS = (
    mha_layer(k_scale=0.5, v_scale=2.0),
    mha_layer(k_scale=0.25, v_scale=0.5),
    mha_layer(k_scale=0.5, v_scale=2.0, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    mha_layer(k_scale=0.5, v_scale=2.0, sliding_window_size=3),
    replace(mha_layer(k_scale=0.5, v_scale=2.0), scaling=0.7),
)
MLA_LAYERS = (
    mla_layer(k_scale=0.5),
    mla_layer(k_scale=0.125),
    replace(mla_layer(k_scale=0.5), scaling=0.7),
)


def mha_scene(kind: Any = TRTLLMHAAttnBackend) -> MHAScene:
    torch.manual_seed(11)
    return MHAScene(kind, pool=mha_pool(dtype=FP8))


def mla_scene() -> MLAScene:
    torch.manual_seed(11)
    return MLAScene(pool=mla_pool(FP8))


def unlike(layer: RadixAttention, other: RadixAttention) -> str:
    """Names of the numbers that two layers do not share."""
    names = (field.name for field in fields(layer))
    return ", ".join(n for n in names if str(getattr(layer, n)) != str(getattr(other, n)))


SCENES = {
    "mha": (mha_scene, MHA_LAYERS),
    "mha, baseline": (partial(mha_scene, ContextKernelMHABackend), MHA_LAYERS),
    "mla": (mla_scene, MLA_LAYERS),
}


@pytest.mark.parametrize(("mode", "q_lens"), PHASES, ids=phase_id)
@pytest.mark.parametrize("name", SCENES)
def test_layers_change_nothing_for_each_other(
    name: str, mode: ForwardMode, q_lens: tuple[int, int]
) -> None:
    make, layers = SCENES[name]

    def alone(layer: RadixAttention) -> torch.Tensor:
        scene: Scene = make()
        batch, inputs = scene.batch(mode, q_lens), scene.inputs(sum(q_lens))
        return scene.run(batch, inputs, layer)

    expected = [alone(layer) for layer in layers]
    same = [i for i, one in enumerate(expected[1:], 1) if torch.equal(one, expected[0])]
    unused = [unlike(layers[0], layers[i]) for i in same]
    assert not same, f"the output depends on every number of a layer, also on {unused}"
    scene: Scene = make()
    batch, inputs = scene.batch(mode, q_lens), scene.inputs(sum(q_lens))
    scene.backend.init_forward_metadata(batch)
    before = layers[0]
    for layer, due in zip((*layers, layers[0]), (*expected, expected[0]), strict=True):
        own = unlike(layer, before) or "the numbers"
        told = f"{own} of a layer are its own, not those of the one before it"
        before = layer
        obtained = scene.forward(batch, inputs, layer)
        torch.testing.assert_close(
            obtained, due, rtol=0, atol=0, msg=lambda found, told=told: f"{told}: {found}"
        )
