"""A hook that a backend does not write has a working default, in the order of SGLang's contract."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fixtures.toys.toy_attention import make_batch, mha_layer, mha_pool, request_table
from harness.errors import ContractError
from harness.upstream.base_attn_backend import (
    AttentionBackend,
    MultiStepDraftBackend,
    SharedReadEnds,
)
from harness.upstream.forward_batch_info import ForwardBatch, ForwardMode
from harness.upstream.older_contracts import OlderContracts
from harness.upstream.verify_mask import TreeMaskMode, VerifyMask, tree_mask_numel

LENS = torch.tensor([9, 4])
ROWS = torch.tensor([1, 3])
IN_REPLAY, UNKNOWN = SharedReadEnds.IN_REPLAY, SharedReadEnds.UNKNOWN


class Plain(AttentionBackend):
    """Overrides what must be and logs what is asked of it."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        self.log.append(("out", batch, in_capture))

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        self.log.append(("in", batch))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.log.append(("state", max_bs, max_num_tokens))

    def forward_decode(self, *given: Any, **options: Any) -> torch.Tensor:
        self.log.append(("decode", given, options))
        return torch.ones(1)

    def forward_extend(self, *given: Any, **options: Any) -> torch.Tensor:
        self.log.append(("extend", given, options))
        return torch.ones(2)


class Masked(Plain):
    """Has a mask, or none."""

    def __init__(self, mask: torch.Tensor | None, mode: TreeMaskMode) -> None:
        super().__init__()
        self._mask = None if mask is None else VerifyMask(mask, mode, 1)

    @property
    def verify_mask(self) -> VerifyMask | None:
        return self._mask


class Steps(MultiStepDraftBackend):
    """Two plain steps; every hook without a default does nothing."""

    def __init__(self) -> None:
        self.attn_backends = [Plain(), Plain()]

    init_forward_metadata = init_forward_metadata_in_graph = lambda self, batch: None
    init_cuda_graph_state = lambda self, max_bs, max_num_tokens: None  # noqa: E731
    init_forward_metadata_out_graph = lambda self, batch, in_capture=False: None  # noqa: E731


def batch_of(mode: ForwardMode) -> ForwardBatch:
    return make_batch(mode, request_table(), mha_pool(), [9, 4], torch.arange(4, 6))


@pytest.mark.parametrize("name", sorted(AttentionBackend.__abstractmethods__))
def test_what_has_no_default_must_be_written(name: str) -> None:
    lacking = type("Lacking", (Plain,), {name: getattr(AttentionBackend, name)})
    with pytest.raises(TypeError, match=name):
        lacking()


def test_defaults() -> None:
    backend = Plain()
    assert backend.needs_cpu_seq_lens is True
    assert backend.get_cuda_graph_seq_len_fill_value() == 1
    assert backend.verify_mask is None
    spec: Any = None
    for bs in (None, 4):
        backend.update_verify_buffers_to_fill_after_draft(spec, bs)
    backend.on_after_cuda_graph_warmup()
    assert backend.log == []


def test_eager_planning_runs_the_host_side_first_and_outside_a_capture() -> None:
    backend, batch = Plain(), batch_of(ForwardMode.DECODE)
    backend.init_forward_metadata(batch)
    assert backend.log == [("out", batch, False), ("in", batch)]


def test_the_older_pair_is_the_three_phases() -> None:
    backend, mode, spec = Plain(), ForwardMode.TARGET_VERIFY, None
    older = OlderContracts(backend, request_table(), mha_pool())
    older.init_forward_metadata_capture_cuda_graph(2, 6, ROWS, LENS, None, mode, spec)
    (_, planned, in_capture), last = backend.log
    capture_hook = "init_forward_metadata_capture_cuda_graph"
    assert in_capture, f"{capture_hook} plans with in_capture=True: the graph gets its own room"
    assert last == ("in", planned)
    assert (planned.batch_size, planned.forward_mode, planned.spec_info) == (2, mode, None)
    assert (len(planned.input_ids), len(planned.out_cache_loc)) == (6, 6)
    assert planned.req_pool_indices.tolist() == [1, 3]
    assert planned.seq_lens.tolist() == [9, 4]
    backend.log.clear()
    longer = torch.tensor([9, 4, 1])
    older.init_forward_metadata_replay_cuda_graph(2, longer, longer, 13, None, mode, spec, longer)
    (_, planned, in_capture), last = backend.log
    assert (in_capture, last) == (False, ("in", planned))
    own_lens = planned.seq_lens_cpu
    lens_on_host = planned.seq_lens_sum, None if own_lens is None else own_lens.tolist()
    told = "hands on seq_lens_sum and seq_lens_cpu of its bs requests, whose buffer may be longer"
    is_handed_on = lens_on_host == (13, [9, 4])
    assert is_handed_on, f"init_forward_metadata_replay_cuda_graph {told}: {lens_on_host}"
    assert planned.req_pool_indices.tolist() == planned.seq_lens.tolist() == [9, 4]


@pytest.mark.parametrize("mask", [None, torch.zeros(6, dtype=torch.bool)], ids=["none", "mask"])
def test_the_older_buffers_are_the_mask_and_no_positions(mask: torch.Tensor | None) -> None:
    backend = Masked(mask, TreeMaskMode.FULL_MASK)
    older = OlderContracts(backend, request_table(), mha_pool())
    obtained, positions = older.get_verify_buffers_to_fill_after_draft()
    assert obtained is mask
    assert positions is None


