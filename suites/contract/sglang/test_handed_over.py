"""What a release's own classes are handed and asked, seen by stand-ins of them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.sglang import backend, batches, graph_planning
from harness.sglang.backend import SGLangBackend, SGLangDraftBackend
from harness.sglang.batches import chain_mask, new_batch, new_layer, served_batch, with_host_lens
from harness.sglang.releases import RELEASES
from harness.upstream.base_attn_backend import SharedReadEnds
from harness.upstream.forward_batch_info import (
    EagleDraftExtendInput,
    EagleVerifyInput,
    ForwardBatch,
    ForwardMode,
)
from harness.upstream.radix_attention import RadixAttention

FP8 = torch.float8_e4m3fn


@dataclass
class TheirBatch:
    """Fields of sglang's batch that are looked at here."""

    forward_mode: Any = None
    batch_size: int = 0
    input_ids: Any = None
    positions: Any = None
    req_pool_indices: Any = None
    seq_lens: Any = None
    out_cache_loc: Any = None
    seq_lens_cpu: Any = None
    spec_info: Any = None
    extend_seq_lens_cpu: Any = None
    extend_prefix_lens: Any = None
    extend_prefix_lens_cpu: Any = None
    extend_num_tokens: int | None = None


@dataclass
class TheirExtend:
    """Fields of sglang's draft extend input that are looked at here."""

    num_accept_tokens: Any
    num_correct_drafts: Any
    num_tokens_per_req: int


RELEASE = SimpleNamespace(
    ForwardBatch=TheirBatch,
    ForwardMode=ForwardMode,
    CaptureHiddenMode=SimpleNamespace(LAST="last", FULL="full"),
    EagleDraftInput=None,
    EagleDraftExtendInput=TheirExtend,
    RadixAttention=SimpleNamespace,
)


