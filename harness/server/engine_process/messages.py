"""What the HTTP process and the engine's process say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.server.http.service import Progress


@dataclass(frozen=True, kw_only=True)
class Options:
    """What an engine's process serves.

    Args:
        models: folder of the pairs.
        pair: name of one of them.
        spec: "v1", "v2", or "none" for plain decoding.
        kernel: "reference", or that of a subject.
        device: such as "cpu".
        num_steps: drafts a round.
        num_draft_tokens: of a chain.
        page_size: tokens a page.
        num_pages: of each pool, the padding page included.
        max_running_requests: others wait.
        context_length: most tokens of a prompt and its generation.
        slowdown: part of every step's time that it sleeps longer: a planted regression.
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
    """Queue a prompt; with ``stream`` every step is told, without it the end."""

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
class Ask:
    """A question that is answered by a ``Reply`` with its ticket: "flush" or "state"."""

    ticket: int
    verb: str


Command = Submit | Abort | SlowDown | Ask


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
    """The answer to a question; an error is what refused it."""

    ticket: int
    value: Any
    error: str = ""


Event = Ready | Step | Rejection | Reply
