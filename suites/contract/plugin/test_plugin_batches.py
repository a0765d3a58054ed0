"""What a server hands over reaches our backends as it is: lengths, locations, pools, layers."""

from __future__ import annotations

import runpy
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from harness.core.paths import ROOT
from harness.errors import UsageError
from harness.plugin.batches import our_batch, our_layer
from harness.plugin.pools import served_pool
from harness.upstream.forward_batch_info import (
    EagleDraftExtendInput,
    EagleDraftInput,
    EagleVerifyInput,
    ForwardMode,
)
from harness.upstream.radix_attention import RadixAttention

FP8 = torch.float8_e4m3fn


def mode(name: str) -> Any:
    return SimpleNamespace(name=name)


def batch(name: str, spec_info: Any = None, **changes: Any) -> Any:
    """Two of three requests in buffers of four, as a graph runner's view has them."""
    fields: dict[str, Any] = {
        "forward_mode": mode(name),
        "batch_size": 3,
        "input_ids": torch.arange(12),
        "req_pool_indices": torch.tensor([5, 2, 0, 0]),
        "seq_lens": torch.tensor([31, 7, 4, 4]),
        "seq_lens_cpu": None,
        "out_cache_loc": torch.arange(100, 112),
        "spec_info": spec_info,
    }
    return SimpleNamespace(**fields | changes)


def translated(theirs: Any) -> Any:
    return our_batch(theirs, req_to_token_pool="table", token_to_kv_pool="pool")


def test_a_view_that_is_longer_than_its_batch_is_cut() -> None:
    verify = SimpleNamespace(draft_token=torch.arange(12), draft_token_num=4, custom_mask=None)
    theirs = batch("TARGET_VERIFY", verify, seq_lens_cpu=torch.tensor([31, 7, 4, 4]))
    own = translated(theirs)
    assert own.forward_mode is ForwardMode.TARGET_VERIFY
    assert own.seq_lens.tolist() == [31, 7, 4]
    assert own.req_pool_indices.tolist() == [5, 2, 0]
    assert own.seq_lens_cpu.tolist() == [31, 7, 4]
    assert (own.req_to_token_pool, own.token_to_kv_pool) == ("table", "pool")
    assert isinstance(own.spec_info, EagleVerifyInput)
    assert own.spec_info.draft_token_num == 4
    # A recorded fill follows the server's buffers, so nothing may be copied.
    for name in ("seq_lens", "req_pool_indices", "out_cache_loc"):
        assert getattr(own, name).data_ptr() == getattr(theirs, name).data_ptr()


@pytest.mark.parametrize(
    ("declared", "seq_lens", "stride"),
    [(6, [31, 7, 4], 6), (-1, [31, 7, 4], 4), (-1, [31, 7, 4, 4], 3)],
    ids=["declared", "given", "padded"],
)
def test_a_draft_extend_has_the_rows_it_declares_or_was_given(
    declared: int, seq_lens: list[int], stride: int
) -> None:
    accepted = torch.tensor([1, 4, 2])
    spec = SimpleNamespace(num_accept_tokens=accepted, num_tokens_per_req=declared)
    own = translated(batch("DRAFT_EXTEND_V2", spec, seq_lens=torch.tensor(seq_lens)))
    assert isinstance(own.spec_info, EagleDraftExtendInput)
    found = own.spec_info.num_tokens_per_req
    said = f"num_tokens_per_req is that declared, or all rows by all requests, padded too: {found}"
    assert found == stride, said
    said = "num_accept_tokens of a draft extend is the server's own tensor"
    assert own.spec_info.num_accept_tokens is accepted, said


def test_a_prefill_has_the_positions_and_lengths_that_it_was_given() -> None:
    lengths, positions = torch.tensor([9, 2, 1]), torch.arange(7, 19)
    given = {"extend_seq_lens": lengths, "extend_seq_lens_cpu": (9, 2, 1), "positions": positions}
    own = translated(batch("EXTEND", **given))
    found = own.extend_seq_lens
    assert found is lengths, f"extend_seq_lens of a prefill is the tensor given, not {found}"
    found = own.extend_seq_lens_cpu
    assert found == [9, 2, 1], f"extend_seq_lens_cpu of a prefill is that given, not {found}"
    found = own.positions
    assert found is positions, f"positions of a prefill are the tensor given, not {found}"


def test_a_verify_has_its_tokens_and_its_mask() -> None:
    tokens, mask = torch.arange(12), torch.ones(40, dtype=torch.bool)
    verify = SimpleNamespace(draft_token=tokens, draft_token_num=4, custom_mask=mask)
    spec = translated(batch("TARGET_VERIFY", verify)).spec_info
    found = spec.draft_token
    assert found is tokens, f"draft_token of a verify is the tensor given, not {found}"
    assert spec.custom_mask is mask, "the mask of a verify reaches the backend"


