"""The loop of the engine process: commands in, progress out, one step at a time."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

import torch

from harness.engine.request import Request
from harness.errors import ContractError, UsageError, rejected
from harness.server.engine_process.build import build
from harness.server.engine_process.messages import (
    Abort,
    EngineCommand,
    EngineOptions,
    Query,
    Ready,
    Rejection,
    Reply,
    SlowDown,
    Step,
    Submit,
)
from harness.server.http.engine_client import Progress


@dataclass
class ActiveRequest:
    """A request that the scheduler has and the HTTP process waits for.

    Args:
        rid: its id.
        request: the scheduler's side of it.
        started: when it was submitted, seconds of ``time.perf_counter``.
        stream: whether progress is sent after every step, or once at the end.
        sent: generated tokens that were sent already.
    """

    rid: str
    request: Request
    started: float
    stream: bool
    sent: int = 0

    @property
    def finish_reason(self) -> str:
        """Either "length" or "stop"; empty while it runs."""
        if not self.request.finished:
            return ""
        length = len(self.request.generation.token_ids) >= self.request.max_new_tokens
        return "length" if length else "stop"

    @property
    def due(self) -> bool:
        """Whether there is progress to send."""
        unsent = len(self.request.generation.token_ids) > self.sent
        return self.request.finished or (self.stream and unsent)

    def progress(self, finish_reason: str, *, speculative: bool) -> Progress:
        """The progress since the last call; its tokens count as sent."""
        generation = self.request.generation
        new_ids = tuple(generation.token_ids[self.sent :])
        self.sent += len(new_ids)
        return Progress(
            new_ids=new_ids,
            cached_tokens=generation.cached_tokens,
            spec_verify_ct=generation.spec_verify_ct if speculative else 0,
            engine_s=time.perf_counter() - self.started,
            finish_reason=finish_reason,
        )


class EngineLoop:
    """A scheduler driven by commands from a pipe.

    Args:
        pipe: commands come and events go.
        options: what it serves.
    """

    def __init__(self, pipe: Connection, options: EngineOptions) -> None:
        self._pipe, self._slowdown = pipe, options.slowdown
        self._speculative = options.spec != "none"
        self._scheduler, self._vocab_size, self._eos = build(options)
        self._active: dict[str, ActiveRequest] = {}
        self._sleep_s = 0.0

    @torch.inference_mode()
    def serve(self) -> None:
        """Serve until the pipe closes."""
        self._pipe.send(Ready())
        try:
            while True:
                while self._pipe.poll(None if self._scheduler.idle else 0):
                    self._handle(self._pipe.recv())
                if not self._scheduler.idle:
                    self._step()
        except (EOFError, ConnectionError):  # reset where something was left unread
            return

    def _step(self) -> None:
        started = time.perf_counter()
        if self._sleep_s:
            time.sleep(self._sleep_s)
        self._scheduler.step()
        if self._slowdown:
            time.sleep(self._slowdown * (time.perf_counter() - started))
        for active in [*self._active.values()]:
            if active.due:
                self._send_progress(active, active.finish_reason)

    def _send_progress(self, active: ActiveRequest, finish_reason: str) -> None:
        progress = active.progress(finish_reason, speculative=self._speculative)
        self._pipe.send(Step(active.rid, progress))
        if finish_reason:
            del self._active[active.rid]

    def _handle(self, command: EngineCommand) -> None:
        if isinstance(command, Submit):
            try:
                self._submit(command)
            except UsageError as error:
                self._pipe.send(Rejection(command.rid, str(error)))
        elif isinstance(command, Abort):
            active = self._active.get(command.rid)
            if active is not None:
                self._scheduler.abort(active.request)
                self._send_progress(active, "abort")
        elif isinstance(command, SlowDown):
            self._sleep_s = command.seconds
        else:
            self._answer(command)

    def _submit(self, command: Submit) -> None:
        unknown = [token for token in command.input_ids if token >= self._vocab_size]
        if unknown:
            raise UsageError(rejected("input_ids", unknown[0], f"tokens < {self._vocab_size}"))
        started = time.perf_counter()
        eos = None if command.ignore_eos else self._eos
        request = self._scheduler.submit(command.input_ids, command.max_new_tokens, eos=eos)
        self._active[command.rid] = ActiveRequest(command.rid, request, started, command.stream)

    def _answer(self, query: Query) -> None:
        scheduler = self._scheduler
        try:
            if query.verb == "flush":
                value: object = scheduler.flush()
            else:
                counts = {"running": len(scheduler.running), "waiting": len(scheduler.waiting)}
                value = asdict(scheduler.usage) | counts
        except ContractError as error:
            self._pipe.send(Reply(query.ticket, None, str(error)))
            return
        self._pipe.send(Reply(query.ticket, value))
