"""The engine's process: commands in, progress out, one step at a time."""

from __future__ import annotations

import time
from dataclasses import asdict
from multiprocessing.connection import Connection

import torch

from harness.engine.request import Request
from harness.errors import ContractError, UsageError, rejected
from harness.server.engine_process.build import build
from harness.server.engine_process.messages import (
    Abort,
    Ask,
    Command,
    Options,
    Ready,
    Rejection,
    Reply,
    SlowDown,
    Step,
    Submit,
)
from harness.server.http.service import Progress


class EngineLoop:
    """An engine behind a pipe.

    Args:
        pipe: commands come and events go.
        options: what it serves.
    """

    def __init__(self, pipe: Connection, options: Options) -> None:
        self._pipe, self._slowdown = pipe, options.slowdown
        self._speculates = options.spec != "none"
        self._engine, self._vocabulary, self._eos = build(options)
        self._requests: dict[str, Request] = {}
        self._told: dict[str, int] = {}
        self._sleep_s = 0.0
        self._begun: dict[str, float] = {}
        self._streams: set[str] = set()

    @torch.inference_mode()
    def serve(self) -> None:
        """Serve until the pipe closes."""
        self._pipe.send(Ready())
        try:
            while True:
                while self._pipe.poll(None if self._engine.idle else 0):
                    self._take(self._pipe.recv())
                if not self._engine.idle:
                    self._step()
        except (EOFError, BrokenPipeError):
            return

    def _step(self) -> None:
        started = time.perf_counter()
        if self._sleep_s:
            time.sleep(self._sleep_s)
        self._engine.step()
        if self._slowdown:
            time.sleep(self._slowdown * (time.perf_counter() - started))
        for rid in [*self._requests]:
            self._report(rid)

    def _report(self, rid: str) -> None:
        request = self._requests[rid]
        generation = request.generation
        news = rid in self._streams and len(generation.token_ids) > self._told[rid]
        if not (news or request.finished):
            return
        reason = ""
        if request.finished:
            length = len(generation.token_ids) >= request.max_new_tokens
            reason = "length" if length else "stop"
        self._tell(rid, request, reason)
        if reason:
            self._forget(rid)

    def _tell(self, rid: str, request: Request, reason: str) -> None:
        generation = request.generation
        progress = Progress(
            new_ids=tuple(generation.token_ids[self._told[rid] :]),
            cached_tokens=generation.cached_tokens,
            spec_verify_ct=generation.spec_verify_ct if self._speculates else 0,
            engine_s=time.perf_counter() - self._begun[rid],
            finish_reason=reason,
        )
        self._told[rid] = len(generation.token_ids)
        self._pipe.send(Step(rid, progress))

    def _forget(self, rid: str) -> None:
        del self._requests[rid], self._told[rid], self._begun[rid]
        self._streams.discard(rid)

    def _take(self, command: Command) -> None:
        if isinstance(command, Submit):
            try:
                self._submit(command)
            except UsageError as error:
                self._pipe.send(Rejection(command.rid, str(error)))
        elif isinstance(command, Abort):
            request = self._requests.get(command.rid)
            if request is not None:
                self._engine.abort(request)
                self._tell(command.rid, request, "abort")
                self._forget(command.rid)
        elif isinstance(command, SlowDown):
            self._sleep_s = command.seconds
        else:
            self._answer(command)

    def _submit(self, command: Submit) -> None:
        beyond = [token for token in command.input_ids if token >= self._vocabulary]
        if beyond:
            raise UsageError(rejected("input_ids", beyond[0], f"tokens < {self._vocabulary}"))
        begun = time.perf_counter()
        eos = None if command.ignore_eos else self._eos
        request = self._engine.submit(command.input_ids, command.max_new_tokens, eos=eos)
        self._requests[command.rid], self._told[command.rid] = request, 0
        self._begun[command.rid] = begun
        if command.stream:
            self._streams.add(command.rid)

    def _answer(self, question: Ask) -> None:
        engine = self._engine
        try:
            if question.verb == "flush":
                value: object = engine.flush()
            else:
                counts = {"running": len(engine.running), "waiting": len(engine.waiting)}
                value = asdict(engine.usage) | counts
        except ContractError as error:
            self._pipe.send(Reply(question.ticket, None, str(error)))
            return
        self._pipe.send(Reply(question.ticket, value))
