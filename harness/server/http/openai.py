"""From bodies of ``/generate`` to those of ``/v1/completions`` and ``/v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from harness.server.http.generate import Bodies

UNFINISHED = "\ufffd"
"""What the bytes of a character that is not whole yet decode to."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """How one of the two endpoints words an answer.

    Args:
        prefix: of an answer's id.
        whole: name of the object that is a whole answer.
        piece: name of the object that is a chunk of a stream.
        said: a whole text, in a choice.
        added: a piece of a text, in a choice of a chunk.
        opening: a choice's content in a chunk that comes before any text.
    """

    prefix: str
    whole: str
    piece: str
    said: Callable[[str], dict[str, Any]]
    added: Callable[[str], dict[str, Any]]
    opening: dict[str, Any] | None


COMPLETION = Form(
    prefix="cmpl",
    whole="text_completion",
    piece="text_completion",
    said=lambda text: {"text": text},
    added=lambda text: {"text": text},
    opening=None,
)
CHAT = Form(
    prefix="chatcmpl",
    whole="chat.completion",
    piece="chat.completion.chunk",
    said=lambda text: {"message": {"role": "assistant", "content": text}},
    added=lambda text: {"delta": {"content": text}},
    opening={"delta": {"role": "assistant", "content": ""}},
)


def completion(form: Form, model: str, answers: Sequence[Any]) -> dict[str, Any]:
    """A whole answer; a choice for each answer of ``/generate``."""
    return {
        **_head(form.prefix, form.whole, model),
        "choices": [
            _choice(index, form.said(answer["text"]), _reason(answer))
            for index, answer in enumerate(answers)
        ],
        "usage": _usage(answers),
    }


async def completion_chunks(
    form: Form, model: str, chunks: Bodies, *, include_usage: bool
) -> Bodies:
    """Chunks of a stream, each with the text that is new; with usage a last one that counts."""
    head = _head(form.prefix, form.piece, model)
    if include_usage:
        head["usage"] = None
    sent: str | None = None
    async with aclosing(chunks):
        async for body in chunks:
            if sent is None:
                sent = ""
                # Not before the first tokens: what is refused is refused by a status.
                if form.opening:
                    yield head | {"choices": [_choice(0, form.opening, None)]}
            reason = _reason(body)
            text = body["text"] if reason else body["text"].rstrip(UNFINISHED)
            if reason or len(text) > len(sent):
                yield head | {"choices": [_choice(0, form.added(text[len(sent) :]), reason)]}
                sent = text
    if include_usage:
        yield head | {"choices": [], "usage": _usage([body])}


def _head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    name = f"{prefix}-{uuid4().hex}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}


def _choice(index: int, content: dict[str, Any], reason: str | None) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": None, "finish_reason": reason}


def _reason(body: Any) -> str | None:
    found = body["meta_info"]["finish_reason"]
    return found["type"] if found else None


def _usage(answers: Sequence[Any]) -> dict[str, Any]:
    prompt, completed, cached = (
        sum(answer["meta_info"][name] for answer in answers)
        for name in ("prompt_tokens", "completion_tokens", "cached_tokens")
    )
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completed,
        "total_tokens": prompt + completed,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
