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
from harness.core.case import Family
from harness.errors import UsageError
from harness.kernels.reference import TorchPaged
from harness.sglang import backend, batches, process
from harness.sglang.backend import FLASHINFER_MLA, TRTLLM_MLA, Classes
from harness.sglang.batches import at_full_width
from harness.sglang.context import server_arguments
from harness.sglang.releases import RELEASES
from harness.upstream.forward_batch_info import EagleDraftExtendInput, ForwardBatch, ForwardMode


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
    assert (made.k_scale_float, made.v_scale_float) == scales
    assert (float(made.k_scale), float(made.v_scale)) == scales


def test_a_process_tries_one_release_from_one_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    newest, *_, other = reversed(RELEASES.values())
    monkeypatch.setattr(process, "_active", [(newest, None)])
    process.activate(newest)
    for release, source in ((newest, tmp_path), (other, None)):
        with pytest.raises(UsageError, match="the one of this process"):
            process.activate(release, source)