def test_a_draft_has_its_first_tokens_and_their_probabilities() -> None:
    tokens, hidden = torch.tensor([[5], [2], [9]]), torch.zeros(3, 8)
    draft = SimpleNamespace(topk_index=tokens, topk_p=tokens / 10, hidden_states=hidden)
    spec = translated(batch("DECODE", draft)).spec_info
    assert isinstance(spec, EagleDraftInput)
    assert spec.topk_index is tokens, "topk_index has tokens and topk_p their probabilities"
    assert spec.topk_p is draft.topk_p
    assert spec.hidden_states is hidden


def test_a_mode_that_is_not_ours_is_refused() -> None:
    with pytest.raises(UsageError, match=r"forward_mode = 'MIXED' .* DRAFT_EXTEND_V2"):
        translated(batch("MIXED"))


def layer(**changes: Any) -> Any:
    fields: dict[str, Any] = {
        "layer_id": 3,
        "tp_q_head_num": 8,
        "tp_k_head_num": 2,
        "head_dim": 64,
        "v_head_dim": 64,
        "scaling": 0.125,
        "sliding_window_size": -1,
        "k_scale_float": None,
        "v_scale_float": None,
        "logit_cap": 0.0,
        "attn_type": SimpleNamespace(value="decoder"),
        "is_cross_attention": False,
    }
    return SimpleNamespace(**fields | changes)


def test_a_layer_without_scales_has_scales_of_one() -> None:
    sinks = torch.zeros(8)
    own = our_layer(layer(), sinks)
    assert vars(own) == vars(RadixAttention(3, 8, 2, 64, 64, 0.125, sinks=sinks))
    scaled = our_layer(layer(k_scale_float=0.5, v_scale_float=2.0), None)
    assert (scaled.k_scale, scaled.v_scale) == (0.5, 2.0)
    keys_alone = our_layer(layer(k_scale_float=0.5), None)
    said = "a layer whose keys alone have a scale has unscaled values"
    assert (keys_alone.k_scale, keys_alone.v_scale) == (0.5, 1.0), said


def test_backends_of_one_process_have_layers_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = ModuleType("base_attn_backend")
    base.AttentionBackend = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.attention.base_attn_backend", base)
    made = runpy.run_path(str(ROOT / "harness" / "plugin" / "backend.py"))["PluginBackend"]
    ours = SimpleNamespace(needs_cpu_seq_lens=False, max_context_len=64, skip_prefill=False)
    runner = SimpleNamespace(
        token_to_kv_pool=None, req_to_token_pool=None, device="cpu", is_draft_worker=False
    )
    target, draft = (made(ours, runner) for _ in range(2))
    found = [one._layer(layer(tp_q_head_num=n), None) for one, n in ((target, 8), (draft, 2))]
    told = "a draft's layer 3 has its own heads, though the target has a layer 3 as well"
    assert [own.tp_q_head_num for own in found] == [8, 2], told


