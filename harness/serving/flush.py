"""Empty a server's prefix cache, and believe it only when the next request says so.

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

from harness.errors import ContractError
from harness.serving.client import Client

FLUSH = "/flush_cache"
RESET_PREFIX_CACHE = "/reset_prefix_cache"
"""The same of vLLM."""
TIMEOUT_S = 60.0
WAIT_S = 2.0
HANG_S = 5.0
"""What a server may take beyond the timeout that it was asked for."""
JITTER = wait_random_exponential(multiplier=0.1, max=2.0)


class Busy(ContractError):
    """A server refused to flush, or could not be reached, until the deadline."""


class NotFlushed(ContractError):
    """A server said that it flushed, and its next request found cached tokens."""


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
        requests.HTTPError: the last try was refused.
        requests.RequestException: a try could not be made.
    """
    for attempt in range(1, max_retries + 1):
        answer = requests.post(url + endpoint, timeout=TIMEOUT_S)
        if answer.status_code == requests.codes.ok:
            return
        if attempt == max_retries:
            answer.raise_for_status()
            raise requests.HTTPError(f"{url}{endpoint}: {answer.status_code}", response=answer)
        time.sleep(WAIT_S)


def flush(
    base_url: str,
    *,
    deadline_s: float = TIMEOUT_S,
    endpoint: str = FLUSH,
    api_key: str | None = None,
) -> Flushed:
    """Flush until a deadline; busy servers and refused connections are tried again with jitter.

    The server is asked to wait as long as is left; one that does not know ``timeout``, or sits
    behind a router that drops it, refuses at once and is asked again.

    Raises:
        Busy: still refused at the deadline; the message shows the last answer.
        requests.HTTPError: any other status than 200 and 400.
    """
    started = time.monotonic()
    deadline = started + deadline_s
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def attempt() -> int:
        left = max(deadline - time.monotonic(), 0.1)
        asked = {"timeout": f"{left:.1f}"}
        try:
            answer = requests.post(
                base_url + endpoint, params=asked, headers=headers, timeout=left + HANG_S
            )
        except requests.ConnectionError as error:
            raise Busy(f"{base_url}{endpoint}: {error}") from error
        if answer.status_code == requests.codes.bad_request:
            raise Busy(f"{base_url}{endpoint}: 400: {answer.text[:200]}")
        answer.raise_for_status()
        return answer.status_code

    retrying = Retrying(
        retry=retry_if_exception_type(Busy),
        stop=stop_after_delay(deadline_s),
        wait=lambda state: min(JITTER(state), max(deadline - time.monotonic(), 0.0)),
        reraise=True,
    )
    retrying(attempt)
    tries = int(retrying.statistics["attempt_number"])
    return Flushed(tries=tries, seconds=time.monotonic() - started)


def prove_flushed(client: Client, input_ids: Sequence[int]) -> None:
    """Send a prompt that was cached before the flush; it leaves the cache warm again.

    Raises:
        NotFlushed: cached tokens were used.
    """
    cached = client.generate(input_ids, 1).cached_tokens
    if cached:
        raise NotFlushed(
            f"{client.base_url} answered 200 to a flush, and then {cached} of {len(input_ids)} "
            "prompt tokens came from its cache"
        )
