"""sglang's HTTP interface over a service, and OpenAI's: requests in, answers and refusals out."""

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
from harness.server.http.generate import Answers, Bodies
from harness.server.http.middleware import ApiKey, BodyLimit, refusal
from harness.server.http.neutral_fields import NOT_NEUTRAL
from harness.server.http.prometheus import Metrics
from harness.server.http.protocol import (
    AbortRequest,
    ChatCompletionRequest,
    CompletionRequest,
    ErrorBody,
    GenerateRequest,
    OpenAIRequest,
    SlowDownRequest,
)
from harness.server.http.service import ClientLeft, FlushRefused, Refused, Service, Unavailable

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
    ClientLeft: 499,
    Unavailable: 503,
}
Timeout = Annotated[float, Query(ge=0.0, le=MOST_TIMEOUT_S, allow_inf_nan=False)]


def create_app(
    service: Service,
    *,
    api_key: str | None = None,
    start: Callable[[], Awaitable[None]] | None = None,
    stop: Callable[[], Awaitable[None]] | None = None,
) -> FastAPI:
    """An app.

    Args:
        service: what it serves.
        api_key: asked of every request but ``/health``, if there is one.
        start: awaited before the first request.
        stop: awaited behind the last.
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
    answers = Answers(service, metrics)
    _generation(app, answers)
    _openai(app, service, answers)
    _upkeep(app, service)
    _facts(app, service, metrics)
    _refusals(app)
    if api_key:
        app.add_middleware(ApiKey, key=api_key)
    app.add_middleware(BodyLimit, max_bytes=MAX_BODY_BYTES, patience_s=BODY_PATIENCE_S)
    return app


def _generation(app: FastAPI, answers: Answers) -> None:
    @app.post("/generate")
    async def generate(asked: GenerateRequest, request: Request) -> Response:
        if not asked.stream:
            return JSONResponse(await _unless_left(request, answers.whole(asked)))
        return await _streamed(request, answers, _chunks(answers, asked))

    @app.get("/health_generate")
    async def health_generate(request: Request) -> Response:
        sampling = {"max_new_tokens": 1}
        asked = GenerateRequest.model_validate({"input_ids": [1], "sampling_params": sampling})
        return JSONResponse(await _unless_left(request, answers.whole(asked)))


def _openai(app: FastAPI, service: Service, answers: Answers) -> None:
    async def answer(
        form: openai.Form, asked: OpenAIRequest, generate: GenerateRequest, request: Request
    ) -> Response:
        model = service.model["served_model_name"]
        if not asked.stream:
            found = await _unless_left(request, answers.whole(generate))
            found = found if generate.batched else [found]
            return JSONResponse(openai.completion(form, model, found))
        chunks = openai.completion_chunks(
            form, model, _chunks(answers, generate), include_usage=asked.includes_usage
        )
        return await _streamed(request, answers, chunks)

    @app.post("/v1/completions")
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        return await answer(openai.COMPLETION, asked, asked.to_generate(), request)

    @app.post("/v1/chat/completions")
    async def chat_completions(asked: ChatCompletionRequest, request: Request) -> Response:
        input_ids = service.encode(asked.prompt)
        generate = asked.to_generate(input_ids, service.context_length - len(input_ids))
        return await answer(openai.CHAT, asked, generate, request)


def _chunks(answers: Answers, asked: GenerateRequest) -> Bodies:
    rid = asked.rid if isinstance(asked.rid, str) else None
    return answers.chunks(rid, asked.prompts[0], asked.sampling_params, stream=True)


async def _streamed(request: Request, answers: Answers, chunks: Bodies) -> Response:
    # What is refused is refused by a status, not in the stream.
    first = await _unless_left(request, anext(chunks))

    async def all_chunks() -> AsyncGenerator[dict[str, Any], None]:
        async with aclosing(chunks):
            yield first
            async for chunk in chunks:
                yield chunk

    return StreamingResponse(answers.events(all_chunks()), media_type="text/event-stream")


async def _unless_left(request: Request, work: Awaitable[Any]) -> Any:
    """The work's result.

    Raises:
        ClientLeft: the client went away first; the work is cancelled.
    """
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft("the client went away")
        return task.result()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group
    finally:
        for waiting in (task, leaving):
            waiting.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    """Return when the client has gone; a body that nobody has read, or none, comes first."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _upkeep(app: FastAPI, service: Service) -> None:
    @app.get("/flush_cache", operation_id="get_flush_cache")
    @app.post("/flush_cache", operation_id="flush_cache")
    async def flush_cache(timeout: Timeout = 0.0) -> PlainTextResponse:
        pages = await service.flush(timeout)
        return PlainTextResponse(f"Cache flushed: {pages} pages.\n")

    @app.post("/abort_request")
    async def abort_request(asked: AbortRequest) -> dict[str, bool]:
        if asked.rid is None:
            service.abort_all()
            return {"aborted": True}
        return {"aborted": service.abort(asked.rid)}

    @app.post("/slow_down")
    async def slow_down(asked: SlowDownRequest) -> Response:
        service.slow_down(asked.forward_sleep_time or 0.0)
        return Response()


def _facts(app: FastAPI, service: Service, metrics: Metrics) -> None:
    started = int(time.time())

    def require_healthy() -> None:
        if not service.healthy:
            raise Unavailable("the engine's process is starting or was lost")

    @app.get("/health")
    async def health() -> Response:
        require_healthy()
        return Response()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        # sglang's and OpenAI's clients take this answer for a server that is ready.
        require_healthy()
        name = service.model["served_model_name"]
        model = {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "specgate",
            "root": name,
            "parent": None,
            "max_model_len": service.context_length,
        }
        return {"object": "list", "data": [model]}

    @app.get("/get_model_info", operation_id="get_model_info")
    @app.get("/model_info", operation_id="model_info")
    async def model_info() -> dict[str, Any]:
        return {**service.model, "chat_template": CHAT_TEMPLATE, "default_temperature": 0.0}

    @app.get("/get_server_info", operation_id="get_server_info")
    @app.get("/server_info", operation_id="server_info")
    async def server_info() -> dict[str, Any]:
        state = await service.state()
        if metrics.accept_length is not None:
            state["avg_spec_accept_length"] = metrics.accept_length
        return {**service.facts, "internal_states": [state]}

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(metrics.text(await service.state()), media_type="text/plain")


def _refusals(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        clearest = _clearest(error.errors())
        param = _field(clearest[0]) or None
        return refusal(400, "BadRequest", "; ".join(map(_sentence, clearest)), param)

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        return refusal(error.status_code, "HTTPException", str(error.detail))

    for kind, status in STATUSES.items():
        app.exception_handler(kind)(_answer(status))


def _answer(status: int) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handle(_: Request, error: Exception) -> Response:
        return refusal(status, type(error).__name__, str(error))

    return handle


def _clearest(errors: Sequence[Any]) -> list[Any]:
    """Of each field those of the form it comes closest to, a few of them."""
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
