"""The scheduler: continuous batching, finishing, retraction and the statistics of a generation."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from harness.engine.batch_state import join, select
from harness.engine.kv_lease import SlotTable
from harness.engine.kv_manager import KVCacheManager, KVUsage
from harness.engine.prefix_cache import PrefixCache
from harness.engine.request import Generation, Request
from harness.engine.worker_interface import Worker
from harness.errors import CapacityError, ContractError, UsageError, rejected


class Scheduler:
    """Runs up to max_bs requests at a time; others wait, in order.

    Where pages run out, the youngest running request is retracted: its pages are
    freed and it waits at the front, to be computed again from its prompt and generated tokens.

    Args:
        worker: speculative or not.
        slots: of the worker's pools.
        max_bs: most requests at a time.
        max_context_len: most tokens of a prompt and its generation.
        prefix_cache: over the slots' allocator; without one every prompt is computed whole.

    Raises:
        UsageError: max_bs is below 1, a last round does not fit the table, or a prefix cache is to
            share a hybrid pool.
    """

    def __init__(
        self,
        worker: Worker,
        slots: SlotTable,
        *,
        max_bs: int,
        max_context_len: int,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        columns = slots.req_to_token_pool.req_to_token.shape[1]
        if max_bs < 1:
            raise UsageError(rejected("max_bs", max_bs, ">= 1"))
        if max_context_len + worker.headroom > columns:
            accepted = f"<= {columns - worker.headroom}, the table's columns less the headroom"
            raise UsageError(rejected("max_context_len", max_context_len, accepted))
        self._worker = worker
        self._slots = slots
        self._max_bs = max_bs
        self._max_context_len = max_context_len
        self._kv_manager = KVCacheManager(slots, worker.streams, prefix_cache)
        self._state = worker.prefill([], [], [])
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, eos: int | None = None
    ) -> list[Generation]:
        """Greedy continuations, in the order of the prompts.

        Raises:
            UsageError: a prompt is empty or too long, or nothing is to be generated.
            CapacityError: a request does not fit the pools even alone. Nothing stays allocated.
        """
        requests = [self._request(prompt, max_new_tokens, eos) for prompt in prompts]
        self.waiting.extend(requests)
        try:
            while self.running or self.waiting:
                self.step()
        finally:
            for request in requests:
                self.abort(request)
        return [request.generation for request in requests]

    def submit(
        self, prompt: Sequence[int], max_new_tokens: int, *, eos: int | None = None
    ) -> Request:
        """Queue a prompt.

        Raises:
            UsageError: it is empty or too long, nothing is to be generated, or its last round
                would not fit the pools even if it ran alone.
        """
        request = self._request(prompt, max_new_tokens, eos)
        tokens = len(prompt) + max_new_tokens - 1 + self._worker.headroom
        if tokens > self._slots.capacity:
            accepted = f"<= {self._slots.capacity}, the pools'"
            raise UsageError(rejected("tokens of a request and a round", tokens, accepted))
        self.waiting.append(request)
        return request

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        return not (self.running or self.waiting)

    @property
    def usage(self) -> KVUsage:
        """Page counts."""
        return self._kv_manager.usage(self.running)

    def flush(self) -> int:
        """Evict every prefix; how many pages were freed.

        Raises:
            ContractError: requests run or wait.
        """
        if not self.idle:
            asked = f"{len(self.running)} running, {len(self.waiting)} waiting requests"
            raise ContractError(rejected("flush with", asked, "none"))
        return self._kv_manager.clear()

    def step(self) -> None:
        """Admit requests, run one round, release finished ones; without requests run idle."""
        self._admit()
        self._reserve_round()
        self._state, output = self._worker.step(self._state)
        for request, tokens in zip(self.running, output.tokens(), strict=True):
            self._slots.commit(request.held, len(tokens))
            request.generation.accept_lengths.append(len(tokens))
            request.emit(tokens)
        self._retire()

    def retract(self, request: Request) -> None:
        """Free a running request's pages; it is computed again later."""
        self._drop(request)
        self.waiting.appendleft(request)

    def abort(self, request: Request) -> None:
        """Remove a running or waiting request; a finished one is left alone."""
        if request in self.running:
            self._drop(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def _request(self, prompt: Sequence[int], max_new_tokens: int, eos: int | None) -> Request:
        longest = self._max_context_len - len(prompt)
        if not prompt:
            raise UsageError(rejected("prompt", list(prompt), "at least one token"))
        if not 1 <= max_new_tokens <= longest:
            accepted = f"1 … {longest} after {len(prompt)} prompt tokens"
            raise UsageError(rejected("max_new_tokens", max_new_tokens, accepted))
        return Request(list(prompt), max_new_tokens, eos)

    def _admit(self) -> None:
        admitted: list[Request] = []
        while self.waiting and len(self.running) + len(admitted) < self._max_bs:
            if not self._lease(self.waiting[0], alone=not (self.running or admitted)):
                break
            admitted.append(self.waiting.popleft())
        if not admitted:
            return
        leases = [request.held for request in admitted]
        tokens = [request.tokens for request in admitted]
        cached = [lease.committed for lease in leases]
        try:
            fresh = self._worker.prefill(tokens, [lease.row for lease in leases], cached)
        except BaseException:
            for request in reversed(admitted):
                self._kv_manager.release(request)
                self.waiting.appendleft(request)
            raise
        self._state = join(self._state, fresh)
        self.running += admitted
        for request, lease, first in zip(admitted, leases, fresh.bonus.tolist(), strict=True):
            if not request.generation.prefills:
                request.generation.cached_tokens = lease.committed
            self._slots.commit(lease, len(request.tokens) - lease.committed)
            request.generation.prefills += 1
            request.emit([first])
        self._retire()

    def _lease(self, request: Request, *, alone: bool) -> bool:
        """Give a waiting request a lease with its first round, if pages suffice."""
        try:
            self._kv_manager.admit(request, self._worker.headroom)
        except CapacityError:
            if alone:
                raise
            return False
        return True

    def _reserve_round(self) -> None:
        """Reserve a round for the running requests, oldest first."""
        place = 0
        while place < len(self.running):
            try:
                self._kv_manager.reserve(self.running[place].held, self._worker.headroom)
                place += 1
            except CapacityError:
                if len(self.running) == 1:
                    raise
                self.retract(self.running[-1])

    def _retire(self) -> None:
        for request in [request for request in self.running if request.finished]:
            self._drop(request)

    def _drop(self, request: Request) -> None:
        place = self.running.index(request)
        self._kv_manager.release(request)
        kept = [i for i in range(len(self.running)) if i != place]
        self._state = select(self._state, kept)
        del self.running[place]
