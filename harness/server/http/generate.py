"""From progress to bodies of ``/generate``: whole, in batches and as server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from harness.errors import ContractError
from harness.server.http.middleware import error_body
from harness.server.http.prometheus import Metrics
from harness.server.http.protocol import GenerateRequest, SamplingParams
from harness.server.http.service import Service, Unavailable

Bodies = AsyncGenerator[dict[str, Any], None]


class Answers:
    """Runs requests on a service.

    Args:
        service: what computes them.
        metrics: where they are counted.
    """

    def __init__(self, service: Service, metrics: Metrics) -> None:
        self._service, self._metrics = service, metrics

    async def whole(self, asked: GenerateRequest) -> Any:
        """The body of an answer, a list of a batch; if one prompt fails, the others are aborted."""
        rids = asked.rid if isinstance(asked.rid, list) else [asked.rid] * len(asked.prompts)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._last(rid, prompt, asked.sampling_params))
                for rid, prompt in zip(rids, asked.prompts, strict=True)
            ]
        bodies = [task.result() for task in tasks]
        return bodies if asked.batched else bodies[0]

    async def events(self, chunks: Bodies) -> AsyncGenerator[str, None]:
        """Server-sent events of chunks; a service that is lost on the way is one of them."""
        async with aclosing(chunks):
            try:
                async for body in chunks:
                    yield f"data: {json.dumps(body)}\n\n"
            except Unavailable as error:
                detail = error_body(503, type(error).__name__, str(error))
                yield f"data: {json.dumps(detail)}\n\n"
        yield "data: [DONE]\n\n"

    async def chunks(
        self, rid: str | None, prompt: Any, sampling: SamplingParams, *, stream: bool
    ) -> Bodies:
        """Cumulative bodies, the last with a finish reason; without ``stream`` the last alone."""
        started = time.perf_counter()
        input_ids = self._service.encode(prompt) if isinstance(prompt, str) else prompt
        name, ids = rid or uuid4().hex, list[int]()
        progress = self._service.generate(
            name,
            input_ids,
            sampling.max_new_tokens,
            ignore_eos=bool(sampling.ignore_eos),
            stream=stream,
        )
        try:
            async with aclosing(progress):
                async for step in progress:
                    ids += step.new_ids
                    reason = {"type": step.finish_reason} if step.finish_reason else None
                    meta = {
                        "id": name,
                        "finish_reason": reason,
                        "prompt_tokens": len(input_ids),
                        "completion_tokens": len(ids),
                        "cached_tokens": step.cached_tokens,
                        "spec_verify_ct": step.spec_verify_ct,
                        "spec_accept_length": len(ids) / max(step.spec_verify_ct, 1),
                        "engine_latency": step.engine_s,
                        "e2e_latency": time.perf_counter() - started,
                    }
                    if reason:
                        self._metrics.answered(len(input_ids), meta)
                    yield {
                        "text": self._service.decode(ids),
                        "output_ids": [*ids],
                        "meta_info": meta,
                    }
        except ContractError:
            self._metrics.failed()
            raise

    async def _last(self, rid: str | None, prompt: Any, sampling: SamplingParams) -> dict[str, Any]:
        body: dict[str, Any] = {}
        async with aclosing(self.chunks(rid, prompt, sampling, stream=False)) as chunks:
            async for chunk in chunks:
                body = chunk
        return body