@pytest.fixture(autouse=True)
def _release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every module of a release that plans in three phases has the stand-ins."""
    for module in (batches, backend):
        monkeypatch.setattr(module, "load", lambda _: RELEASE)
    monkeypatch.setattr(graph_planning, "active", lambda: RELEASES["0.5.23"])


def runner(**changes: Any) -> SimpleNamespace:
    """A model runner without a translator."""
    usual: dict[str, Any] = {
        "device": "cpu",
        "kv_index_translator": None,
        "spec_algorithm": None,
        "req_to_token_pool": None,
        "token_to_kv_pool": None,
        "masks_verify": False,
        "captures_full_width": False,
        "extends_draft": False,
        "fuses_rope": False,
        "kv_cache_dtype": FP8,
    }
    return SimpleNamespace(**usual | changes)


def batch(mode: ForwardMode, lens: tuple[int, ...], tokens: int, **more: Any) -> ForwardBatch:
    """Requests of these lengths in rows 3, 4, …; every tensor has memory of its own."""
    return ForwardBatch(
        forward_mode=mode,
        batch_size=len(lens),
        input_ids=torch.zeros(tokens, dtype=torch.int64),
        positions=torch.arange(tokens) + 500,
        req_pool_indices=torch.arange(len(lens)) + 3,
        seq_lens=torch.tensor(lens),
        out_cache_loc=torch.arange(tokens) + 10,
        **{"req_to_token_pool": None, "token_to_kv_pool": None} | more,
    )


def draft_extend() -> ForwardBatch:
    """Four uniform rows of each request, of which 3 and 1 were accepted."""
    spec = EagleDraftExtendInput(None, torch.tensor([3, 1], dtype=torch.int32), None, 4)
    return batch(ForwardMode.DRAFT_EXTEND_V2, (9, 6), 8, spec_info=spec)


def test_a_draft_extend_has_its_prefix_before_its_rows_and_no_bonus_among_its_drafts() -> None:
    ours = draft_extend()
    made = new_batch(ours, runner(), ours.out_cache_loc)
    assert (made.extend_seq_lens_cpu, made.extend_num_tokens) == ([4, 4], 8)
    told = "what is not new is the prefix, on the device as on the host"
    assert made.extend_prefix_lens.tolist() == made.extend_prefix_lens_cpu == [5, 2], told
    assert made.spec_info.num_accept_tokens.tolist() == [3, 1]
    assert made.spec_info.num_correct_drafts.tolist() == [2, 0], "the bonus token is no draft"
    assert made.spec_info.extend_seq_lens_tensor.tolist() == [4, 4]


@pytest.mark.parametrize("scales", [(0.25, 1.0), (1.0, 0.5)], ids=["keys", "values"])
def test_a_layer_that_scales_one_cache_alone_hands_over_both(scales: tuple[float, float]) -> None:
    layer = RadixAttention(0, 4, 2, 64, 64, 0.125, k_scale=scales[0], v_scale=scales[1])
    made = new_layer(layer, "cpu")
    told = "sglang takes a layer without scales for one whose cache is not scaled"
    assert hasattr(made, "k_scale"), told
    assert (made.k_scale.tolist(), made.v_scale.tolist()) == ([scales[0]], [scales[1]])
    assert (made.k_scale_float, made.v_scale_float) == scales


def test_the_mask_of_a_chain_shows_each_draft_token_itself_and_what_is_before_it() -> None:
    spec = EagleVerifyInput(draft_token=torch.zeros(4, dtype=torch.int64), draft_token_num=2)
    mask = chain_mask(batch(ForwardMode.TARGET_VERIFY, (1, 0), 4, spec_info=spec))
    first, second = [1, 1, 0, 1, 1, 1], [1, 0, 1, 1]  # of both queries, key by key
    told = "request behind request, query behind query, a query sees its own key"
    assert mask.int().tolist() == first + second, told


def test_lengths_on_the_host_are_those_of_the_capture() -> None:
    ours = draft_extend()
    on_host = with_host_lens(ours).seq_lens_cpu
    ours.seq_lens.fill_(77)  # as the runner does with its buffer before a replay
    assert on_host is not None
    assert on_host.tolist() == [9, 6], "a copy on the host is none of the device's memory"


def test_a_forward_runs_on_its_own_tensors_in_the_plan_it_was_given() -> None:
    planned = new_batch(draft_extend(), runner(), None)
    padded = batch(ForwardMode.DRAFT_EXTEND_V2, (9, 6, 1), 12)
    served = served_batch(planned, padded)
    assert isinstance(served, TheirBatch)
    assert served.batch_size == 3
    for name in ("input_ids", "positions", "out_cache_loc", "seq_lens", "req_pool_indices"):
        assert getattr(served, name) is getattr(padded, name), f"{name} of the forward that runs"
    assert (served.extend_seq_lens_cpu, served.spec_info) == ([4, 4], planned.spec_info)
    assert planned.batch_size == 2, "the next forward of the plan finds it as it was"


class Planner:
    """A backend of sglang that keeps what it was asked to plan."""

    attn_backends = ("first", "second", "third")

    def __init__(self) -> None:
        self.planned: list[Any] = []
        self.in_capture: list[bool] = []

    def init_forward_metadata(self, made: Any) -> None:
        """An eager plan."""
        self.planned.append(made)

    def init_forward_metadata_out_graph(self, made: Any, in_capture: bool) -> None:
        """A plan of a graph."""
        self.planned.append(made)
        self.in_capture.append(in_capture)


def drafts(lens: tuple[int, ...], first: int) -> ForwardBatch:
    """Slots of three steps, step by step: ``first`` + request + 100 * step."""
    steps = [first + request + 100 * step for step in range(3) for request in range(len(lens))]
    made = batch(ForwardMode.DECODE, lens, 3 * len(lens))
    return made.with_changes(out_cache_loc=torch.tensor(steps))


def slots(made: Any, bs: int) -> list[list[int]]:
    """Slots of each request, as sglang orders them, without the one that no step writes."""
    return [row[:3] for row in made.out_cache_loc.view(bs, 4).tolist()]


def test_a_draft_hands_over_slots_request_after_request_at_a_graphs_own_address() -> None:
    kernel: Any = None
    theirs = Planner()
    ours = SGLangDraftBackend(theirs, runner(), kernel, 4)
    ours.init_forward_metadata_out_graph(drafts((7, 9), 10), in_capture=True)
    ours.init_forward_metadata_out_graph(drafts((8, 3), 40))
    captured, replayed = theirs.planned
    assert theirs.in_capture == [True, False]
    assert captured.out_cache_loc.data_ptr() == replayed.out_cache_loc.data_ptr()
    assert slots(replayed, 2) == [[40, 140, 240], [41, 141, 241]]
    eager = drafts((5, 6), 70)
    ours.init_forward_metadata(eager)
    assert slots(theirs.planned[2], 2) == [[70, 170, 270], [71, 171, 271]]
    assert slots(replayed, 2)[0] == [40, 140, 240], "an eager draft leaves a graph's slots alone"
    eager.seq_lens.add_(1)
    told = "the worker's positions of the first step, which are the committed lengths"
    assert theirs.planned[2].positions.tolist() == [5, 6], told


@pytest.mark.parametrize("full_width", [True, False])
def test_only_a_capture_is_planned_for_lengths_of_its_own_making(full_width: bool) -> None:
    theirs, kernel = Planner(), SimpleNamespace()
    ours = SGLangBackend(theirs, runner(captures_full_width=full_width), kernel)  # type: ignore[arg-type]
    given = draft_extend().with_changes(forward_mode=ForwardMode.DRAFT_EXTEND)
    for in_capture in (True, False):
        ours.init_forward_metadata_out_graph(given, in_capture)
    captured, replayed = theirs.planned
    assert captured.seq_lens_cpu.tolist() == [9, 6]
    wide = [4, 4] if full_width else [3, 1]
    assert captured.spec_info.num_accept_tokens.tolist() == wide
    assert replayed.spec_info.num_accept_tokens.tolist() == [3, 1], "a replay has its real widths"
    assert replayed.seq_lens_cpu is None, "what the scheduler did not read back is not there"


def test_lengths_that_a_plan_lacks_are_those_of_the_batch_it_planned_last() -> None:
    decode = SimpleNamespace(
        seq_lens_k=None, cu_seqlens_q=None, block_kv_indices=None, max_seq_len_q=1
    )
    theirs, kernel = Planner(), SimpleNamespace()
    theirs.forward_decode_metadata = decode  # type: ignore[attr-defined]
    ours = SGLangBackend(theirs, runner(), kernel)  # type: ignore[arg-type]
    seen = []
    for lens in ((7, 9), (8, 3), (4, 5, 6), (1, 2)):
        ours.init_forward_metadata(batch(ForwardMode.DECODE, lens, len(lens)))
        assert ours.forward_metadata is not None
        obtained = ours.forward_metadata.cache_seqlens_int32
        assert obtained is not None
        seen.append(obtained.data_ptr())
        assert (obtained.dtype, tuple(obtained.tolist())) == (torch.int32, lens)
    assert seen[0] == seen[1] == seen[3], "a graph of two requests reads one address"


def test_the_width_of_a_plan_is_its_queries() -> None:
    geometry = SimpleNamespace(max_q_len=4, max_kv_len=70)
    planned = SimpleNamespace(cache_seqlens_int32=torch.tensor([70]), geometry=geometry)
    plan = backend.plan_of(SimpleNamespace(forward_metadata=planned))
    assert plan is not None
    assert plan.max_seq_len_q == 4, "queries, not keys"


@pytest.mark.parametrize(
    ("mode", "dtype", "rotates"),
    [
        (ForwardMode.DECODE, FP8, True),
        (ForwardMode.TARGET_VERIFY, FP8, True),
        (ForwardMode.TARGET_VERIFY, torch.bfloat16, False),
        (ForwardMode.DRAFT_EXTEND_V2, FP8, False),
        (ForwardMode.EXTEND, FP8, False),
    ],
)
def test_a_backend_rotates_what_it_casts_in_decode_and_verify(
    mode: ForwardMode, dtype: torch.dtype, rotates: bool
) -> None:
    kernel: Any = None
    for fuses in (True, False):
        ours = SGLangBackend(Planner(), runner(fuses_rope=fuses, kv_cache_dtype=dtype), kernel)
        obtained = ours._rotates(batch(mode, (5,), 1))
        told = f"{mode.name} in {dtype} with fuses_rope={fuses} rotates in the backend: {obtained}"
        rule = "it rotates what it casts to FP8, in decode and verify"
        assert obtained is (fuses and rotates), f"{told}, but {rule}"


@pytest.mark.parametrize(
    ("extends", "pads", "fill"), [(True, True, 4), (True, False, 1), (False, True, 1)]
)
def test_a_padded_row_has_keys_for_the_queries_that_mla_pads(
    extends: bool, pads: bool, fill: int
) -> None:
    theirs = SimpleNamespace(get_cuda_graph_seq_len_fill_value=lambda: 1, num_draft_tokens=4)
    if pads:
        theirs.padded_q_buffer = None
    kernel: Any = None
    ours = SGLangBackend(theirs, runner(extends_draft=extends), kernel)
    assert ours.get_cuda_graph_seq_len_fill_value() == fill, "a query has a key at least"


def test_a_release_that_does_not_say_when_its_reads_end_is_unknown() -> None:
    kernel: Any = None
    silent = SGLangBackend(SimpleNamespace(), runner(), kernel)
    assert silent.shared_read_ends(ForwardMode.DECODE) is SharedReadEnds.UNKNOWN
    said = {
        ForwardMode.DECODE: SharedReadEnds.IN_REPLAY,
        ForwardMode.TARGET_VERIFY: SharedReadEnds.POST_REPLAY,
    }
    telling = SGLangBackend(SimpleNamespace(shared_read_ends=said.__getitem__), runner(), kernel)
    for mode, ends in said.items():
        assert telling.shared_read_ends(mode) is ends


def test_a_backend_that_says_nothing_wants_lengths_on_the_host() -> None:
    kernel: Any = None
    for says, wants in (({}, True), ({"needs_cpu_seq_lens": False}, False)):
        assert SGLangBackend(SimpleNamespace(**says), runner(), kernel).needs_cpu_seq_lens is wants
