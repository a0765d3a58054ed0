"""sglang's HTTP interface over a service: a request's way in, and every refusal's way out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from harness.server.http.generate import Answers
from harness.server.http.middleware import ApiKey, BodyLimit, refusal
from harness.server.http.prometheus import Metrics
from harness.server.http.protocol import AbortRequest, ErrorBody, GenerateRequest, SlowDownRequest
from harness.server.http.service import ClientLeft, FlushRefused, Refused, Service, Unavailable

MAX_BODY_BYTES = 2 << 20
BODY_PATIENCE_S = 20.0
MOST_TIMEOUT_S = 600.0
MOST_ERRORS = 5
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

    app = FastAPI(title="specgate", lifespan=lifespan, responses=REFUSALS)
    metrics = Metrics()
    _generation(app, service, metrics)
    _upkeep(app, service)
    _facts(app, service, metrics)
    _refusals(app)
    if api_key:
        app.add_middleware(ApiKey, key=api_key)
    app.add_middleware(BodyLimit, max_bytes=MAX_BODY_BYTES, patience_s=BODY_PATIENCE_S)
    return app


def _generation(app: FastAPI, service: Service, metrics: Metrics) -> None:
    answers = Answers(service, metrics)

    @app.post("/generate")
    async def generate(asked: GenerateRequest, request: Request) -> Response:
        if not asked.stream:
            return JSONResponse(await _unless_left(request, answers.whole(asked)))
        rid = asked.rid if isinstance(asked.rid, str) else None
        chunks = answers.chunks(rid, asked.prompts[0], asked.sampling_params, stream=True)
        # What is refused is refused by a status, not in the stream.
        first = await _unless_left(request, anext(chunks))

        async def all_chunks() -> AsyncGenerator[dict[str, Any], None]:
            async with aclosing(chunks):
                yield first
                async for chunk in chunks:
                    yield chunk

        return StreamingResponse(answers.events(all_chunks()), media_type="text/event-stream")

    @app.get("/health_generate")
    async def health_generate(request: Request) -> Response:
        sampling = {"max_new_tokens": 1}
        asked = GenerateRequest.model_validate({"input_ids": [1], "sampling_params": sampling})
        return JSONResponse(await _unless_left(request, answers.whole(asked)))


async def _unless_left(request: Request, work: Awaitable[Any]) -> Any:
    """The work's result.

    Raises:
        ClientLeft: the client went away first; the work is cancelled.
    """
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(request.receive())
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
    @app.get("/health")
    async def health() -> Response:
        if service.healthy:
            return Response()
        return refusal(503, "Unavailable", "the engine's process is starting or was lost")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {"id": service.facts["pair"], "object": "model", "owned_by": "specgate"}
        return {"object": "list", "data": [model]}

    @app.get("/server_info")
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
        return refusal(400, "BadRequest", "; ".join(map(_sentence, _clearest(error.errors()))))

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


def _sentence(error: Any) -> str:
    """Field, value and what is accepted, of one of pydantic's errors."""
    parts = [str(part) for part in error["loc"] if part != "body" and "[" not in str(part)]
    field, given = ".".join(parts) or "body", repr(error.get("input"))[:80]
    return f"{field} = {given} is not accepted: {error['msg']}"
