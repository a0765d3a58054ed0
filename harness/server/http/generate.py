"""Responses of ``/generate``: whole, in batches and as server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from harness.errors import ContractError, rejected
from harness.server.http.engine_client import EngineClient, Refused, Unavailable
from harness.server.http.middleware import error_body
from harness.server.http.prometheus import Metrics
from harness.server.http.protocol import GenerateReqInput

ResponseBodies = AsyncGenerator[dict[str, Any], None]


class GenerateHandler:
    """Runs requests on an engine.

    Args:
        engine: what computes them.
        metrics: where they are counted.
    """

    def __init__(self, engine: EngineClient, metrics: Metrics) -> None:
        self._engine, self._metrics = engine, metrics

    async def response(self, asked: GenerateReqInput) -> Any:
        """The whole body, a list for a batch; if one prompt fails, the others are aborted."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._last(asked, index)) for index in range(len(asked.prompts))
            ]
        bodies = [task.result() for task in tasks]
        return bodies if asked.batched else bodies[0]

    async def events(self, chunks: ResponseBodies) -> AsyncGenerator[str, None]:
        """Server-sent events of chunks; a loss of the engine is one of them."""
        async with aclosing(chunks):
            try:
                async for body in chunks:
                    yield f"data: {json.dumps(body)}\n\n"
            except Unavailable as error:
                detail = error_body(503, type(error).__name__, str(error))
                yield f"data: {json.dumps(detail)}\n\n"
        yield "data: [DONE]\n\n"

    async def chunks(
        self, asked: GenerateReqInput, index: int = 0, *, stream: bool = True
    ) -> ResponseBodies:
        """Cumulative bodies of one prompt, the last with a finish reason; else the last alone.

        Raises:
            Refused: prompt and limit do not fit the context.
        """
        started = time.perf_counter()
        prompt = asked.prompts[index]
        input_ids = self._engine.encode(prompt) if isinstance(prompt, str) else prompt
        rid, output_ids = asked.rids[index] or uuid4().hex, list[int]()
        detokenize = self._engine.new_detokenizer()
        try:
            steps = self._engine.generate(
                rid,
                input_ids,
                self._limit(asked, len(input_ids)),
                ignore_eos=asked.ignore_eos,
                stream=stream,
            )
            async with aclosing(steps):
                async for step in steps:
                    output_ids += step.new_ids
                    reason = {"type": step.finish_reason} if step.finish_reason else None
                    meta = {
                        "id": rid,
                        "finish_reason": reason,
                        "prompt_tokens": len(input_ids),
                        "completion_tokens": len(output_ids),
                        "cached_tokens": step.cached_tokens,
                        "spec_verify_ct": step.spec_verify_ct,
                        "spec_accept_length": len(output_ids) / max(step.spec_verify_ct, 1),
                        "engine_latency": step.engine_s,
                        "e2e_latency": time.perf_counter() - started,
                    }
                    if reason:
                        self._metrics.answered(len(input_ids), meta)
                    yield {
                        "text": detokenize(step.new_ids),
                        "output_ids": [*output_ids],
                        "meta_info": meta,
                    }
        except ContractError:
            self._metrics.failed()
            raise

    def _limit(self, asked: GenerateReqInput, prompt_tokens: int) -> int:
        """Tokens to generate at most.

        Raises:
            Refused: prompt or limit do not fit the context; under the client's names.
        """
        longest = self._engine.context_length - prompt_tokens
        if longest < 1:
            most = self._engine.context_length - 1
            message = rejected(f"tokens of {asked.prompt_field}", prompt_tokens, f"at most {most}")
            raise Refused(message, asked.prompt_field)
        limit = longest if asked.max_new_tokens is None else asked.max_new_tokens
        if limit > longest:
            accepted = f"1 … {longest} after {prompt_tokens} prompt tokens"
            raise Refused(rejected(asked.limit_field, limit, accepted), asked.limit_field)
        return limit

    async def _last(self, asked: GenerateReqInput, index: int) -> dict[str, Any]:
        body: dict[str, Any] = {}
        async with aclosing(self.chunks(asked, index, stream=False)) as chunks:
            async for chunk in chunks:
                body = chunk
        return body
