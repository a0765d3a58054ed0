"""Inputs of a trial have the edges that their row is about."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fixtures.tables import find
from harness.core.case import Layout
from harness.differential import dense, pool_state
from harness.differential.forward_batches import make_batch, pad_batch
from harness.differential.inputs import make_trial_inputs
from harness.differential.pool_state import make_pool_state
from harness.differential.probe_model import rotate
from harness.differential.traced_inputs import FIRST_TRACED
from harness.upstream.forward_batch_info import EagleDraftExtendInput, EagleDraftInput


@pytest.mark.parametrize(("prefix", "evicted"), [(51, 1), (52, 2), (53, 2), (67, 2), (68, 3)])
def test_a_page_is_evicted_as_soon_as_it_is_left_of_the_window(prefix: int, evicted: int) -> None:
    # The query at 52 sees 20 keys to its left: 32 and later, the third page of 16.
    row = find("mha-decode-window_shorter_than_prefix")
    case = replace(row, prefix_lens=(prefix,), window_left=20, page_size=16)
    inputs = make_trial_inputs(case)
    assert inputs.swa_page_of is not None
    (pages,) = inputs.tested.pages
    mapped = [inputs.swa_page_of[page] for page in pages]
    assert mapped[:evicted] == [0] * evicted
    assert 0 not in mapped[evicted:]


def pages_of(layout: Layout) -> tuple[tuple[int, ...], ...]:
    row = find("mha-decode-bs2_ragged")
    lens = (40, 90, 70)  # 3, 6 and 5 pages of 16
    case = replace(row, prefix_lens=lens, page_size=16, layout=layout)
    return make_trial_inputs(case).tested.pages


def test_contiguous_pages_of_a_request_follow_one_another() -> None:
    for own in pages_of(Layout.CONTIGUOUS):
        assert list(own) == list(range(own[0], own[0] + len(own)))


def test_interleaved_pages_of_a_request_have_those_of_others_between() -> None:
    pages = pages_of(Layout.INTERLEAVED)
    for j in range(3):
        assert [own[j] for own in pages] == [3 * j + 1, 3 * j + 2, 3 * j + 3]


def test_shuffled_pages_have_no_order() -> None:
    assert any(list(own) != sorted(own) for own in pages_of(Layout.SHUFFLED))


@pytest.mark.parametrize("row", ["mha-decode-bs2_ragged", "mla-decode-bs2_ragged"])
def test_stale_slots_lie_in_pages_that_nobody_has(row: str) -> None:
    inputs = make_trial_inputs(find(row))
    stale = {slot // find(row).page_size for slot in inputs.stale_slots}
    used = {page for batch in inputs.batches for own in batch.pages for page in own}
    assert len(stale) >= 3
    assert not stale & (used | {0}), "page 0 is the padding's"


@pytest.mark.parametrize(
    "row", ["mha-target_verify-window_bs5_interleaved", "mla-target_verify-bs2_ragged"]
)
def test_a_history_is_the_same_whether_it_is_written_whole_or_request_by_request(
    row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_trial_inputs(find(row))
    whole = make_pool_state(inputs).buffers()
    monkeypatch.setattr(pool_state, "TOGETHER", 1)
    by_request = make_pool_state(inputs).buffers()
    assert whole.keys() == by_request.keys()
    for name, buffer in whole.items():
        same = torch.equal(buffer.view(torch.int16), by_request[name].view(torch.int16))
        assert same, f"{name} holds every request's history, however long all of them are"


@pytest.mark.parametrize("row", ["mha-decode-fp8_cache", "mla-decode-fp8_cache"])
def test_a_history_is_the_same_however_few_tokens_are_cast_at_once(
    row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_trial_inputs(find(row))
    rows = make_pool_state(inputs).buffers()
    pool_state._shared_rows.cache_clear()
    monkeypatch.setattr(dense, "TOKENS_AT_ONCE", 3)
    for name, buffer in make_pool_state(inputs).buffers().items():
        same = torch.equal(buffer.view(torch.uint8), rows[name].view(torch.uint8))
        assert same, f"{name} holds the whole history, cast in parts of three tokens or at once"


def test_dp_padding_that_fills_no_request_is_one_more() -> None:
    inputs = make_trial_inputs(find("mha-target_verify-bs2_ragged"))
    batch = make_batch(make_pool_state(inputs), inputs.tested)
    padded = pad_batch(batch, rows=5, width=4)
    said = "five rows are a request of four and one that is begun"
    assert (padded.batch_size, padded.seq_lens.tolist()[2:]) == (2 + 2, [0, 0]), said
    assert len(padded.input_ids) == len(batch.input_ids) + 5


def test_dp_padding_gives_every_field_of_a_draft_its_rows() -> None:
    inputs = make_trial_inputs(find("mha-multi_step_draft-bs2_ragged"))
    padded = pad_batch(make_batch(make_pool_state(inputs), inputs.tested), rows=3, width=1)
    spec = padded.spec_info
    assert isinstance(spec, EagleDraftInput)
    fields = {"topk_index": spec.topk_index, "topk_p": spec.topk_p, "hidden": spec.hidden_states}
    found = {name: None if tensor is None else len(tensor) for name, tensor in fields.items()}
    said = "two requests and three rows of padding have as many drafts, probabilities and states"
    assert found == dict.fromkeys(fields, 2 + 3), f"{said}: {found}"


@pytest.mark.parametrize(
    ("row", "new"),
    [
        ("mha-target_verify-bs2_ragged", 0),
        ("mha-multi_step_draft-bs2_ragged", 0),
        ("mha-decode-bs2_ragged", 1),
    ],
)
def test_lengths_on_the_host_are_those_on_the_device(row: str, new: int) -> None:
    inputs = make_trial_inputs(find(row))
    batch = make_batch(make_pool_state(inputs), inputs.tested, host_lengths=True)
    lens = [5 + new, 130 + new]
    said = "a verify and a draft are given what is committed, on the host as on the device"
    assert batch.seq_lens_cpu is not None
    assert batch.seq_lens_cpu.tolist() == batch.seq_lens.tolist() == lens, said
    assert batch.seq_lens_sum == sum(lens), f"{said}: their sum, not {batch.seq_lens_sum}"


@pytest.mark.parametrize(
    ("row", "on_host"),
    [("mha-draft_extend_v1-accept_1_3", [1, 3]), ("mha-draft_extend_v2-accept_1_3", None)],
)
def test_the_host_knows_accept_lengths_of_draft_extend_v1_alone(
    row: str, on_host: list[int] | None
) -> None:
    inputs = make_trial_inputs(find(row))
    spec = make_batch(make_pool_state(inputs), inputs.tested).spec_info
    assert isinstance(spec, EagleDraftExtendInput)
    assert spec.num_accept_tokens.tolist() == [1, 3]
    said = "a backend that reads accept lengths of v2 on the host would wait for the device"
    assert spec.num_accept_tokens_cpu == on_host, f"{said}: {spec.num_accept_tokens_cpu}"


@pytest.mark.parametrize("family", ["mha", "mla"])
def test_scores_of_weighted_inputs_are_whole_multiples_of_log_2(family: str) -> None:
    case = find(f"{family}-decode-weighted_fp8_cache")
    inputs = make_trial_inputs(case)
    weights = inputs.weights
    q, k = (weights.q, weights.k) if family == "mha" else (weights.q_rope, weights.k_rope)
    assert q is not None
    assert k is not None
    tokens = torch.arange(len(inputs.traced)) + FIRST_TRACED
    positions = torch.tensor([position for _, position in inputs.traced])
    assert positions.max() > 60
    query, key = (rotate(table[0][tokens], positions)[:, 0] for table in (q, k))
    said = "softmax weights of weighted rows are powers of two, which an FP8 kernel does not round"
    assert weights.scaling * case.k_scale == pytest.approx(math.log(2)), said
    scores = query.double() @ key.double().T * weights.scaling / math.log(2)
    expected = -(tokens % 8).double().expand_as(scores)
    said = "keys of weighted rows are what their FP8 cache holds times its k_scale"
    torch.testing.assert_close(
        scores, expected, rtol=0.0, atol=1e-4, msg=lambda found: f"{said}\n{found}"
    )
