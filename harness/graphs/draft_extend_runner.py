"""Graphs of the draft model catching up with the verified tokens: v1, v2 and v2's baseline."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from harness.errors import rejected
from harness.graphs.runner import GraphRunner
from harness.graphs.static_inputs import Extent, Field, Rows
from harness.upstream.base_attn_backend import AttentionBackend
from harness.upstream.forward_batch_info import (
    EagleDraftExtendInput,
    ForwardBatch,
    ForwardMode,
    LogitsProcessorOutput,
)


def extend_input(batch: ForwardBatch) -> EagleDraftExtendInput:
    """The EAGLE input of a batch that was checked to carry one."""
    assert isinstance(batch.spec_info, EagleDraftExtendInput)
    return batch.spec_info


class DraftExtendRunner(GraphRunner[LogitsProcessorOutput, AttentionBackend]):
    """Graphs of DRAFT_EXTEND (v1) or DRAFT_EXTEND_V2.

    v1: accepted tokens, packed; a padded request accepts one; softmax and top-k of each request's
    last row run in the graph. v2: num_tokens_per_req rows per request, no top-k.

    Args:
        topk: width of the top-k, where there is one.
        **arguments: further arguments of ``GraphRunner``.
    """

    modes = (ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2)

    def __init__(self, *, topk: int = 1, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.topk = topk

    @property
    def is_v2(self) -> bool:
        """Uniform rows."""
        return self.mode is ForwardMode.DRAFT_EXTEND_V2

    @property
    def computes_topk(self) -> bool:
        """Whether softmax and top-k are part of the graph."""
        return not self.is_v2

    @property
    def seq_len_pad(self) -> int:
        """seq_lens include the queries, and no query may stand before its first key."""
        return max(super().seq_len_pad, self.accept_pad)

    @property
    def accept_pad(self) -> int:
        """A padded request fills its rows in v2 and takes the least there is in v1."""
        return super().accept_pad if self.is_v2 else 1

    def fields(self) -> tuple[Field, ...]:
        """Hidden states of the target are an input where the draft model takes them."""
        accepted: dict[str, Any] = {"pad": self.accept_pad, "dtype": torch.int32}
        fields: tuple[Field, ...] = (
            Field(name="req_pool_indices", read=lambda b: b.req_pool_indices, pad=0),
            Field(name="seq_lens", read=lambda b: b.seq_lens, pad=self.seq_len_pad),
            Field(name="input_ids", read=lambda b: b.input_ids, pad=0, rows=Rows.TOKEN),
            Field(name="positions", read=lambda b: b.positions, pad=0, rows=Rows.TOKEN),
            Field(name="out_cache_loc", read=lambda b: b.out_cache_loc, pad=0, rows=Rows.TOKEN),
            Field(
                name="num_accept_tokens",
                read=lambda b: extend_input(b).num_accept_tokens,
                **accepted,
            ),
        )
        if not self.is_v2:
            fields += (Field(name="extend_seq_lens", read=lambda b: b.extend_seq_lens, **accepted),)
        return fields + self.hidden_field(lambda b: extend_input(b).hidden_states, Rows.TOKEN)

    def token_counts(self, bs: int) -> range:
        """v1 is ragged: at least one token per request."""
        most = bs * self.num_tokens_per_req
        return range(most if self.is_v2 else bs, most + 1)

    def static_batch(self, extent: Extent) -> ForwardBatch:
        """A bucket's part of the static inputs."""
        parts: dict[str, Any] = {k: v[0] for k, v in self.inputs.windows(extent).items()}
        spec_info = EagleDraftExtendInput(
            hidden_states=parts.pop("hidden_states", None),
            num_accept_tokens=parts.pop("num_accept_tokens"),
            num_tokens_per_req=self.num_tokens_per_req,
        )
        return ForwardBatch(
            forward_mode=self.mode,
            batch_size=extent.bucket,
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool=self.token_to_kv_pool,
            attn_backend=self.attn_backend,
            spec_info=spec_info,
            **parts,
        )

    def mismatch_reason(self, batch: ForwardBatch) -> str | None:
        """The base class's reasons, and a declared stride that was not captured."""
        spec = batch.spec_info
        if not isinstance(spec, EagleDraftExtendInput):
            return rejected("spec_info", type(spec).__name__, "EagleDraftExtendInput")
        if spec.num_tokens_per_req not in (0, self.num_tokens_per_req):
            return rejected("num_tokens_per_req", spec.num_tokens_per_req, self.num_tokens_per_req)
        return self.hidden_mismatch_reason(spec.hidden_states) or super().mismatch_reason(batch)

    def padded_cpu_lens(self, batch: ForwardBatch, extent: Extent) -> dict[str, Any]:
        """The base class's, and the accept lengths where the host knows them."""
        changes = super().padded_cpu_lens(batch, extent)
        accepted = extend_input(batch).num_accept_tokens_cpu
        if accepted is not None:
            padded = accepted + [self.accept_pad] * (extent.bucket - extent.bs)
            static = extend_input(self._batches[extent.bucket])
            changes["spec_info"] = replace(static, num_accept_tokens_cpu=padded)
        return changes

    def finish(self, output: LogitsProcessorOutput, batch: ForwardBatch) -> LogitsProcessorOutput:
        """Softmax and top-k of the last accepted row of each request."""
        if not self.computes_topk:
            return output
        accepted = extend_input(batch).num_accept_tokens
        if self.is_v2:
            first = torch.arange(batch.batch_size, device=accepted.device) * self.num_tokens_per_req
            rows = first + accepted - 1
        else:
            rows = accepted.cumsum(0) - 1
        probabilities = output.next_token_logits[rows].softmax(-1)
        topk_p, topk_index = probabilities.topk(self.topk)
        return replace(output, topk_p=topk_p, topk_index=topk_index)

    def trim(self, output: LogitsProcessorOutput, extent: Extent) -> LogitsProcessorOutput:
        """Logits and hidden states of the real tokens, top-k of the real requests, copied."""
        copied = LogitsProcessorOutput(
            next_token_logits=output.next_token_logits[: extent.tokens].clone(),
            hidden_states=output.hidden_states[: extent.tokens].clone(),
        )
        if output.topk_p is not None and output.topk_index is not None:
            copied.topk_p = output.topk_p[: extent.bs].clone()
            copied.topk_index = output.topk_index[: extent.bs].clone()
        return copied


class BaselineDraftExtendRunner(DraftExtendRunner):
    """v2 before it dropped its top-k: computed in the graph, copied out, used by nobody."""

    @property
    def computes_topk(self) -> bool:
        """Always."""
        return True
