"""A draft is prefilled with the target's hidden states and the tokens one position later."""

from __future__ import annotations

import pytest
import torch

from fixtures.toys.toy import TARGET
from fixtures.toys.toy_engine import PROMPTS, spec_config, toy_engine
from fixtures.toys.toy_rounds import STEPS, WIDTH
from harness.engine.prefill import chunks
from harness.errors import UsageError
from harness.upstream.forward_batch_info import EagleDraftExtendInput


@pytest.mark.parametrize("chunk_size", [None, 5])
def test_prefill_in_chunks_and_the_draft_one_token_behind(chunk_size: int | None) -> None:
    toy = toy_engine(spec_config(STEPS, WIDTH), chunk_size=chunk_size, needs_cpu=True)
    toy.trace.clear()
    requests = [toy.engine.submit(prompt, 40) for prompt in PROMPTS[:3]]
    toy.engine.step()
    for request in requests:
        said = "a request gets its own first token, whichever chunk its prompt ends in"
        first = int(TARGET.dense(request.prompt).next_token_logits[-1].argmax())
        assert request.tokens[len(request.prompt)] == first, said
    size = chunk_size or 12
    targets, drafts = toy.trace.of("target_extend"), toy.trace.of("draft_prefill")
    assert len(targets) == len(drafts) == -(-12 // size)
    for number, (target, draft) in enumerate(zip(targets, drafts, strict=True)):
        live = [r for r, q in enumerate(requests) if len(q.prompt) > number * size]
        at = [range(number * size, min(number * size + size, len(PROMPTS[r]))) for r in live]
        spans = list(zip(live, at, strict=True))
        for batch, shift in ((target, 0), (draft, 1)):
            ids = [requests[r].tokens[i + shift] for r, span in spans for i in span]
            assert batch.input_ids.tolist() == ids
            assert batch.positions.tolist() == [i for span in at for i in span]
            assert batch.seq_lens.tolist() == [span.stop for span in at]
            assert batch.seq_lens_cpu is not None
            assert batch.seq_lens_cpu.tolist() == [span.stop for span in at]
            assert batch.seq_lens_sum == sum(span.stop for span in at)
            lens = [len(span) for span in at]
            assert batch.extend_seq_lens_cpu == lens
            said = "extend_seq_lens counts the new tokens, not the cached prefix"
            assert batch.extend_seq_lens is not None
            assert batch.extend_seq_lens.tolist() == lens, said
            assert batch.req_pool_indices.tolist() == [1 + r for r in live]
        spec = draft.spec_info
        assert isinstance(spec, EagleDraftExtendInput)
        assert spec.num_accept_tokens.tolist() == [len(span) for span in at]
        assert spec.num_accept_tokens_cpu == [len(span) for span in at]
        assert spec.hidden_states is not None
        dense = [TARGET.dense(PROMPTS[r]).hidden_states[i.start : i.stop] for r, i in spans]
        torch.testing.assert_close(spec.hidden_states, torch.cat(dense))


def test_chunks_go_on_behind_what_is_cached() -> None:
    of_two = [*chunks([[*range(10)], [*range(20, 27)]], 3, [4, 0])]
    found = [chunk.requests for chunk in of_two]
    said = "a request is in a chunk as long as it has tokens left behind what is cached"
    assert found == [[0, 1], [0, 1], [1]], f"{said}: {found}"
    starts = [chunk.starts for chunk in of_two]
    said = "each chunk starts where the one before ended, the first behind what is cached"
    assert starts == [[4, 0], [7, 3], [6]], f"{said}: [[4, 0], [7, 3], [6]], not {starts}"
    ids = [chunk.ids for chunk in of_two]
    said = "a chunk has up to 3 tokens of each prompt, from its start"
    due = [[[4, 5, 6], [20, 21, 22]], [[7, 8, 9], [23, 24, 25]], [[26]]]
    assert ids == due, f"{said}: {due}, not {ids}"


@pytest.mark.parametrize("chunk_size", [0, -3])
def test_a_chunk_has_tokens(chunk_size: int) -> None:
    with pytest.raises(UsageError, match=f"chunk_size = {chunk_size}"):
        toy_engine(chunk_size=chunk_size)
