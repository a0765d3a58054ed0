"""Load generator: a closed loop of requests, timed by their clients."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import requests

from harness.bench.session_records import Sample, Workload
from harness.errors import ContractError, brief
from harness.server.client.sglang import StreamChunk

Prompt = Sequence[int]


class Streaming(Protocol):
    """A client that streams tokens."""

    def stream(self, input_ids: Prompt, max_new_tokens: int) -> Iterator[StreamChunk]:
        """Chunks of a greedy continuation that ignores the end token."""


@dataclass(frozen=True, kw_only=True)
class WorkloadRun:
    """All requests of a workload, once.

    Args:
        samples: of the requests that ended well, in the order of the prompts.
        failures: one line for each of the others.
        seconds: from the first request to the last answer.
        accept_length: as the server counts it, where the samples have no verify counts; None
            where it does not.
    """

    samples: tuple[Sample, ...]
    failures: tuple[str, ...]
    seconds: float
    accept_length: float | None = None


def one(client: Streaming, prompt: Prompt, output_len: int) -> Sample:
    """Send a prompt and time its chunks.

    Raises:
        ContractError: the server sent no token or another number of tokens than it counted.
    """
    sent = time.perf_counter()
    chunks = [chunk for chunk in client.stream(prompt, output_len) if chunk.answer.output_ids]
    if not chunks:
        raise ContractError("no token came")
    answer = chunks[-1].answer
    if not len(answer.output_ids) == answer.completion_tokens == output_len:
        counted = f"{len(answer.output_ids)} tokens came, {answer.completion_tokens} counted"
        raise ContractError(f"{counted}, {output_len} asked for")
    times = [chunk.at for chunk in chunks]
    return Sample(
        ttft_ms=1e3 * (times[0] - sent),
        latency_ms=1e3 * (times[-1] - sent),
        chunk_gaps_ms=tuple(1e3 * (b - a) for a, b in pairwise(times)),
        completion_tokens=answer.completion_tokens,
        spec_verify_ct=answer.spec_verify_ct,
        cached_tokens=answer.cached_tokens,
    )


def drive(
    connect: Callable[[], Streaming], workload: Workload, prompts: Sequence[Prompt]
) -> WorkloadRun:
    """A closed loop: as many clients as the batch holds, each sends when its last was answered.

    Args:
        connect: makes a client; each thread has its own.
        workload: batch size and output length.
        prompts: all that are sent.
    """
    clients = [connect() for _ in range(min(workload.batch_size, len(prompts)))]
    together = threading.Barrier(len(clients) + 1)
    left = iter(enumerate(prompts))
    taking = threading.Lock()
    answered: dict[int, Sample] = {}
    failures: list[str] = []

    def work(client: Streaming) -> None:
        together.wait()
        while True:
            with taking:
                place, prompt = next(left, (-1, ()))
            if place < 0:
                return
            try:
                answered[place] = one(client, prompt, workload.output_len)
            except (ContractError, requests.RequestException) as error:
                failures.append(f"request {place}: {brief(error)}")

    with ThreadPoolExecutor(len(clients)) as threads:
        running = [threads.submit(work, client) for client in clients]
        together.wait()
        started = time.perf_counter()
        for future in running:
            future.result()
    seconds = time.perf_counter() - started
    samples = tuple(answered[place] for place in sorted(answered))
    return WorkloadRun(samples=samples, failures=tuple(failures), seconds=seconds)
