"""Every forward of a round gets the positions, lengths, slots and rows the text implies."""

from __future__ import annotations

import pytest
import torch

from fixtures.toys.toy import DRAFT, TARGET
from fixtures.toys.toy_rounds import ROUNDS, STEPS, WIDTH, run, standings
from harness.upstream.forward_batch_info import (
    EagleDraftExtendInput,
    EagleDraftInput,
    EagleVerifyInput,
    ForwardBatch,
    ForwardMode,
)

BOTH = pytest.mark.parametrize("version", [1, 2], ids=["draft_extend_v1", "draft_extend_v2"])


def flat(rows: list[range] | list[list[int]]) -> list[int]:
    return [value for row in rows for value in row]


def assert_batch(
    batch: ForwardBatch, mode: ForwardMode, lens: list[int], at: list[range], slots: list[int]
) -> None:
    assert batch.forward_mode is mode
    assert batch.batch_size == len(lens)
    rows = list(range(1, 1 + len(lens)))
    due = {
        "seq_lens": lens,
        "positions": flat(at),
        "out_cache_loc": slots,
        "req_pool_indices": rows,
    }
    for field, values in due.items():
        assert getattr(batch, field).tolist() == values, f"{field} of {mode.name}"
    for field in ("seq_lens", "positions", "out_cache_loc", "req_pool_indices", "input_ids"):
        dtype = getattr(batch, field).dtype
        assert dtype == torch.int64, f"{field} of {mode.name} is int64, not {dtype}"


@BOTH
@pytest.mark.parametrize("number", range(ROUNDS))
def test_target_verify(version: int, number: int) -> None:
    rig, requests = run(version)
    batch, stood = rig.trace.of("target_verify")[number], standings(rig, requests, number)
    at = [range(s.committed, s.committed + WIDTH) for s in stood]
    slots = flat([s.slots[r.start : r.stop] for s, r in zip(stood, at, strict=True)])
    assert_batch(batch, ForwardMode.TARGET_VERIFY, [s.committed for s in stood], at, slots)
    spec = batch.spec_info
    assert isinstance(spec, EagleVerifyInput)
    assert spec.draft_token_num == WIDTH
    assert torch.equal(spec.draft_token, batch.input_ids)
    for s, chain in zip(stood, batch.input_ids.view(-1, WIDTH).tolist(), strict=True):
        assert chain[: s.accepted] == s.text[s.committed :][: s.accepted]
        if s.accepted < WIDTH:
            assert chain[s.accepted] != s.emitted[-1]


@BOTH
@pytest.mark.parametrize("number", range(ROUNDS))
def test_multi_step_draft(version: int, number: int) -> None:
    rig, requests = run(version)
    batch, stood = rig.trace.of("draft")[number], standings(rig, requests, number)
    committed = [s.committed for s in stood]
    slots = [s.slots[s.committed + step] for step in range(STEPS - 1) for s in stood]
    at = [range(n, n + 1) for n in committed]
    assert_batch(batch, ForwardMode.DECODE, committed, at, slots)
    spec = batch.spec_info
    assert isinstance(spec, EagleDraftInput)
    assert spec.num_steps == STEPS
    assert torch.equal(spec.topk_index[:, 0], batch.input_ids)
    assert spec.hidden_states is not None
    for row, s in enumerate(stood):
        before = TARGET.dense(s.text[: s.committed]).hidden_states
        draft = DRAFT.dense(s.text[1 : s.committed + 1], before)
        said = f"request {row} drafts on from the state of token"
        at = [i for i, h in enumerate(draft.hidden_states) if h.allclose(spec.hidden_states[row])]
        assert at == [s.committed - 1], f"{said} {at or 'none'}, expected {s.committed - 1}"
        probability, token = draft.next_token_logits[-1].softmax(-1).max(-1)
        assert spec.topk_index[row].tolist() == [int(token)]
        torch.testing.assert_close(spec.topk_p[row], probability[None])


@pytest.mark.parametrize("number", range(ROUNDS))
def test_draft_extend_v1(number: int) -> None:
    rig, requests = run(1)
    batch, stood = rig.trace.of("draft_extend")[number], standings(rig, requests, number)
    accepted = [s.accepted for s in stood]
    at = [range(s.committed, s.committed + s.accepted) for s in stood]
    slots = flat([s.slots[r.start : r.stop] for s, r in zip(stood, at, strict=True)])
    assert_batch(batch, ForwardMode.DRAFT_EXTEND, [r.stop for r in at], at, slots)
    assert batch.input_ids.tolist() == flat([s.emitted for s in stood])
    assert batch.extend_seq_lens_cpu == accepted
    assert batch.extend_seq_lens is not None
    assert batch.extend_seq_lens.tolist() == accepted
    assert batch.extend_seq_lens.dtype == torch.int32
    spec = batch.spec_info
    assert isinstance(spec, EagleDraftExtendInput)
    assert spec.num_accept_tokens.tolist() == spec.num_accept_tokens_cpu == accepted
    assert spec.hidden_states is not None
    hidden = torch.cat([s.hidden(s.accepted) for s in stood])
    torch.testing.assert_close(spec.hidden_states, hidden)


@pytest.mark.parametrize("number", range(ROUNDS))
def test_draft_extend_v2(number: int) -> None:
    rig, requests = run(2)
    batch, stood = rig.trace.of("draft_extend")[number], standings(rig, requests, number)
    at = [range(s.committed, s.committed + WIDTH) for s in stood]
    slots = flat([s.slots[r.start : r.stop] for s, r in zip(stood, at, strict=True)])
    assert_batch(batch, ForwardMode.DRAFT_EXTEND_V2, [r.stop for r in at], at, slots)
    spec = batch.spec_info
    assert isinstance(spec, EagleDraftExtendInput)
    assert spec.num_tokens_per_req == WIDTH
    assert spec.num_accept_tokens.tolist() == [s.accepted for s in stood]
    assert spec.num_accept_tokens.dtype == torch.int32
    assert spec.num_accept_tokens_cpu is None
    assert spec.hidden_states is not None
    for s, ids, hidden in zip(
        stood, batch.input_ids.view(3, -1), spec.hidden_states.view(3, WIDTH, -1), strict=True
    ):
        assert ids[: s.accepted].tolist() == s.emitted
        said = "draft extend v2 is fed the target's hidden states of the same tokens"
        torch.testing.assert_close(hidden[: s.accepted], s.hidden(s.accepted), msg=said)
