"""The engine as the HTTP app sees it: its interface, its progress and its errors."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from harness.errors import ContractError, UsageError

Detokenize = Callable[[Sequence[int]], str]
"""Takes the next tokens of one request and returns the text of all its tokens so far."""


class Unavailable(ContractError):
    """The engine cannot do at the moment what was asked."""


class ClientDisconnected(ContractError):
    """The client closed the connection before the answer."""


class Overloaded(Unavailable):
    """Too many requests wait already."""


class WorkerLost(Unavailable):
    """The process that computed the request has ended."""


class FlushRefused(ContractError):
    """A cache cannot be emptied: requests run or wait, or another flush is pending."""


class Refused(UsageError):
    """A request that can never be served.

    Args:
        message: field, value and what is accepted.
        param: the field, None where it is not known.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a request since its last one.

    Args:
        new_ids: tokens, possibly none.
        cached_tokens: of its prompt.
        spec_verify_ct: verify steps so far, 0 without speculation.
        engine_s: seconds since the engine got it.
        finish_reason: "length", "stop" or "abort" with its last tokens, else empty.
    """

    new_ids: tuple[int, ...]
    cached_tokens: int
    spec_verify_ct: int
    engine_s: float
    finish_reason: str = ""


class EngineClient(Protocol):
    """An engine that runs elsewhere."""

    @property
    def healthy(self) -> bool:
        """Whether it can take requests."""
        ...

    @property
    def server_info(self) -> Mapping[str, Any]:
        """Its options and its process; JSON values."""
        ...

    @property
    def model_info(self) -> Mapping[str, Any]:
        """The model, as ``/model_info`` shows it; JSON values."""
        ...

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its generation."""
        ...

    def encode(self, text: str) -> list[int]:
        """Tokens of a text."""
        ...

    def new_detokenizer(self) -> Detokenize:
        """A detokenizer for one request."""
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
        """Greedy continuation; closing the generator early aborts it.

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
        """Empty the prefix cache as soon as nothing runs or waits; how many pages were freed.

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