def test_a_layer_keeps_its_window_and_the_size_of_its_values() -> None:
    own = our_layer(layer(v_head_dim=48, sliding_window_size=127), None)
    window, dim = own.sliding_window_size, own.v_head_dim
    assert window == 127, f"sliding_window_size of a layer is sglang's, 127, not {window}"
    assert dim == 48, f"v_head_dim of a layer is sglang's, 48 beside a head_dim of 64, not {dim}"
    assert vars(own) == vars(RadixAttention(3, 8, 2, 64, 48, 0.125, sliding_window_size=127))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"logit_cap": 30.0}, "logit_cap = 30"),
        ({"attn_type": SimpleNamespace(value="encoder_only")}, "attn_type = 'encoder_only'"),
        ({"is_cross_attention": True}, "attn_type = 'decoder'"),
    ],
)
def test_a_layer_that_computes_something_else_is_refused(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        our_layer(layer(**changes), None)


class ServersPool:
    """A pool of sglang's, as far as ours calls it; page 0 is beyond its size."""

    size, page_size, dtype = 32, 16, FP8

    def __init__(self) -> None:
        self.k = torch.arange(48 * 2 * 4).view(48, 2, 4).to(FP8)
        self.v = self.k.flip(0).contiguous()
        self.written: list[tuple[Any, ...]] = []

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k, self.v

    def set_kv_buffer(self, *arguments: Any) -> None:
        self.written.append(arguments)


def test_a_pool_shows_the_servers_memory_by_page_and_writes_what_saturates() -> None:
    theirs = ServersPool()
    own: Any = served_pool(theirs)
    assert (own.num_pages, own.page_size, own.dtype) == (3, 16, FP8)
    keys, values = own.get_kv_buffer(0)
    assert keys.shape == values.shape == (3, 16, 2, 4)
    assert keys.data_ptr() == theirs.k.data_ptr()
    assert values.data_ptr() == theirs.v.data_ptr()
    at = RadixAttention(0, 4, 2, 4, 4, 1.0, k_scale=0.5, v_scale=2.0)
    own.set_kv_buffer(at, torch.tensor([17]), torch.full((1, 2, 4), 300.0), torch.ones(1, 2, 4))
    [(given, loc, k, v)] = theirs.written
    assert given is at
    assert loc.tolist() == [17]
    # 300 / 0.5 lies beyond FP8's largest number; sglang's own cast on CUDA would overflow.
    assert k.float().unique().tolist() == [448.0]
    assert v.float().unique().tolist() == [0.5]


def test_layers_with_a_window_are_found_and_written_in_their_own_pool() -> None:
    full, window = ServersPool(), ServersPool()
    theirs = SimpleNamespace(
        full_kv_pool=full,
        swa_kv_pool=window,
        layers_mapping={1: (0, False), 0: (0, True), 2: (1, True)},
        full_to_swa_index_mapping=torch.arange(48).flip(0),
    )
    own: Any = served_pool(theirs)
    assert [(layer.is_swa, layer.index) for layer in own.layers_mapping] == [
        (True, 0),
        (False, 0),
        (True, 1),
    ]
    assert own.get_kv_buffer(2)[0].data_ptr() == window.k.data_ptr()
    assert own.get_kv_buffer(1)[0].data_ptr() == full.k.data_ptr()
    assert own.translate_loc_from_full_to_swa(torch.tensor([0, 40])).tolist() == [47, 7]
    rows = torch.ones(1, 2, 4)
    at = RadixAttention(2, 4, 2, 4, 4, 1.0, k_scale=0.5, v_scale=0.25)
    own.set_kv_buffer(at, torch.tensor([3]), rows, rows)
    assert full.written == []
    [(given, loc, k, v)] = window.written
    assert (given.layer_id, loc.tolist()) == (1, [3])
    said = "keys and values of a layer with a window are written with a scale of their own each"
    assert (k.float().unique().tolist(), v.float().unique().tolist()) == ([2.0], [4.0]), said
    theirs.full_to_swa_index_mapping = torch.zeros(48, dtype=torch.int64)
    assert own.translate_loc_from_full_to_swa(torch.tensor([40])).tolist() == [0]


def test_both_parts_of_a_latent_are_scaled() -> None:
    written: list[Any] = []
    theirs = SimpleNamespace(
        size=32,
        page_size=16,
        dtype=FP8,
        kv_lora_rank=8,
        set_mla_kv_buffer=lambda *arguments: written.append(arguments),
    )
    own: Any = served_pool(theirs)
    at = RadixAttention(0, 4, 1, 12, 8, 1.0, k_scale=0.5)
    own.set_mla_kv_buffer(at, torch.tensor([1]), torch.full((1, 8), 3.0), torch.full((1, 4), 5.0))
    [(_, _, latent, rope)] = written
    nope, rotary = latent.float().unique().tolist(), rope.float().unique().tolist()
    assert nope == [6.0], f"a latent of 3 is written over k_scale = 0.5, as [6.0], not {nope}"
    told = f"a rotary key of 5 is written over k_scale = 0.5, too, as [10.0], not {rotary}"
    assert rotary == [10.0], told
    told = f"both parts are written in FP8, not in {latent.dtype}, {rope.dtype}"
    assert latent.dtype == rope.dtype == FP8, told


def test_a_latent_pool_is_shown_by_page_and_written_as_latent_and_rope() -> None:
    buffer, written = torch.zeros(48, 1, 576), []
    theirs = SimpleNamespace(
        size=32,
        page_size=16,
        dtype=torch.float32,
        kv_lora_rank=512,
        get_key_buffer=lambda layer_id: buffer,
        set_mla_kv_buffer=lambda *arguments: written.append(arguments),
    )
    own: Any = served_pool(theirs)
    assert own.get_key_buffer(0).shape == (3, 16, 576)
    assert own.get_key_buffer(0).data_ptr() == buffer.data_ptr()
    latent, rope = torch.randn(2, 512), torch.randn(2, 1, 64)
    own.set_mla_kv_buffer(
        RadixAttention(0, 4, 1, 576, 512, 1.0), torch.tensor([1, 2]), latent, rope
    )
    [(_, loc, k_nope, k_rope)] = written
    assert loc.tolist() == [1, 2]
    assert torch.equal(k_nope, latent[:, None])
    assert torch.equal(k_rope, rope)
