"""What a trial hands to a release where its rows leave it open: widths, steps, rotations."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fixtures.tables import CASES
from fixtures.toys.toy_attention import mha_layer
from harness.core.capability import CAPABILITIES
from harness.core.case import Family, Mode
from harness.errors import UsageError
from harness.kernels.reference import TorchPaged
from harness.sglang import (
    backend,
    batches,
    module_globals,
    process,
    runtime_context,
    shared_allocator,
)
from harness.sglang.backend import FLASHINFER_MLA, TRTLLM_MLA, Classes, decompressed
from harness.sglang.batches import at_full_width, chain_mask, with_host_lens
from harness.sglang.context import server_arguments
from harness.sglang.releases import RELEASES
from harness.upstream.forward_batch_info import (
    EagleDraftExtendInput,
    EagleVerifyInput,
    ForwardBatch,
    ForwardMode,
)


def draft_extend(mode: ForwardMode) -> ForwardBatch:
    """Two requests of up to four tokens, as a runner captures them."""
    lens = torch.ones(2, dtype=torch.int32)
    tokens = torch.zeros(8, dtype=torch.int64)
    return ForwardBatch(
        forward_mode=mode,
        batch_size=2,
        input_ids=tokens,
        positions=tokens,
        out_cache_loc=tokens,
        req_pool_indices=torch.zeros(2, dtype=torch.int64),
        seq_lens=torch.ones(2, dtype=torch.int64),
        extend_seq_lens=lens,
        req_to_token_pool=None,
        token_to_kv_pool=None,
        attn_backend=None,
        spec_info=EagleDraftExtendInput(None, lens, num_tokens_per_req=4),
    )


def test_v1_is_captured_with_every_token_accepted() -> None:
    ours = draft_extend(ForwardMode.DRAFT_EXTEND)
    batch = at_full_width(ours)
    assert isinstance(batch.spec_info, EagleDraftExtendInput)
    assert batch.spec_info.num_accept_tokens.tolist() == [4, 4]
    assert batch.extend_seq_lens is not None
    assert batch.extend_seq_lens.tolist() == [4, 4]
    # The runner's own inputs stay as they are: planning is no reason to change them.
    assert isinstance(ours.spec_info, EagleDraftExtendInput)
    assert ours.spec_info.num_accept_tokens.tolist() == [1, 1]
    uniform = draft_extend(ForwardMode.DRAFT_EXTEND_V2)
    assert at_full_width(uniform) is uniform


def test_a_capture_knows_its_lengths_on_the_host() -> None:
    ours = draft_extend(ForwardMode.DRAFT_EXTEND_V2).with_changes(
        seq_lens=torch.tensor([3, 4]), seq_lens_sum=99
    )
    batch = with_host_lens(ours)
    assert batch.seq_lens_cpu is not None, "a capture has its seq_lens_cpu"
    lens, total = batch.seq_lens_cpu.tolist(), batch.seq_lens_sum
    assert lens == [3, 4], f"seq_lens_cpu of a capture is its seq_lens, [3, 4], not {lens}"
    assert total == 7, f"seq_lens_sum of a capture is the sum of its seq_lens, 7, not {total}"


def test_a_chain_sees_what_is_committed_and_itself() -> None:
    batch = draft_extend(ForwardMode.TARGET_VERIFY).with_changes(
        seq_lens=torch.tensor([2, 0]), spec_info=EagleVerifyInput(torch.zeros(4), 2)
    )
    behind_two, behind_none = [1, 1, 1, 0, 1, 1, 1, 1], [1, 0, 1, 1]
    assert chain_mask(batch).int().tolist() == behind_two + behind_none


def test_the_target_of_a_draft_maps_every_slot_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    hybrid, allocator = type("SWAKVPool", (), {}), type("SWATokenToKVPoolAllocator", (), {})
    module = SimpleNamespace(SWAKVPool=hybrid, SWATokenToKVPoolAllocator=allocator)
    monkeypatch.setattr(shared_allocator, "load", lambda _: module)
    case = next(
        case for case in CASES.values() if case.mode is Mode.MULTI_STEP_DRAFT and case.seed % 2
    )
    pool = SimpleNamespace(size=32, device="cpu")
    made = shared_allocator.new_allocator(case, pool, is_draft_worker=True)
    mapping = made._kvcache.full_to_swa_index_mapping.tolist()
    slots = list(range(32 + case.page_size))
    assert sorted(mapping) == slots
    said = "a draft that took its target's mapping for its own would find other slots by it"
    assert not any(slot == own for slot, own in zip(slots, mapping, strict=True)), said


def test_a_decompressed_value_is_the_latent_of_each_head() -> None:
    q, k = torch.arange(24.0).view(2, 3, 4), torch.arange(100.0, 108.0).view(2, 1, 4)
    q_rope, k_rope = torch.arange(200.0, 212.0).view(2, 3, 2), torch.arange(300.0, 304.0)
    query, key, value = decompressed(q, k, q_rope, k_rope.view(2, 1, 2))
    assert query[1, 2].tolist() == [20, 21, 22, 23, 210, 211]
    for head in range(3):
        assert key[1, head].tolist() == [104, 105, 106, 107, 302, 303]
        assert value[1, head].tolist() == [104, 105, 106, 107], "the rotary part is no value"


def test_a_context_is_taken_back_before_the_next_is_published() -> None:
    done: list[str] = []

    def override(name: str) -> SimpleNamespace:
        verbs = {verb: lambda verb=verb: done.append(f"{verb} {name}") for verb in WAYS}
        return SimpleNamespace(**verbs)

    held: list[Any] = []
    for name in ("first", "second"):
        runtime_context._replace(held, override(name))
    assert done == ["install first", "restore first", "install second"]


WAYS = ("install", "restore")


def test_a_release_of_globals_has_one_rank_in_every_group(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = SimpleNamespace()
    monkeypatch.setattr(module_globals, "load", lambda _: groups)
    module_globals.publish_ranks()
    assert vars(groups).keys() == {"_TP", "_ATTN_TP", "_ATTN_CP"}
    assert {(g.world_size, g.rank_in_group) for g in vars(groups).values()} == {(1, 0)}


@pytest.mark.parametrize(
    ("name", "steps", "width"),
    [
        ("mha-draft_extend_v1-width_2_steps_5", 1, 2),
        ("mha-target_verify-width_8", 7, 8),
        ("mha-multi_step_draft-steps_equal_batch", 5, 3),
    ],
)
def test_a_server_drafts_one_token_less_than_it_verifies(name: str, steps: int, width: int) -> None:
    arguments = server_arguments(CASES[name], "triton")
    assert arguments["speculative_num_steps"] == steps
    assert arguments["speculative_num_draft_tokens"] == width


@pytest.mark.parametrize(
    ("classes", "version", "fuses"),
    [
        (TRTLLM_MLA, "0.5.16", True),
        (TRTLLM_MLA, "0.5.18", False),
        (FLASHINFER_MLA, "0.5.16", False),
    ],
)
def test_only_trtllm_mla_rotates_what_it_casts(
    classes: Classes, version: str, fuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def new_runner(*_: Any, **__: Any) -> SimpleNamespace:
        return SimpleNamespace()

    monkeypatch.setattr(backend, "active", lambda: RELEASES[version])
    monkeypatch.setattr(backend, "publish", lambda *_: None)
    monkeypatch.setattr(backend, "new_model_runner", new_runner)
    sent = pickle.loads(pickle.dumps(classes))  # as to the process of a trial on CUDA
    pools: dict[str, Any] = {"req_to_token_pool": None, "token_to_kv_pool": None}
    kernel: Any = TorchPaged(CAPABILITIES[Family.MLA, "trtllm_gen"])
    runner = backend._runner(sent, CASES["mla-decode-fp8_cache"], kernel, "cpu", pools)
    assert runner.fuses_rope is fuses


@pytest.mark.parametrize("scales", [(0.5, 1.0), (1.0, 0.25), (0.5, 0.25)], ids=str)
def test_a_layer_has_both_scales_where_one_of_them_is_not_1(
    scales: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = SimpleNamespace(RadixAttention=lambda **given: SimpleNamespace(**given))
    monkeypatch.setattr(batches, "load", lambda module: fake)
    made = batches.new_layer(mha_layer(k_scale=scales[0], v_scale=scales[1]), "cpu")
    told = f"a layer with k_scale, v_scale = {scales} has both, as tensors and floats: {made}"
    assert hasattr(made, "k_scale_float"), told
    assert (made.k_scale_float, made.v_scale_float) == scales, told
    assert (float(made.k_scale), float(made.v_scale)) == scales, told


def test_a_process_tries_one_release_from_one_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    newest, *_, other = reversed(RELEASES.values())
    monkeypatch.setattr(process, "_active", [(newest, None)])
    process.activate(newest)
    for release, source in ((newest, tmp_path), (other, None)):
        with pytest.raises(UsageError, match="the one of this process"):
            process.activate(release, source)
