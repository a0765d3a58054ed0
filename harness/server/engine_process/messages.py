"""Messages between the HTTP process and the engine process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.server.http.engine_client import Progress


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of an engine process.

    Args:
        models: folder of the pairs.
        pair: name of one of them.
        spec: "v1", "v2", or "none" for the target alone.
        kernel: "reference", or that of a subject.
        device: such as "cpu".
        num_steps: drafts per round.
        num_draft_tokens: tokens of a chain.
        page_size: tokens per page.
        num_pages: of each pool, the padding page included.
        max_running_requests: others wait.
        context_length: most tokens of a prompt and its generation.
        slowdown: part of every step's time that it sleeps longer: an injected slowdown.
    """

    models: Path
    pair: str
    spec: str
    kernel: str
    device: str
    num_steps: int
    num_draft_tokens: int
    page_size: int
    num_pages: int
    max_running_requests: int
    context_length: int
    slowdown: float


@dataclass(frozen=True)
class Submit:
    """Queue a prompt; with ``stream`` every step sends progress, without it the last.

    Args:
        rid: a name that no other request had before it, in this and in the other messages.
        input_ids: the prompt.
        max_new_tokens: most that are generated.
        ignore_eos: whether to continue after the end token.
        stream: see above.
    """

    rid: str
    input_ids: tuple[int, ...]
    max_new_tokens: int
    ignore_eos: bool
    stream: bool


@dataclass(frozen=True)
class Abort:
    """Take a request out, if it is still there."""

    rid: str


@dataclass(frozen=True)
class SlowDown:
    """Sleep before every step."""

    seconds: float


@dataclass(frozen=True)
class Query:
    """A query, "flush" or "state", that is answered by a ``Reply`` with its ticket."""

    ticket: int
    verb: str


EngineCommand = Submit | Abort | SlowDown | Query


@dataclass(frozen=True)
class Ready:
    """The engine can take requests."""


@dataclass(frozen=True)
class Step:
    """A request's progress."""

    rid: str
    progress: Progress


@dataclass(frozen=True)
class Rejection:
    """A request that can never be served."""

    rid: str
    reason: str


@dataclass(frozen=True)
class Reply:
    """The reply to a query; the error is empty unless it was refused."""

    ticket: int
    value: Any
    error: str = ""


EngineEvent = Ready | Step | Rejection | Reply
