"""Metadata of one speculative round: draft steps, verify and draft extend v2 on one sheet.

All of them read the keys of the same requests, and the slots of the whole round are allocated
before it starts. The draft's graph therefore fills the page table that all read, the lengths of its
steps and those of the verify; the verify's graph fills nothing; the extend's fills its lengths.
Two launches a round.
"""

from __future__ import annotations

from harness.backends.geometry import Geometry
from harness.backends.metadata import Metadata, Sheet
from harness.backends.writer import MetadataWriter
from harness.errors import ContractError, UsageError, rejected
from harness.upstream.batch import ForwardMode

DRAFT, VERIFY = "draft", "verify"


class RoundPlan:
    """The sheet, and which phase of it is whose.

    Args:
        speculative_num_steps: steps of a round, 2 at least: one backend drafts.
        num_draft_tokens: query tokens a request in verify and extend.

    Raises:
        UsageError: there is nothing to share.
    """

    def __init__(self, *, speculative_num_steps: int, num_draft_tokens: int) -> None:
        if speculative_num_steps < 2:
            accepted = ">= 2, so that a draft fills what the round reads"
            raise UsageError(rejected("speculative_num_steps", speculative_num_steps, accepted))
        self.steps = speculative_num_steps - 1
        self.num_draft_tokens = num_draft_tokens
        self.sheet: Sheet | None = None
        self._verifies: dict[int, Metadata] = {}
        self._announced: tuple[str, int] | None = None

    @property
    def covers(self) -> int:
        """Keys beyond the committed ones that the table holds pages of."""
        return max(self.steps, self.num_draft_tokens)

    def allocate(self, writer: MetadataWriter, max_bs: int) -> Sheet:
        """The sheet, made for the first who asks.

        Raises:
            ContractError: a later one asks for more requests or another table.
        """
        if self.sheet is None:
            tokens = max_bs * self.num_draft_tokens
            largest = Geometry(
                forward_mode=ForwardMode.TARGET_VERIFY,
                bs=max_bs,
                num_tokens=tokens,
                max_q_len=self.num_draft_tokens,
            )
            self.sheet = writer.sheet(largest, phases=self.steps + 2)
        rows, width = self.sheet.page_table.shape
        if writer.swa_pool is not None:
            raise ContractError(rejected("token_to_kv_pool", "SWAKVPool", "a pool without windows"))
        if max_bs > rows or writer.width != width:
            asked = f"[{max_bs}, {writer.width}]"
            raise ContractError(rejected("shared page table", asked, f"[<= {rows}, {width}]"))
        return self.sheet

    def phase(self, mode: ForwardMode) -> int | None:
        """Which phase of the sheet a mode outside the draft has, None if it has its own."""
        phases = {ForwardMode.TARGET_VERIFY: 0, ForwardMode.DRAFT_EXTEND_V2: 1}
        return self.steps + phases[mode] if mode in phases else None

    def verify(self, bs: int) -> Metadata:
        """The verify of a bucket, as the draft fills it."""
        assert self.sheet is not None
        if bs not in self._verifies:
            width = self.num_draft_tokens
            geometry = Geometry(
                forward_mode=ForwardMode.TARGET_VERIFY,
                bs=bs,
                num_tokens=bs * width,
                max_q_len=width,
                kv_offset=width,
                table_headroom=self.covers - width,
            )
            self._verifies[bs] = self.sheet.cut(geometry, self.steps)
        return self._verifies[bs]

    def announce(self, who: str, bs: int) -> None:
        """Draft and verify of a round tell their buckets before they are replayed, in any order.

        Raises:
            ContractError: their buckets differ, or a verify comes without a draft.
        """
        other, self._announced = self._announced, (who, bs)
        if other is None:
            return
        if other[0] == who:
            if who == VERIFY:
                accepted = "a draft of its round, which fills what it reads"
                raise ContractError(rejected("before a verify", "another verify", accepted))
            return
        self._announced = None
        if other[1] != bs:
            raise ContractError(rejected(f"{who} bucket", bs, f"{other[1]}, the {other[0]}'s"))
