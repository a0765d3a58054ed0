"""A release's pools are our memory, layer by layer, and its translator is told whose they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fixtures.toys.toy_attention import PAGE, mha_pool
from harness.sglang import model_runner, pools
from harness.sglang.pools import alias_pool
from harness.upstream.memory_pool import MLATokenToKVPool, SWAKVPool


class TheirMHA:
    """Buffers of sglang's MHA pool: a page more than its size."""

    def __init__(self, size: int, page_size: int, head_num: int, head_dim: int, **more: Any):
        shape = (size + page_size, head_num, head_dim)
        count = more["layer_num"]
        self.size = size
        self.k_buffer = [torch.empty(shape, dtype=more["dtype"]) for _ in range(count)]
        self.v_buffer = [torch.empty(shape, dtype=more["dtype"]) for _ in range(count)]


class TheirTransposedMHA(TheirMHA):
    """The same sizes, another layout."""

    def __init__(self, **given: Any):
        super().__init__(**given)
        rows, heads, dim = self.k_buffer[0].shape
        self.v_buffer = [torch.empty(heads, rows, dim).transpose(0, 1) for _ in self.v_buffer]


class TheirMLA:
    """The buffer of sglang's MLA pool."""

    def __init__(self, size: int, page_size: int, **more: Any):
        columns = more["kv_lora_rank"] + more["qk_rope_head_dim"]
        self.kv_lora_rank = more["kv_lora_rank"]
        shape = (size + page_size, 1, columns)
        self.kv_buffer = [torch.empty(shape) for _ in range(more["layer_num"])]


class TheirSWA:
    """The two pools of sglang's hybrid pool."""

    def __init__(self, size: int, size_swa: int, **more: Any):
        self.swa_ids, self.full_ids = (
            more.pop(f"{kind}_attention_layer_ids") for kind in ("swa", "full")
        )
        self.full_kv_pool = TheirMHA(size, layer_num=len(self.full_ids), **more)
        self.swa_kv_pool = TheirMHA(size_swa, layer_num=len(self.swa_ids), **more)

    def register_mapping(self, mapping: torch.Tensor) -> None:
        """From slots of the full pool to those of the other."""
        self.mapping = mapping


def released(monkeypatch: pytest.MonkeyPatch, mha: type = TheirMHA) -> None:
    theirs = SimpleNamespace(MHATokenToKVPool=mha, MLATokenToKVPool=TheirMLA, SWAKVPool=TheirSWA)
    monkeypatch.setattr(pools, "load", lambda _: theirs)


def addresses(*lists: list[torch.Tensor]) -> list[int]:
    return [buffer.data_ptr() for buffers in lists for buffer in buffers]


def test_keys_and_values_of_every_layer_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    released(monkeypatch)
    ours = mha_pool(layers=3)
    made = alias_pool(ours, "cpu")
    assert made.size == (ours.num_pages - 1) * PAGE, "page 0 is the padding's, beside the size"
    obtained = addresses(made.k_buffer, made.v_buffer)
    assert obtained == addresses(ours.k_buffer, ours.v_buffer)


def test_both_parts_of_a_hybrid_pool_are_ours_and_have_their_own_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released(monkeypatch)
    full, swa = mha_pool(layers=1), mha_pool(layers=2, num_pages=6)
    ours = SWAKVPool(full_pool=full, swa_pool=swa, swa_layer_ids=frozenset({0, 2}), num_layers=3)
    made = alias_pool(ours, "cpu")
    assert (made.swa_ids, made.full_ids) == ([0, 2], [1])
    assert made.mapping is ours.full_to_swa_index_mapping
    for inner, own in ((made.full_kv_pool, full), (made.swa_kv_pool, swa)):
        part = "full" if own is full else "windowed"
        told = f"the {part} pool has the slots of its own pages but the first, not {inner.size}"
        assert inner.size == (own.num_pages - 1) * PAGE, told
        keys, values = addresses(inner.k_buffer), addresses(inner.v_buffer)
        assert keys == addresses(own.k_buffer), f"k_buffer of the {part} pool is our k_buffer"
        assert values == addresses(own.v_buffer), f"v_buffer of the {part} pool is our v_buffer"


def test_a_latent_pool_is_ours_with_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    released(monkeypatch)
    sizes = {"num_pages": 3, "page_size": PAGE, "kv_lora_rank": 16, "qk_rope_head_dim": 4}
    ours = MLATokenToKVPool(**sizes, num_layers=2, dtype=torch.float32)
    made = alias_pool(ours, "cpu")
    assert made.kv_lora_rank == 16
    assert addresses(made.kv_buffer) == addresses(ours.kv_buffer)
    assert [buffer.shape for buffer in made.kv_buffer] == [(12, 1, 20)] * 2


def test_a_release_that_lays_its_pool_out_otherwise_is_not_given_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released(monkeypatch, TheirTransposedMHA)
    with pytest.raises(AssertionError, match=r"TheirTransposedMHA\.v_buffer is laid out otherwise"):
        alias_pool(mha_pool(), "cpu")


@pytest.mark.parametrize("drafts", [True, False])
def test_a_translator_is_told_whose_slots_it_translates(
    drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Translator:
        def __init__(self, req_to_token: Any, token_to_kv_pool: Any, is_draft_worker: bool):
            self.told = req_to_token, token_to_kv_pool, is_draft_worker

    table, pool = torch.zeros(3, 8), object()
    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        token_to_kv_pool=pool,
        token_to_kv_pool_allocator=object(),
        page_size=PAGE,
        device="cpu",
        is_draft_worker=drafts,
    )
    module = SimpleNamespace(KVIndexTranslator=Translator)
    monkeypatch.setattr(model_runner, "load", lambda _: module)
    told = model_runner._translator(runner).told
    assert told[2] is drafts, f"a translator is told is_draft_worker = {drafts}, not {told[2]}"
    assert told == (table, pool, drafts), "a translator is told req_to_token and token_to_kv_pool"


def test_a_release_without_a_translator_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(model_runner, "load", load)
    assert model_runner._translator(SimpleNamespace()) is None
