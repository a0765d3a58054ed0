"""Geometry of a planned forward: its requests, query rows and extra keys, known to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harness.errors import ContractError, rejected
from harness.upstream.forward_batch_info import (
    EagleDraftExtendInput,
    EagleVerifyInput,
    ForwardBatch,
    ForwardMode,
)


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The geometry of a planned forward, known to the host; frozen at capture.

    Args:
        forward_mode: the phase.
        bs: planned requests.
        num_tokens: planned query rows; rows of padding after them are not part of the plan.
        max_q_len: query tokens per request, or their bound where they are ragged.
        is_ragged: whether query lengths differ by request.
        pads_queries: whether ragged queries are padded to max_q_len for a uniform kernel.
        kv_offset: keys that a request sees beyond ``seq_lens``.
        table_headroom: keys beyond those whose pages the page table holds too, because a later
            phase reads the same table.
    """

    forward_mode: ForwardMode
    bs: int
    num_tokens: int
    max_q_len: int
    is_ragged: bool = False
    pads_queries: bool = False
    kv_offset: int = 0
    table_headroom: int = 0

    @property
    def table_offset(self) -> int:
        """Keys beyond ``seq_lens`` that the page table covers."""
        return self.kv_offset + self.table_headroom


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Derives geometry from a batch, without reading a device tensor except at capture.

    Args:
        num_draft_tokens: query tokens per request in target_verify.
        speculative_step_id: i for step i of a multi-step draft, else None.
        padded_modes: ragged modes whose queries are padded to the longest.
    """

    num_draft_tokens: int
    speculative_step_id: int | None
    padded_modes: frozenset[ForwardMode]

    def geometry(self, batch: ForwardBatch, in_capture: bool) -> Geometry:
        """The geometry of an eager or a captured forward.

        Rows count by ``seq_lens``, not by ``batch_size``, which DP padding may have raised.
        """
        mode, bs, offset = batch.forward_mode, batch.seq_lens.shape[0], 0
        if mode in (ForwardMode.EXTEND, ForwardMode.DRAFT_EXTEND):
            return self._ragged(batch, bs, in_capture)
        if mode.is_target_verify():
            q_len = offset = self._verify_width(batch)
        elif mode.is_draft_extend_v2():
            q_len = draft_extend_stride(batch, in_capture)
        else:
            q_len = 1
            if self.speculative_step_id is not None:
                offset = self.speculative_step_id + 1
        tokens = bs * q_len
        return Geometry(
            forward_mode=mode, bs=bs, num_tokens=tokens, max_q_len=q_len, kv_offset=offset
        )

    def _ragged(self, batch: ForwardBatch, bs: int, in_capture: bool) -> Geometry:
        tokens = batch.input_ids.shape[0]
        if in_capture and (tokens < bs or tokens % bs):
            accepted = f"a positive multiple of bs = {bs}, so that each request has its rows"
            raise ContractError(rejected("num_tokens", tokens, accepted))
        return Geometry(
            forward_mode=batch.forward_mode,
            bs=bs,
            num_tokens=tokens,
            max_q_len=tokens // bs if in_capture else self._longest_query(batch),
            is_ragged=True,
            pads_queries=batch.forward_mode in self.padded_modes,
        )

    def _verify_width(self, batch: ForwardBatch) -> int:
        width, spec = self.num_draft_tokens, batch.spec_info
        if isinstance(spec, EagleVerifyInput) and spec.draft_token_num != width:
            accepted = f"{width}, the backend's num_draft_tokens"
            raise ContractError(rejected("draft_token_num", spec.draft_token_num, accepted))
        if width < 1:
            raise ContractError(rejected("num_draft_tokens", width, ">= 1 in target_verify"))
        return width

    def _longest_query(self, batch: ForwardBatch) -> int:
        """The longest ragged query where the host knows it, else a bound that needs no read."""
        known = batch.extend_seq_lens_cpu
        spec, bound = batch.spec_info, 0
        if batch.forward_mode.is_draft_extend() and isinstance(spec, EagleDraftExtendInput):
            known = spec.num_accept_tokens_cpu or known
            bound = spec.num_tokens_per_req or self.num_draft_tokens
        if known:
            return max(known)
        return min(bound or batch.input_ids.shape[0], batch.input_ids.shape[0])


def draft_extend_stride(batch: ForwardBatch, in_capture: bool) -> int:
    """Uniform rows per request in draft_extend_v2.

    A capture may leave it unset; the largest accept count of the captured batch stands in, and
    this is the only host read.

    Raises:
        ContractError: it is zero.
    """
    spec = batch.spec_info
    if not isinstance(spec, EagleDraftExtendInput):
        raise ContractError(
            rejected("spec_info", type(spec).__name__, EagleDraftExtendInput.__name__)
        )
    stride = spec.num_tokens_per_req
    if not stride and in_capture and spec.num_accept_tokens.numel():
        stride = int(spec.num_accept_tokens.max())
    if stride < 1:
        raise ContractError(rejected("num_tokens_per_req", stride, ">= 1 in draft_extend_v2"))
    return stride


def check_stride(batch: ForwardBatch, captured: Geometry) -> None:
    """Refuse a draft_extend_v2 that declares another stride than its graph was captured with.

    Raises:
        ContractError: naming both.
    """
    spec = batch.spec_info
    if not batch.forward_mode.is_draft_extend_v2() or not isinstance(spec, EagleDraftExtendInput):
        return
    if spec.num_tokens_per_req not in (0, captured.max_q_len):
        accepted = f"{captured.max_q_len}, the captured stride"
        raise ContractError(rejected("num_tokens_per_req", spec.num_tokens_per_req, accepted))


def query_lens(batch: ForwardBatch) -> torch.Tensor:
    """[bs] query tokens per request of a ragged phase, on the device.

    Raises:
        ContractError: the batch carries none.
    """
    spec = batch.spec_info
    if batch.forward_mode.is_draft_extend() and isinstance(spec, EagleDraftExtendInput):
        return spec.num_accept_tokens
    if batch.extend_seq_lens is None:
        accepted = "a tensor, or num_accept_tokens in a draft extend"
        raise ContractError(rejected("extend_seq_lens", None, accepted))
    return batch.extend_seq_lens
