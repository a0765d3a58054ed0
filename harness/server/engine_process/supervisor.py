"""The HTTP process's side of the engine process: starts it, restarts it, exchanges messages."""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import signal
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from harness.errors import CheckpointError
from harness.server.engine_process import entry
from harness.server.engine_process.detokenizer import IncrementalDetokenizer
from harness.server.engine_process.messages import (
    Abort,
    EngineCommand,
    EngineEvent,
    EngineOptions,
    Query,
    Ready,
    Rejection,
    Reply,
    SlowDown,
    Step,
    Submit,
)
from harness.server.http.engine_client import (
    FlushRefused,
    Overloaded,
    Progress,
    Refused,
    WorkerLost,
)

MOST_REQUESTS = 1024
FLUSH_POLL_S = 0.02
RESTART_S = 0.5
"""Before another start: an engine that cannot start must not keep the machine busy."""
STOP_S = 5.0


class Supervisor:
    """An ``EngineClient`` of an engine in a process of its own.

    Args:
        options: what the engine serves.

    Attributes:
        cannot_start: its first process ended before it was ready; there will be no other.

    Raises:
        CheckpointError: the pair has no tokenizer.
    """

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._target = options.models / options.pair / "target"
        self._tokenizer = _load_tokenizer(self._target / "tokenizer.json")
        self._context = multiprocessing.get_context("spawn")
        self._requests: dict[str, asyncio.Queue[Progress | Exception]] = {}
        self._keys: dict[str, str] = {}
        self._replies: dict[int, asyncio.Future[Reply]] = {}
        self._tickets = itertools.count()
        self._flushing = self._closing = self._was_ready = False
        self.cannot_start = False
        self._ready = asyncio.Event()
        self._restarts = 0

    @property
    def healthy(self) -> bool:
        """Whether its process takes requests."""
        return self._ready.is_set()

    @property
    def server_info(self) -> Mapping[str, Any]:
        """Its options, its process and how often that was restarted."""
        options = asdict(self._options)
        del options["models"]
        pid = self._process.pid if self.healthy else None
        return options | {"engine": "specgate", "worker_pid": pid, "restarts": self._restarts}

    @cached_property
    def model_info(self) -> Mapping[str, Any]:
        """As in ``EngineClient``, under sglang's names."""
        config = json.loads((self._target / "config.json").read_text(encoding="utf-8"))
        return {
            "model_path": str(self._target),
            "served_model_name": self._options.pair,
            "tokenizer_path": str(self._target),
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": config["model_type"],
            "architectures": config.get("architectures"),
            "max_model_len": self.context_length,
        }

    @property
    def context_length(self) -> int:
        """As in ``EngineClient``."""
        return self._options.context_length

    def encode(self, text: str) -> list[int]:
        """Tokens of a text."""
        return list(self._tokenizer.encode(text).ids)

    def new_detokenizer(self) -> IncrementalDetokenizer:
        """As in ``EngineClient``."""
        return IncrementalDetokenizer(self._tokenizer)

    async def start(self) -> None:
        """Start the process; it may not be ready yet."""
        self._loop = asyncio.get_running_loop()
        self._pipe, theirs = self._context.Pipe()
        self._process = self._context.Process(
            target=entry.run, args=(theirs, self._options), daemon=True, name="specgate engine"
        )
        # Until it ignores a Ctrl-C, which the terminal sends to it too, none reaches it; the
        # tracker is started first, since its start unblocks the signal.
        resource_tracker.ensure_running()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        theirs.close()
        threading.Thread(target=self._listen, args=(self._pipe,), daemon=True).start()

    async def stop(self) -> None:
        """Stop the process and fail what it has not answered."""
        self._closing = True
        self._process.terminate()
        await asyncio.to_thread(self._process.join, STOP_S)

    async def generate(
        self,
        rid: str,
        input_ids: Sequence[int],
        max_new_tokens: int,
        *,
        ignore_eos: bool,
        stream: bool,
    ) -> AsyncGenerator[Progress, None]:
        """As in ``EngineClient``."""
        self._require_ready()
        if self._keys.get(rid, "") in self._requests:
            raise Refused(f"rid = {rid!r} is not accepted; accepted: one that is not in use")
        if len(self._requests) >= MOST_REQUESTS:
            raise Overloaded(f"{MOST_REQUESTS} requests are being served already")
        # Who leaves may come again with its rid before the engine has said its last of the first.
        key = self._keys[rid] = f"{rid}#{next(self._tickets)}"
        queue = self._requests[key] = asyncio.Queue()
        try:
            self._send(Submit(key, tuple(input_ids), max_new_tokens, ignore_eos, stream))
            while True:
                found = await queue.get()
                if isinstance(found, Exception):
                    raise found
                yield found
                if found.finish_reason:
                    return
        finally:
            if self._keys.get(rid) == key:
                del self._keys[rid]
            if self._requests.pop(key, None) is not None and self.healthy:
                self._send(Abort(key))

    def abort(self, rid: str) -> bool:
        """As in ``EngineClient``; the request is answered with the reason "abort"."""
        key = self._keys.get(rid, "")
        known = key in self._requests
        if known and self.healthy:
            self._send(Abort(key))
        return known

    def abort_all(self) -> None:
        """As in ``EngineClient``."""
        for rid in [*self._keys]:
            self.abort(rid)

    def slow_down(self, seconds: float) -> None:
        """As in ``EngineClient``; a restarted process does not sleep."""
        self._require_ready()
        self._send(SlowDown(seconds))

    async def flush(self, timeout_s: float) -> int:
        """As in ``EngineClient``."""
        if self._flushing:
            raise FlushRefused("another flush is pending")
        self._flushing = True
        deadline = self._loop.time() + timeout_s
        try:
            while True:
                reply = await self._query("flush")
                if not reply.error:
                    return int(reply.value)
                if self._loop.time() >= deadline:
                    raise FlushRefused(reply.error)
                await asyncio.sleep(FLUSH_POLL_S)
        finally:
            self._flushing = False

    async def state(self) -> dict[str, Any]:
        """As in ``EngineClient``."""
        return dict((await self._query("state")).value)

    async def _query(self, verb: str) -> Reply:
        self._require_ready()
        ticket = next(self._tickets)
        future = self._replies[ticket] = self._loop.create_future()
        try:
            self._send(Query(ticket, verb))
            reply: Reply = await future
            return reply
        finally:
            del self._replies[ticket]

    def _require_ready(self) -> None:
        if not self.healthy:
            raise WorkerLost("the engine's process is starting or was lost; try again")

    def _send(self, command: EngineCommand) -> None:
        try:
            self._pipe.send(command)
        except OSError as error:
            raise WorkerLost("the engine's process was lost; try again") from error

    def _listen(self, pipe: Connection) -> None:
        """In a thread: hand events to the loop until the process ends."""
        try:
            while True:
                self._loop.call_soon_threadsafe(self._handle, pipe.recv())
        except (EOFError, OSError):
            self._process.join()
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._lost)

    def _handle(self, event: EngineEvent) -> None:
        if isinstance(event, Ready):
            self._was_ready = True
            self._ready.set()
        elif isinstance(event, Step):
            self._deliver(event.rid, event.progress, last=bool(event.progress.finish_reason))
        elif isinstance(event, Rejection):
            self._deliver(event.rid, Refused(event.reason), last=True)
        elif (future := self._replies.get(event.ticket)) and not future.done():
            future.set_result(event)

    def _deliver(self, key: str, found: Progress | Exception, *, last: bool) -> None:
        queue = self._requests.pop(key, None) if last else self._requests.get(key)
        if queue is not None:
            queue.put_nowait(found)

    def _lost(self) -> None:
        self._ready.clear()
        loss = WorkerLost(f"the engine's process ended with {self._process.exitcode}")
        for key in [*self._requests]:
            self._deliver(key, loss, last=True)
        for future in self._replies.values():
            if not future.done():
                future.set_exception(loss)
        if self._closing:
            return
        self.cannot_start = not self._was_ready
        if self._was_ready:
            self._restarts += 1
            self._restart_task = self._loop.create_task(self._restart())

    async def _restart(self) -> None:
        await asyncio.sleep(RESTART_S)
        await self.start()


def _load_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the binding raises bare Exception and nothing narrower
        raise CheckpointError(f"{path} is no tokenizer: {error}") from error
