"""What an app serves, whoever computes it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from harness.errors import ContractError, UsageError


class Unavailable(ContractError):
    """What was asked cannot be done at the moment."""


class ClientLeft(ContractError):
    """Nobody waits for the answer any more."""


class Overloaded(Unavailable):
    """Too many requests wait already."""


class WorkerLost(Unavailable):
    """The process that computed the request has ended."""


class FlushRefused(ContractError):
    """A cache cannot be emptied: requests run or wait, or another flush is pending."""


class Refused(UsageError):
    """A request that can never be served."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a request has since the last one.

    Args:
        new_ids: tokens, possibly none.
        cached_tokens: of its prompt.
        spec_verify_ct: verify steps so far, 0 without speculation.
        engine_s: since the engine was handed it.
        finish_reason: "length", "stop" or "abort" behind its last tokens, else empty.
    """

    new_ids: tuple[int, ...]
    cached_tokens: int
    spec_verify_ct: int
    engine_s: float
    finish_reason: str = ""


class Service(Protocol):
    """An engine as an app sees it."""

    @property
    def healthy(self) -> bool:
        """Whether it can take requests."""
        ...

    @property
    def facts(self) -> Mapping[str, Any]:
        """What it serves and how; JSON values."""
        ...

    @property
    def model(self) -> Mapping[str, Any]:
        """The model, as ``/model_info`` tells it; JSON values."""
        ...

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its generation."""
        ...

    def encode(self, text: str) -> list[int]:
        """Tokens of a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens."""
        ...

    def generate(
        self,
        rid: str,
        input_ids: Sequence[int],
        max_new_tokens: int,
        *,
        ignore_eos: bool,
        stream: bool,
    ) -> AsyncGenerator[Progress, None]:
        """Greedy continuation; a caller that goes away early aborts it.

        With ``stream`` there is progress after every step, without it once, at the end.

        Raises:
            Refused: it can never be served.
            Unavailable: not now.
        """
        ...

    def abort(self, rid: str) -> bool:
        """Abort a request; whether it was known."""
        ...

    def abort_all(self) -> None:
        """Abort every request."""
        ...

    def slow_down(self, seconds: float) -> None:
        """Sleep so long before every step; 0 stops it.

        Raises:
            Unavailable: not now.
        """
        ...

    async def flush(self, timeout_s: float) -> int:
        """Empty the prefix cache as soon as nothing runs or waits; how many pages it gave back.

        Raises:
            FlushRefused: not idle in time, or another flush is pending.
            Unavailable: not now.
        """
        ...

    async def state(self) -> dict[str, Any]:
        """Counts of the engine: requests, pages, tokens; JSON values.

        Raises:
            Unavailable: not now.
        """
        ...