def test_an_older_tree_builder_is_given_no_layout_but_its_own() -> None:
    backend = Masked(torch.zeros(6, dtype=torch.bool), TreeMaskMode.QLEN_ONLY)
    older = OlderContracts(backend, request_table(), mha_pool())
    with pytest.raises(ContractError, match=r"verify_mask.mode = 'QLEN_ONLY' .* FULL_MASK"):
        older.get_verify_buffers_to_fill_after_draft()


def test_when_reads_end_is_unknown_until_somebody_looks() -> None:
    ends = {mode: Plain().shared_read_ends(mode) for mode in ForwardMode}
    in_replay = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY)
    said = {mode.name: end.name for mode, end in ends.items()}
    told = (
        f"reads end IN_REPLAY of DECODE and TARGET_VERIFY, UNKNOWN of every other mode, not {said}"
    )
    assert ends == dict.fromkeys(ForwardMode, UNKNOWN) | dict.fromkeys(in_replay, IN_REPLAY), told


class Snapshots(Plain):
    """A prefill's late reads are copied where it is asked to."""

    def shared_read_ends(self, fm: ForwardMode) -> SharedReadEnds:
        return SharedReadEnds.POST_REPLAY

    def _snapshot_prefill_shared_reads(
        self, batch: ForwardBatch, *, num_qo_tokens: int
    ) -> SharedReadEnds:
        self.log.append(num_qo_tokens)
        return SharedReadEnds.PRE_REPLAY


def test_a_prefill_is_asked_for_a_snapshot_unless_none_may_be_built() -> None:
    backend, batch = Snapshots(), batch_of(ForwardMode.EXTEND)
    resolve = backend.resolve_prefill_shared_read_ends
    assert resolve(batch, num_qo_tokens=5) is SharedReadEnds.PRE_REPLAY
    assert resolve(batch, num_qo_tokens=6, build_snapshot=False) is SharedReadEnds.POST_REPLAY
    for mode in set(ForwardMode) - {ForwardMode.EXTEND}:
        assert resolve(batch_of(mode), num_qo_tokens=7) is UNKNOWN
    assert backend.log == [5]
    assert Plain().resolve_prefill_shared_read_ends(batch, num_qo_tokens=5) is UNKNOWN


SERVED = dict.fromkeys(ForwardMode, "extend") | {ForwardMode.DECODE: "decode"}


@pytest.mark.parametrize("mode", ForwardMode, ids=lambda mode: mode.name.lower())
def test_forward_serves_decode_and_extend_and_gives_zeros_to_idle(mode: ForwardMode) -> None:
    backend, batch, layer = Plain(), batch_of(mode), mha_layer()
    q, k, v = torch.ones(5, 4, 8, dtype=torch.bfloat16), torch.ones(5, 2, 8), torch.zeros(5, 2, 8)
    out = backend.forward(q, k, v, layer, batch, False, q_rope=q)
    if mode.is_idle():
        assert backend.log == []
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, torch.zeros(5, 4 * 8, dtype=torch.bfloat16))
        return
    ((entry, given, options),) = backend.log
    assert entry == SERVED[mode]
    assert all(a is b for a, b in zip(given, (q, k, v, layer, batch), strict=True))
    assert options == {"save_kv_cache": False, "q_rope": q}


def test_an_idle_forward_is_as_wide_as_its_values() -> None:
    layer = replace(mha_layer(), v_head_dim=6)
    q, k, v = torch.ones(2, 4, 8), torch.ones(2, 2, 8), torch.ones(2, 2, 6)
    out = Plain().forward(q, k, v, layer, batch_of(ForwardMode.IDLE))
    said = "four query heads give four values each of the value's size, 6, not of the query's, 8"
    assert out.shape == (2, 4 * 6), f"{said}: {list(out.shape)}"


@pytest.mark.parametrize(
    ("mode", "entries"),
    [(TreeMaskMode.FULL_MASK, 3 * 4 * (10 + 4)), (TreeMaskMode.QLEN_ONLY, 3 * 4 * 4)],
    ids=["full", "qlen"],
)
def test_a_tree_mask_has_a_column_of_every_key_or_of_the_draft_alone(
    mode: TreeMaskMode, entries: int
) -> None:
    found = tree_mask_numel(mode, bs=3, num_draft_tokens=4, max_context_len=10)
    said = f"three trees of four tokens behind a context of ten take {entries} entries"
    assert found == entries, f"{said} as {mode.name}, not {found}"


def test_a_multi_step_draft_asks_its_steps() -> None:
    steps, undone = Steps(), []
    steps.attn_backends[0].get_cuda_graph_seq_len_fill_value = lambda: 7  # type: ignore[method-assign]
    for i, step in enumerate(steps.attn_backends):
        step.on_after_cuda_graph_warmup = lambda i=i: undone.append(i)  # type: ignore[method-assign]
    assert steps.needs_cpu_seq_lens is True
    assert steps.get_cuda_graph_seq_len_fill_value() == 7
    steps.on_after_cuda_graph_warmup()
    assert undone == [0, 1]
