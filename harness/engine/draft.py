"""The multi-step draft: num_steps - 1 forwards of the draft model, each fed by the one before."""

from __future__ import annotations

from collections.abc import Callable

import torch

from harness.engine.models.base import Model
from harness.upstream.base_attn_backend import MultiStepDraftBackend
from harness.upstream.forward_batch_info import DraftOutput, EagleDraftInput, ForwardBatch


def multi_step_draft(
    model: Model, backend: MultiStepDraftBackend
) -> Callable[[ForwardBatch], DraftOutput]:
    """A recordable forward over all steps of a planned draft batch with topk = 1.

    Step i feeds draft token i at position seq_lens + i, writes its key and value to
    ``out_cache_loc[i]`` and proposes draft token i + 1.
    """

    def forward(batch: ForwardBatch) -> DraftOutput:
        draft = batch.spec_info
        assert isinstance(draft, EagleDraftInput)
        steps = len(backend.attn_backends)
        cache_locs = batch.out_cache_loc.view(steps, batch.batch_size)
        token, hidden = draft.topk_index[:, 0], draft.hidden_states
        tokens, logits = [token], []
        hiddens = []
        for i, step_backend in enumerate(backend.attn_backends):
            step = batch.with_changes(
                input_ids=token,
                positions=batch.seq_lens + i,
                out_cache_loc=cache_locs[i],
                attn_backend=step_backend,
                spec_info=EagleDraftInput(draft.topk_index, draft.topk_p, hidden, draft.num_steps),
            )
            output = model.forward(token, step.positions, step)
            token, hidden = output.next_token_logits.argmax(-1), output.hidden_states
            tokens.append(token)
            logits.append(output.next_token_logits)
            hiddens.append(hidden)
        return DraftOutput(
            draft_tokens=torch.stack(tokens, 1),
            next_token_logits=torch.stack(logits, 1),
            hidden_states=torch.stack(hiddens, 1),
        )

    return forward
