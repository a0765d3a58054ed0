"""The FastAPI app: sglang's and OpenAI's HTTP endpoints over an engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from harness.errors import rejected
from harness.server.http import openai
from harness.server.http.engine_client import (
    ClientDisconnected,
    EngineClient,
    FlushRefused,
    Refused,
    Unavailable,
)
from harness.server.http.generate import GenerateHandler, ResponseBodies
from harness.server.http.middleware import ApiKey, BodyLimit, refusal
from harness.server.http.neutral_fields import NOT_NEUTRAL
from harness.server.http.prometheus import Metrics
from harness.server.http.protocol import (
    AbortRequest,
    ChatCompletionRequest,
    CompletionRequest,
    ErrorBody,
    GenerateReqInput,
    GenerateRequest,
    OpenAIRequest,
    SlowDownRequest,
)

MAX_BODY_BYTES = 2 << 20
BODY_PATIENCE_S = 20.0
MOST_TIMEOUT_S = 600.0
MOST_ERRORS = 5
CHAT_TEMPLATE = "contents joined by newlines"
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 405, 408, 413, 499, 503)
}
STATUSES: dict[type[Exception], int] = {
    Refused: 400,
    FlushRefused: 400,
    ClientDisconnected: 499,
    Unavailable: 503,
}
Timeout = Annotated[float, Query(ge=0.0, le=MOST_TIMEOUT_S, allow_inf_nan=False)]


def create_app(
    engine: EngineClient,
    *,
    api_key: str | None = None,
    start: Callable[[], Awaitable[None]] | None = None,
    stop: Callable[[], Awaitable[None]] | None = None,
) -> FastAPI:
    """An app.

    Args:
        engine: what it serves.
        api_key: required of every request but ``/health``, None for no key.
        start: awaited before the first request.
        stop: awaited after the last.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if start:
            await start()
        yield
        if stop:
            await stop()

    # Without pages of documentation, which would be fetched from a network.
    app = FastAPI(
        title="specgate", lifespan=lifespan, responses=REFUSALS, docs_url=None, redoc_url=None
    )
    metrics = Metrics()
    handler = GenerateHandler(engine, metrics)
    _add_generation(app, handler)
    _add_openai(app, engine, handler)
    _add_administration(app, engine, metrics)
    _add_information(app, engine, metrics)
    _add_error_handlers(app)
    if api_key:
        app.add_middleware(ApiKey, key=api_key)
    app.add_middleware(BodyLimit, max_bytes=MAX_BODY_BYTES, patience_s=BODY_PATIENCE_S)
    return app


def _add_generation(app: FastAPI, handler: GenerateHandler) -> None:
    @app.post("/generate")
    async def generate(asked: GenerateRequest, request: Request) -> Response:
        if not asked.stream:
            return JSONResponse(await _while_connected(request, handler.response(asked.to_input())))
        return await _streamed(request, handler, handler.chunks(asked.to_input()))

    @app.get("/health_generate")
    async def health_generate(request: Request) -> Response:
        sampling = {"max_new_tokens": 1}
        asked = GenerateRequest.model_validate({"input_ids": [1], "sampling_params": sampling})
        return JSONResponse(await _while_connected(request, handler.response(asked.to_input())))


def _add_openai(app: FastAPI, engine: EngineClient, handler: GenerateHandler) -> None:
    async def answer(
        form: openai.EndpointFormat,
        asked: OpenAIRequest,
        prompts: GenerateReqInput,
        request: Request,
    ) -> Response:
        model = engine.model_info["served_model_name"]
        if not asked.stream:
            found = await _while_connected(request, handler.response(prompts))
            found = found if prompts.batched else [found]
            return JSONResponse(openai.completion(form, model, found))
        chunks = openai.completion_chunks(
            form, model, handler.chunks(prompts), include_usage=asked.includes_usage
        )
        return await _streamed(request, handler, chunks)

    @app.post("/v1/completions")
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        return await answer(openai.COMPLETION, asked, asked.to_input(), request)

    @app.post("/v1/chat/completions")
    async def chat_completions(asked: ChatCompletionRequest, request: Request) -> Response:
        return await answer(openai.CHAT, asked, asked.to_input(), request)


async def _streamed(request: Request, handler: GenerateHandler, chunks: ResponseBodies) -> Response:
    # What is refused is refused by a status, not in the stream.
    first = await _while_connected(request, anext(chunks))

    async def all_chunks() -> AsyncGenerator[dict[str, Any], None]:
        async with aclosing(chunks):
            yield first
            async for chunk in chunks:
                yield chunk

    return StreamingResponse(handler.events(all_chunks()), media_type="text/event-stream")


