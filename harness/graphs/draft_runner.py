"""Graphs of the multi-step draft: all steps of a round in one recording."""

from __future__ import annotations

from typing import Any

import torch

from harness.errors import UsageError, rejected
from harness.graphs.runner import GraphRunner
from harness.graphs.static_inputs import Extent, Field
from harness.upstream.base_attn_backend import MultiStepDraftBackend
from harness.upstream.forward_batch_info import (
    DraftOutput,
    EagleDraftInput,
    ForwardBatch,
    ForwardMode,
)


def draft_input(batch: ForwardBatch) -> EagleDraftInput:
    """The EAGLE input of a batch that was checked to carry one."""
    assert isinstance(batch.spec_info, EagleDraftInput)
    return batch.spec_info


class DraftRunner(GraphRunner[DraftOutput, MultiStepDraftBackend]):
    """Graphs of speculative_num_steps - 1 draft forwards over a chain (topk = 1).

    Positions follow from seq_lens inside the forward; seq_lens itself never changes. Cache slots
    are step-major, each step padded to the bucket.

    Args:
        attn_backend: plans every step.
        **arguments: further arguments of ``GraphRunner``; mode and num_tokens_per_req (one per
            step) may be left out.

    Raises:
        UsageError: num_tokens_per_req is not the number of draft forwards.
    """

    modes = (ForwardMode.DECODE,)

    def __init__(self, *, attn_backend: MultiStepDraftBackend, **arguments: Any) -> None:
        steps = len(attn_backend.attn_backends)
        arguments = {"mode": ForwardMode.DECODE, "num_tokens_per_req": steps} | arguments
        if arguments["num_tokens_per_req"] != steps:
            accepted = f"{steps}, one token per draft forward"
            raise UsageError(
                rejected("num_tokens_per_req", arguments["num_tokens_per_req"], accepted)
            )
        super().__init__(attn_backend=attn_backend, **arguments)

    def fields(self) -> tuple[Field, ...]:
        """Hidden states are an input where the draft model takes them."""
        fields: tuple[Field, ...] = (
            Field(name="req_pool_indices", read=lambda b: b.req_pool_indices, pad=0),
            Field(name="seq_lens", read=lambda b: b.seq_lens, pad=self.seq_len_pad),
            Field(
                name="out_cache_loc",
                read=lambda b: b.out_cache_loc,
                pad=0,
                steps=self.num_tokens_per_req,
            ),
            Field(name="topk_index", read=lambda b: draft_input(b).topk_index, pad=0, width=(1,)),
            Field(
                name="topk_p",
                read=lambda b: draft_input(b).topk_p,
                pad=0,
                dtype=torch.float32,
                width=(1,),
            ),
        )
        return fields + self.hidden_field(lambda b: draft_input(b).hidden_states)

    def static_batch(self, extent: Extent) -> ForwardBatch:
        """A bucket's part of the static inputs."""
        parts = self.inputs.windows(extent)
        hidden = parts.get("hidden_states")
        seq_lens, topk_index = parts["seq_lens"][0], parts["topk_index"][0]
        return ForwardBatch(
            forward_mode=self.mode,
            batch_size=extent.bucket,
            input_ids=topk_index.view(-1),
            positions=seq_lens,
            req_pool_indices=parts["req_pool_indices"][0],
            seq_lens=seq_lens,
            out_cache_loc=parts["out_cache_loc"].view(-1),
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool=self.token_to_kv_pool,
            spec_info=EagleDraftInput(
                topk_index=topk_index,
                topk_p=parts["topk_p"][0],
                hidden_states=None if hidden is None else hidden[0],
                num_steps=self.attn_backend.speculative_num_steps,
            ),
        )

    def mismatch_reason(self, batch: ForwardBatch) -> str | None:
        """The base class's reasons, and another number of steps than captured."""
        spec = batch.spec_info
        if not isinstance(spec, EagleDraftInput):
            return rejected("spec_info", type(spec).__name__, "EagleDraftInput")
        if spec.num_steps != self.attn_backend.speculative_num_steps:
            return rejected("num_steps", spec.num_steps, self.attn_backend.speculative_num_steps)
        return self.hidden_mismatch_reason(spec.hidden_states) or super().mismatch_reason(batch)

    def trim(self, output: DraftOutput, extent: Extent) -> DraftOutput:
        """The real requests' tokens, logits and hidden states, copied."""
        return DraftOutput(
            draft_tokens=output.draft_tokens[: extent.bs].clone(),
            next_token_logits=output.next_token_logits[: extent.bs].clone(),
            hidden_states=output.hidden_states[: extent.bs].clone(),
        )
