"""Flushes of a server's prefix cache, with retries and a proof by the next request.

sglang refuses with 400 unless its scheduler is idle, and may still be warming up when it says that
it is healthy (#33663); a second flush while one is pending is refused; a router may drop
``timeout`` (#36047). So a refusal is retried, and success is proven.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import requests
from tenacity import (
    Retrying,
    retry_if_exception_type,
    stop_after_delay,
    wait_random_exponential,
)

from harness.errors import Busy, NotFlushed, ServerError, UsageError, rejected
from harness.server.client.sglang import Client

FLUSH = Client.flush_path
OF_VLLM = {"reset_external": "true"}
"""vLLM empties tiers outside the device on demand only; sglang ignores unknown parameters."""
TIMEOUT_S = 60.0
WAIT_S = 2.0
LEAST_S = 0.1
HANG_S = 5.0
"""Seconds that a server may take beyond the timeout in the request."""
SNIPPET = 200
JITTER = wait_random_exponential(multiplier=0.1, max=2.0)


@dataclass(frozen=True, kw_only=True)
class Flushed:
    """A flush that succeeded.

    Args:
        tries: requests it took.
        seconds: from the first request to the answer.
    """

    tries: int
    seconds: float


def flush_cache_with_retry(url: str, endpoint: str = FLUSH, max_retries: int = 3) -> None:
    """POST until it is answered 200, waiting 2 s in between (sglang #24566).

    Raises:
        UsageError: not even one try is allowed.
        requests.HTTPError: the last try was refused.
        requests.RequestException: a try could not be made.
    """
    if max_retries < 1:
        raise UsageError(rejected("max_retries", max_retries, "1 or more"))
    for attempt in range(1, max_retries + 1):
        if attempt > 1:
            time.sleep(WAIT_S)
        answer = requests.post(url + endpoint, timeout=TIMEOUT_S)
        if answer.status_code == requests.codes.ok:
            return
    # Of any status: 202 is no error, but only promises a flush.
    raise requests.HTTPError(f"{url}{endpoint}: {answer.status_code}", response=answer)


def flush(
    base_url: str,
    *,
    deadline_s: float = TIMEOUT_S,
    endpoint: str = FLUSH,
    api_key: str | None = None,
) -> Flushed:
    """Flush until a deadline; busy servers and refused connections are tried again with jitter.

    The server is asked to wait as long as is left; one that does not know ``timeout``, or is
    reached through a router that drops it, refuses at once and is tried again.

    Raises:
        Busy: still refused at the deadline; the message shows the last answer.
        ServerError: any other status than 200 and 400, or silence beyond the deadline.
    """
    url = base_url.rstrip("/") + endpoint
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    started = time.monotonic()
    retrying = Retrying(
        retry=retry_if_exception_type(Busy),
        stop=stop_after_delay(deadline_s),
        # Never past the deadline, at which there is a last try.
        wait=lambda state: min(JITTER(state), max(started + deadline_s - time.monotonic(), 0.0)),
        reraise=True,
    )
    for attempt in retrying:
        with attempt:
            _ask(url, headers, max(started + deadline_s - time.monotonic(), LEAST_S))
    tries = int(retrying.statistics["attempt_number"])
    return Flushed(tries=tries, seconds=time.monotonic() - started)


def _ask(url: str, headers: dict[str, str], left_s: float) -> None:
    """One flush, which the server may defer as long as is left."""
    asked = {"timeout": f"{left_s:.1f}", **OF_VLLM}
    try:
        answer = requests.post(url, params=asked, headers=headers, timeout=left_s + HANG_S)
    except requests.ConnectionError as error:
        raise Busy(f"{url}: {error}") from error
    except requests.RequestException as error:
        raise ServerError(f"{url}: {error}") from error
    status, said = answer.status_code, f"{url}: {answer.status_code}: {answer.text[:SNIPPET]}"
    # vLLM says so with 200 while blocks are held (vllm#46893).
    refused = "".join(answer.text.split()).startswith('{"success":false')
    if status == requests.codes.bad_request or refused:
        raise Busy(said, status)
    if status != requests.codes.ok:
        raise ServerError(said, status)


def prove_flushed(client: Client, input_ids: Sequence[int]) -> None:
    """Send every worker a prompt that was cached before the flush; the cache is warm again then.

    sglang answers 200 where the first data-parallel worker flushed and another refused (#39562).

    Args:
        client: of the server.
        input_ids: longer than a page, since shorter ones are never cached.

    Raises:
        NotFlushed: cached tokens were used.
        UsageError: the prompt could prove nothing.
    """
    page_size, workers = client.cache_shape()
    if len(input_ids) <= page_size:
        raise UsageError(rejected("len(input_ids)", len(input_ids), f"more than {page_size}"))
    for worker in range(workers):
        answer = client.generate(input_ids, 1, worker=worker if workers > 1 else None)
        if answer.cached_tokens:
            raise NotFlushed(
                f"{client.base_url} answered 200 to a flush, and then {answer.cached_tokens} of "
                f"{len(input_ids)} prompt tokens came from the cache of worker {worker}"
            )
