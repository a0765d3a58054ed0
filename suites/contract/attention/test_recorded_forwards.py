"""A recorded forward follows lengths, pages and accept counts that change under it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from fixtures.toys.toy_scenes import MHAScene, MLAScene, phase_id
from fixtures.toys.toy_trio import Trio
from harness.attention.baselines import (
    ContextKernelMHABackend,
    HostLengthsMLABackend,
    VerifyFixUpMHABackend,
)
from harness.attention.round_plan import DRAFT, EXTEND, VERIFY
from harness.attention.trtllm_mha import TRTLLMHAAttnBackend
from harness.attention.trtllm_mla import TRTLLMMLABackend
from harness.graphs.tape import Tape
from harness.upstream.forward_batch_info import EagleDraftExtendInput, ForwardMode

V1 = ForwardMode.DRAFT_EXTEND
MODES = (ForwardMode.TARGET_VERIFY, V1, ForwardMode.DRAFT_EXTEND_V2, ForwardMode.DECODE)
KINDS: tuple[tuple[Any, Any], ...] = (
    (MHAScene, TRTLLMHAAttnBackend),
    (MHAScene, ContextKernelMHABackend),
    (MHAScene, VerifyFixUpMHABackend),
    (MLAScene, TRTLLMMLABackend),
    (MLAScene, HostLengthsMLABackend),
)


@pytest.mark.parametrize("mode", MODES, ids=phase_id)
@pytest.mark.parametrize(("scene_of", "kind"), KINDS, ids=lambda kind: kind.__name__)
def test_replay_equals_dense(scene_of: Any, kind: Any, mode: ForwardMode) -> None:
    scene = scene_of(kind)
    backend, q_lens = scene.backend, (1, 1) if mode.is_decode() else (3, 3)
    static, inputs = scene.batch(mode, q_lens), scene.inputs(sum(q_lens))
    backend.init_cuda_graph_state(4, 12)

    def record() -> Any:
        backend.init_forward_metadata_in_graph(static)
        return scene.forward(static, inputs, scene.layer)

    backend.init_forward_metadata_out_graph(static, in_capture=True)
    tape = Tape()
    captured = tape.capture(record)
    extend = scene.batch(ForwardMode.EXTEND, (1, 4))
    scene.run(extend, scene.inputs(5), scene.layer)

    # v1 packs 1 + 3 tokens into its 6 rows; the two after them are nobody's.
    lens, totals = (1, 3) if mode is V1 else q_lens, (11, 19)
    moved, tokens = scene.batch(mode, lens, totals), sum(lens)
    static.seq_lens.copy_(moved.seq_lens)
    static.out_cache_loc.zero_()[:tokens] = moved.out_cache_loc
    if isinstance(static.spec_info, EagleDraftExtendInput):
        static.spec_info.num_accept_tokens.copy_(moved.spec_info.num_accept_tokens)
    for name, fresh in scene.inputs(sum(q_lens)).items():
        inputs[name].copy_(fresh)
    backend.init_forward_metadata_out_graph(static)
    tape.replay()
    assert captured[:tokens].allclose(scene.expected(inputs, lens, totals), atol=1e-5)
    assert not captured[tokens:].any()


def test_only_calls_of_one_eager_forward_say_that_they_belong_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene, seen = MHAScene(ContextKernelMHABackend), []
    backend, verify = scene.backend, ForwardMode.TARGET_VERIFY
    context = backend.kernel.context
    monkeypatch.setattr(
        backend.kernel, "context", lambda call: seen.append(call.forward) or context(call)
    )
    batch, inputs = scene.batch(verify, (3, 3)), scene.inputs(6)

    def layers(*, plan: bool) -> list[object]:
        seen.clear()
        if plan:
            backend.init_forward_metadata(batch)
        for _ in range(2):
            scene.forward(batch, inputs, scene.layer)
        return list(seen)

    first, second = layers(plan=True), layers(plan=True)
    rule = "calls of one eager forward have one object as their forward"
    assert first[0] is first[1] is not None, f"{rule}, not {first}"
    assert second[0] is second[1] is not None, f"{rule}, not {second}"
    told = "calls of two eager forwards have two objects as their forward: a kernel plans anew"
    assert first[0] is not second[0], f"{told}, not twice {first[0]}"
    backend.init_forward_metadata_in_graph(batch)  # fills the same tensors again
    rule = "forward of a context call is None where a graph's metadata is filled again"
    refilled = layers(plan=False)
    assert refilled == [None, None], f"{rule}, not {refilled}"
    backend.init_forward_metadata(batch)
    backend.init_cuda_graph_state(4, 12)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    captured = layers(plan=False)
    assert captured == [None, None], f"{rule}, not {captured}"


@pytest.mark.parametrize("scene_of", [MHAScene, MLAScene])
def test_decode_calls_of_one_forward_say_that_they_belong_together(
    scene_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, seen, forwards = scene_of(), [], []
    backend, entry = scene.backend, "decode" if scene_of is MHAScene else "mla_decode"
    decode = getattr(backend.kernel, entry)
    monkeypatch.setattr(
        backend.kernel, entry, lambda call: seen.append(call.forward) or decode(call)
    )
    batch, inputs = scene.batch(ForwardMode.TARGET_VERIFY, (3, 3)), scene.inputs(6)
    backend.init_cuda_graph_state(4, 12)
    in_graph = backend.init_forward_metadata_in_graph
    choose = partial(backend.init_forward_metadata_out_graph, batch)
    choose(in_capture=True)
    in_graph(batch)
    for plan in (backend.init_forward_metadata, lambda _: choose(), in_graph, in_graph):
        plan(batch)
        seen.clear()
        for _ in range(2):
            scene.forward(batch, inputs, scene.layer)
        assert seen[0] is seen[1] is not None
        forwards.append(seen[0])
    assert len({*map(id, forwards)}) == len(forwards)


@pytest.mark.parametrize("mode", [DRAFT, VERIFY, EXTEND], ids=phase_id)
def test_a_phase_of_a_round_begins_a_forward_of_each_of_its_backends(mode: ForwardMode) -> None:
    trio = Trio()
    backends = getattr(trio.backends[mode], "attn_backends", [trio.backends[mode]])
    forwards = []
    for phase in (DRAFT, VERIFY, EXTEND):
        trio.choose(phase, [9, 4])
        trio.fill(phase, [9, 4])
    for _ in range(2):
        forwards += [backend._forward for backend in backends]
        trio.fill(mode, [9, 4])
    forwards += [backend._forward for backend in backends]
    rule = "each fill of metadata begins a forward: a kernel keeps no slots or lengths of an older"
    assert len({*map(id, forwards)}) == 3 * len(backends), rule
