"""Middleware: the limit of a body's size and time, and the API key."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN_PATHS = ("/health",)
"""Paths that need no key."""


def error_body(
    status: int, kind: str, message: str, param: str | None = None
) -> dict[str, dict[str, Any]]:
    """The body of every refusal, in OpenAI's form; ``param`` is the refused field."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def refusal(status: int, kind: str, message: str, param: str | None = None) -> JSONResponse:
    """A response with that body."""
    return JSONResponse(error_body(status, kind, message, param), status_code=status)


class BodyLimit:
    """Reads the whole body before the app gets the request.

    Args:
        app: the next one.
        max_bytes: a larger body is refused with 413.
        patience_s: a slower body is refused with 408.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, patience_s: float) -> None:
        self._app, self._max_bytes, self._patience_s = app, max_bytes, patience_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its body, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await asyncio.wait_for(self._read(receive), self._patience_s)
        except TimeoutError:
            message = f"the body did not arrive within {self._patience_s:g} s"
            await refusal(408, "RequestTimeout", message)(scope, receive, send)
            return
        if body is None:
            message = f"body: at most {self._max_bytes} bytes are accepted"
            await refusal(413, "PayloadTooLarge", message)(scope, receive, send)
            return
        waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return waiting.pop() if waiting else await receive()

        await self._app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytes | None:
        body: bytes = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return body
            body += message.get("body", b"")
            if len(body) > self._max_bytes:
                return None
            if not message.get("more_body", False):
                return body


class ApiKey:
    """Requires ``Authorization: Bearer KEY``.

    Args:
        app: the next one.
        key: the one that is accepted.
    """

    def __init__(self, app: ASGIApp, *, key: str) -> None:
        self._app, self._expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it with 401."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                answer = refusal(401, "Unauthorized", "Authorization: the server's key is accepted")
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)
