"""Graphs of the target model: verification of a chain of draft tokens, and plain decode."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from harness.errors import rejected
from harness.graphs.runner import GraphRunner
from harness.graphs.static_inputs import Extent, Field, Rows
from harness.upstream.base_attn_backend import AttentionBackend
from harness.upstream.forward_batch_info import (
    EagleVerifyInput,
    ForwardBatch,
    ForwardMode,
    LogitsProcessorOutput,
)


def custom_mask(batch: ForwardBatch) -> torch.Tensor | None:
    """The flat mask of a verify batch, if it carries one."""
    return batch.spec_info.custom_mask if isinstance(batch.spec_info, EagleVerifyInput) else None


class TargetVerifyRunner(GraphRunner[LogitsProcessorOutput, AttentionBackend]):
    """Graphs of TARGET_VERIFY (num_tokens_per_req draft tokens) or DECODE (one token) per request.

    With an overlap plan stream, ``prepare`` runs before the draft tokens are known, the worker
    calls the backend's ``update_verify_buffers_to_fill_after_draft`` when they are, and ``run``
    fills in token ids and mask and replays. ``replay`` does the first and the last.
    """

    modes = (ForwardMode.TARGET_VERIFY, ForwardMode.DECODE)

    def fields(self) -> tuple[Field, ...]:
        """Token ids are filled after drafting, which decides them."""
        return (
            Field(name="req_pool_indices", read=lambda b: b.req_pool_indices, pad=0),
            Field(name="seq_lens", read=lambda b: b.seq_lens, pad=self.seq_len_pad),
            Field(name="positions", read=lambda b: b.positions, pad=0, rows=Rows.TOKEN),
            Field(name="out_cache_loc", read=lambda b: b.out_cache_loc, pad=0, rows=Rows.TOKEN),
            Field(
                name="input_ids",
                read=lambda b: b.input_ids,
                pad=0,
                rows=Rows.TOKEN,
                filled_after_draft=True,
            ),
        )

    def adopt_backend_buffers(self) -> None:
        """The mask lies in the backend's memory, where a tree builder may write it in place."""
        mask = self.attn_backend.verify_mask
        if self.mode is ForwardMode.TARGET_VERIFY and mask is not None:
            field = Field(
                name="custom_mask",
                read=partial(self._mask_of, len(mask.buffer)),
                pad=True,
                dtype=mask.buffer.dtype,
                rows=Rows.ANY,
                filled_after_draft=True,
            )
            self.inputs.adopt(field, mask.buffer)

    def _mask_of(self, size: int, batch: ForwardBatch) -> torch.Tensor | None:
        """The mask of a batch; of the backend's own buffer the ``size`` elements it had at capture.

        A larger runner makes that buffer anew and longer; no bucket here needs more than it had.
        """
        mask, own = custom_mask(batch), self.attn_backend.verify_mask
        return mask[:size] if mask is not None and own is not None and mask is own.buffer else mask

    def static_batch(self, extent: Extent) -> ForwardBatch:
        """A bucket's part of the static inputs."""
        parts: dict[str, Any] = {k: v[0] for k, v in self.inputs.windows(extent).items()}
        mask = parts.pop("custom_mask", None)
        spec_info = None
        if self.mode is ForwardMode.TARGET_VERIFY:
            spec_info = EagleVerifyInput(parts["input_ids"], self.num_tokens_per_req, mask)
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
        """The base class's reasons, and another number of draft tokens than captured."""
        spec = batch.spec_info
        wanted = EagleVerifyInput if self.mode is ForwardMode.TARGET_VERIFY else type(None)
        if (reason := super().mismatch_reason(batch)) is not None:
            return reason
        if not isinstance(spec, wanted):
            return rejected("spec_info", type(spec).__name__, wanted.__name__)
        if isinstance(spec, EagleVerifyInput) and spec.draft_token_num != self.num_tokens_per_req:
            return rejected("draft_token_num", spec.draft_token_num, self.num_tokens_per_req)
        return None

    def trim(self, output: LogitsProcessorOutput, extent: Extent) -> LogitsProcessorOutput:
        """Logits and hidden states of the real tokens, copied."""
        return LogitsProcessorOutput(
            next_token_logits=output.next_token_logits[: extent.tokens].clone(),
            hidden_states=output.hidden_states[: extent.tokens].clone(),
        )
