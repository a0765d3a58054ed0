"""Configuration of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from harness.errors import UsageError, rejected


class SpecVersion(IntEnum):
    """Version of the worker's draft extend."""

    V1 = 1
    V2 = 2


@dataclass(frozen=True, kw_only=True)
class SpecConfig:
    """Configuration of an EAGLE worker.

    Args:
        num_steps: drafts per round.
        num_draft_tokens: tokens of a chain, the bonus token included.
        version: v1 extends the draft by the accepted tokens alone, known on the host; v2 extends
            it by all num_draft_tokens and selects a row.

    Raises:
        UsageError: a chain longer than the drafts.
    """

    num_steps: int
    num_draft_tokens: int
    version: SpecVersion = SpecVersion.V2

    def __post_init__(self) -> None:
        if not 2 <= self.num_draft_tokens <= self.num_steps + 1:
            accepted = f"2 … num_steps + 1 = {self.num_steps + 1}"
            raise UsageError(rejected("num_draft_tokens", self.num_draft_tokens, accepted))
