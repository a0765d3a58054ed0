"""Metadata of one speculative round: draft steps, verify and draft extend v2 in one set of buffers.

All of them read the keys of the same requests, and the slots of the whole round are allocated
before it starts. The draft's graph therefore fills the page table that all read, the lengths of its
steps and those of the verify; the verify's graph fills nothing; the extend's fills its lengths.
Two launches a round.

    plan = RoundPlan(speculative_num_steps=3, num_draft_tokens=4)
    draft = TRTLLMHAAttnMultiStepDraftBackend(round_plan=plan, **arguments)
    target, extend = (TRTLLMHAAttnBackend(round_plan=plan, **arguments) for _ in range(2))

and then, as for backends alone, ``init_cuda_graph_state`` and captures, the draft first.
"""

from __future__ import annotations

from dataclasses import replace

from harness.attention.captured import BufferSlice
from harness.attention.geometry import Geometry
from harness.attention.metadata import Metadata, MetadataBuffers
from harness.attention.metadata_writer import MetadataWriter
from harness.errors import ContractError, UsageError, rejected
from harness.upstream.forward_batch_info import ForwardMode

DRAFT, VERIFY, EXTEND = (
    ForwardMode.DECODE,
    ForwardMode.TARGET_VERIFY,
    ForwardMode.DRAFT_EXTEND_V2,
)


class RoundPlan:
    """The buffers that the phases of a round share, and the phases seen in this round.

    Args:
        speculative_num_steps: steps of a round, 2 at least: one backend drafts.
        num_draft_tokens: query tokens per request in verify and extend.

    Raises:
        UsageError: there is nothing to share.
    """

    def __init__(self, *, speculative_num_steps: int, num_draft_tokens: int) -> None:
        if speculative_num_steps < 2:
            accepted = ">= 2, so that a draft fills what the round reads"
            raise UsageError(rejected("speculative_num_steps", speculative_num_steps, accepted))
        self.steps = speculative_num_steps - 1
        self.num_draft_tokens = num_draft_tokens
        self._buffers: MetadataBuffers | None = None
        self._writer: MetadataWriter | None = None
        self._verifies: dict[int, Metadata] = {}
        self._buckets_seen: dict[ForwardMode, int | None] = {}

    @property
    def num_table_keys(self) -> int:
        """Keys beyond the committed ones that the table holds pages of."""
        return max(self.steps, self.num_draft_tokens)

    def buffers(self, writer: MetadataWriter, max_bs: int) -> MetadataBuffers:
        """The buffers, made for the first backend that asks.

        Raises:
            ContractError: a later one asks for more requests or another table.
        """
        if writer.layout.swa_pool is not None:
            raise ContractError(rejected("token_to_kv_pool", "SWAKVPool", "a pool without windows"))
        if self._buffers is None or self._writer is None:
            self._writer = writer
            self._buffers = writer.new_buffers(self._largest(VERIFY, max_bs), phases=self.steps + 2)
        first, rows = self._writer, self._buffers.rows
        if max_bs > rows:
            raise ContractError(rejected("max_bs", max_bs, f"<= {rows}, as the draft was told"))
        for field in ("width", "page_size"):
            asked, held = getattr(writer.layout, field), getattr(first.layout, field)
            if asked != held:
                accepted = f"{held}, as the others of its round"
                raise ContractError(rejected(f"page table {field}", asked, accepted))
        if writer.layout.req_to_token is not first.layout.req_to_token:
            raise ContractError(rejected("req_to_token", "another table", "that of its round"))
        return self._buffers

    def slices(self, writer: MetadataWriter, max_bs: int) -> dict[ForwardMode, BufferSlice]:
        """The slices in which verify and extend are planned."""
        buffers, width = self.buffers(writer, max_bs), self.num_draft_tokens
        # The extend's seq_lens are those of the verify and its queries.
        offsets = ((VERIFY, self.num_table_keys), (EXTEND, self.num_table_keys - width))
        return {
            mode: BufferSlice(
                buffers, self._largest(mode, buffers.rows), self.steps + i, num_table_keys
            )
            for i, (mode, num_table_keys) in enumerate(offsets)
        }

    def verify(self, bs: int) -> Metadata:
        """The verify of a bucket, as the draft fills it."""
        assert self._buffers is not None
        if bs not in self._verifies:
            width = self.num_draft_tokens
            geometry = replace(
                self._largest(VERIFY, bs),
                kv_offset=width,
                table_headroom=self.num_table_keys - width,
            )
            self._verifies[bs] = self._buffers.slice(geometry, self.steps)
        return self._verifies[bs]

    def check_phase_order(self, mode: ForwardMode, bucket: int | None) -> None:
        """Check that a phase reads what the draft of its round fills; called once per phase.

        A phase that is seen a second time begins the next round. A phase *shares* where it has a
        bucket; one that plans for itself has None, and nothing of it is compared.

        ==================  =====================  ==========================  =====================
        seen in this round  then DRAFT             then VERIFY                 then EXTEND
        ==================  =====================  ==========================  =====================
        nothing             accepted               accepted                    must not share
        draft               next round             bucket must be the draft's  likewise
        verify              must be its bucket     next round, if the first    neither may share
                                                   does not share
        draft and verify    next round             next round                  bucket must be the
                                                                               draft's
        ==================  =====================  ==========================  =====================

        Args:
            mode: of the phase; other modes than these three are no part of a round.
            bucket: the batch size of its graph, None where it plans for itself.

        Raises:
            ContractError: a phase would read what the draft of its round does not fill.
        """
        if mode not in (DRAFT, VERIFY, EXTEND):
            return
        seen = self._buckets_seen
        lacks_draft = DRAFT not in seen and seen.get(VERIFY) is not None
        if mode in seen:
            seen.clear()
        seen[mode] = bucket
        if lacks_draft and mode is not DRAFT:
            seen.clear()
            accepted = "the draft that fills what the verify before it reads"
            raise ContractError(rejected("phase", mode.name, accepted))
        readers = [reader for reader in (VERIFY, EXTEND) if seen.get(reader) is not None]
        for reader in readers if DRAFT in seen or mode is EXTEND else ():
            if seen[reader] != seen.get(DRAFT):
                found, drafted = seen[reader], seen.get(DRAFT)
                seen.clear()
                accepted = f"{drafted}, the draft's of its round (None: it shared nothing)"
                raise ContractError(rejected(f"{reader.name} bucket", found, accepted))

    def _largest(self, mode: ForwardMode, bs: int) -> Geometry:
        width = self.num_draft_tokens
        return Geometry(forward_mode=mode, bs=bs, num_tokens=bs * width, max_q_len=width)
