"""Responses of ``/v1/completions`` and ``/v1/chat/completions`` from those of ``/generate``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from harness.server.http.generate import ResponseBodies

UNFINISHED = "\ufffd"
"""The character that bytes of an unfinished one decode to."""


@dataclass(frozen=True, kw_only=True)
class EndpointFormat:
    """The form of one endpoint's responses.

    Args:
        id_prefix: of a response's id.
        response_object: name of the object that is a whole response.
        chunk_object: name of the object that is a chunk of a stream.
        response_content: a choice's content with a whole text.
        chunk_content: a choice's content with a piece of a text.
        first_content: a choice's content in a chunk before any text; None for no such chunk.
    """

    id_prefix: str
    response_object: str
    chunk_object: str
    response_content: Callable[[str], dict[str, Any]]
    chunk_content: Callable[[str], dict[str, Any]]
    first_content: dict[str, Any] | None


COMPLETION = EndpointFormat(
    id_prefix="cmpl",
    response_object="text_completion",
    chunk_object="text_completion",
    response_content=lambda text: {"text": text},
    chunk_content=lambda text: {"text": text},
    first_content=None,
)
CHAT = EndpointFormat(
    id_prefix="chatcmpl",
    response_object="chat.completion",
    chunk_object="chat.completion.chunk",
    response_content=lambda text: {"message": {"role": "assistant", "content": text}},
    chunk_content=lambda text: {"delta": {"content": text}},
    first_content={"delta": {"role": "assistant", "content": ""}},
)


def completion(form: EndpointFormat, model: str, responses: Sequence[Any]) -> dict[str, Any]:
    """A whole response, with a choice for each of ``/generate``."""
    return {
        **_head(form.id_prefix, form.response_object, model),
        "choices": [
            _choice(index, form.response_content(response["text"]), _reason(response))
            for index, response in enumerate(responses)
        ],
        "usage": _usage(responses),
    }


async def completion_chunks(
    form: EndpointFormat, model: str, chunks: ResponseBodies, *, include_usage: bool
) -> ResponseBodies:
    """Chunks of a stream, each with the text that is new; with usage a last one has the counts."""
    head = _head(form.id_prefix, form.chunk_object, model)
    if include_usage:
        head["usage"] = None
    sent: str | None = None
    async with aclosing(chunks):
        async for body in chunks:
            if sent is None:
                sent = ""
                # Not before the first tokens: what is refused is refused by a status.
                if form.first_content:
                    yield head | {"choices": [_choice(0, form.first_content, None)]}
            reason = _reason(body)
            text = body["text"] if reason else body["text"].rstrip(UNFINISHED)
            if reason or len(text) > len(sent):
                yield head | {
                    "choices": [_choice(0, form.chunk_content(text[len(sent) :]), reason)]
                }
                sent = text
    if include_usage:
        yield head | {"choices": [], "usage": _usage([body])}


def _head(id_prefix: str, kind: str, model: str) -> dict[str, Any]:
    name = f"{id_prefix}-{uuid4().hex}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}


def _choice(index: int, content: dict[str, Any], reason: str | None) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": None, "finish_reason": reason}


def _reason(body: Any) -> str | None:
    found = body["meta_info"]["finish_reason"]
    return found["type"] if found else None


def _usage(responses: Sequence[Any]) -> dict[str, Any]:
    prompt, completed, cached = (
        sum(response["meta_info"][name] for response in responses)
        for name in ("prompt_tokens", "completion_tokens", "cached_tokens")
    )
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completed,
        "total_tokens": prompt + completed,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