async def _while_connected(request: Request, work: Awaitable[Any]) -> Any:
    """The work's result.

    Raises:
        ClientDisconnected: the client went away first; the work is cancelled.
    """
    task = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected("the client disconnected")
        return task.result()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group
    finally:
        for waiting in (task, disconnected):
            waiting.cancel()
        await asyncio.gather(task, disconnected, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    """Return when the client disconnects; the messages of an unread body come first."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _add_administration(app: FastAPI, engine: EngineClient, metrics: Metrics) -> None:
    @app.get("/flush_cache", operation_id="get_flush_cache")
    @app.post("/flush_cache", operation_id="flush_cache")
    async def flush_cache(request: Request, timeout: Timeout = 0.0) -> PlainTextResponse:
        # One flush at a time: who has left must not keep others from theirs.
        pages = await _while_connected(request, engine.flush(timeout))
        metrics.flushed()
        return PlainTextResponse(f"Cache flushed: {pages} pages.\n")

    @app.post("/abort_request")
    async def abort_request(asked: AbortRequest) -> dict[str, bool]:
        if asked.rid is None:
            engine.abort_all()
            return {"aborted": True}
        return {"aborted": engine.abort(asked.rid)}

    @app.post("/slow_down")
    async def slow_down(asked: SlowDownRequest) -> Response:
        engine.slow_down(asked.forward_sleep_time or 0.0)
        return Response()


def _add_information(app: FastAPI, engine: EngineClient, metrics: Metrics) -> None:
    started = int(time.time())

    def require_healthy() -> None:
        if not engine.healthy:
            raise Unavailable("the engine's process is starting or was lost")

    @app.get("/health")
    async def health() -> Response:
        require_healthy()
        return Response()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        # sglang's and OpenAI's clients take this answer for a server that is ready.
        require_healthy()
        name = engine.model_info["served_model_name"]
        model = {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "specgate",
            "root": name,
            "parent": None,
            "max_model_len": engine.context_length,
        }
        return {"object": "list", "data": [model]}

    @app.get("/get_model_info", operation_id="get_model_info")
    @app.get("/model_info", operation_id="model_info")
    async def model_info() -> dict[str, Any]:
        return {**engine.model_info, "chat_template": CHAT_TEMPLATE, "default_temperature": 0.0}

    @app.get("/get_server_info", operation_id="get_server_info")
    @app.get("/server_info", operation_id="server_info")
    async def server_info() -> dict[str, Any]:
        state = await engine.state()
        if metrics.accept_length is not None:
            state["avg_spec_accept_length"] = metrics.accept_length
        return {**engine.server_info, "internal_states": [state]}

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(metrics.text(await engine.state()), media_type="text/plain")


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        clearest = _clearest(error.errors())
        param = _field(clearest[0]) or None
        return refusal(400, "BadRequest", "; ".join(map(_sentence, clearest)), param)

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        return refusal(error.status_code, "HTTPException", str(error.detail))

    for kind, status in STATUSES.items():
        app.exception_handler(kind)(_error_handler(status))


def _error_handler(status: int) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handle(_: Request, error: Exception) -> Response:
        param = getattr(error, "param", None)
        return refusal(status, type(error).__name__, str(error), param)

    return handle


def _clearest(errors: Sequence[Any]) -> list[Any]:
    """Of each field the errors of the form that it comes closest to; a few of them."""
    forms: dict[Any, dict[Any, list[Any]]] = {}
    for error in errors:
        _, field, form = (*error["loc"], None, None)[:3]
        forms.setdefault(field, {}).setdefault(form, []).append(error)
    closest = [min(tried.values(), key=len) for tried in forms.values()]
    return [error for found in closest for error in found][:MOST_ERRORS]


def _field(error: Any) -> str:
    """The field that one of pydantic's errors is about, empty for the body."""
    # Between the names stand the forms that a value may have, such as list[constrained-str].
    names = (str(at) for at in error["loc"] if at != "body")
    return ".".join(name for name in names if "[" not in name and "constrained-" not in name)


def _sentence(error: Any) -> str:
    """Field, value and what is accepted, of one of pydantic's errors."""
    field = _field(error) or "body"
    if error["type"] == NOT_NEUTRAL:
        return rejected(field, error["input"], error["ctx"]["accepted"])
    given, why = repr(error.get("input"))[:80], error["msg"].removeprefix("Value error, ")
    return f"{field} = {given} is not accepted: {why}"
