"""A client of sglang's HTTP interface: requests, streams and what the server says of itself."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import requests

from harness.errors import ContractError

DONE = "[DONE]"
HEALTH_S = 5.0
SNIPPET = 300
"""Characters of a body that an error message shows."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a server made of one prompt; counts are those of ``meta_info``.

    Args:
        output_ids: the tokens generated.
        text: the same, decoded by the server.
        prompt_tokens, completion_tokens, cached_tokens: counted by the server.
        spec_verify_ct: verify steps, 0 without speculation.
        finish_reason: such as "length"; empty in the middle of a stream.
    """

    output_ids: tuple[int, ...]
    text: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    spec_verify_ct: int
    finish_reason: str

    @classmethod
    def parse(cls, body: Any) -> Answer:
        """From one element of an answer of ``/generate``.

        Raises:
            ContractError: it is none.
        """
        try:
            meta = body["meta_info"]
            return cls(
                output_ids=tuple(body["output_ids"]),
                text=body["text"],
                prompt_tokens=meta["prompt_tokens"],
                completion_tokens=meta["completion_tokens"],
                cached_tokens=meta["cached_tokens"],
                spec_verify_ct=meta.get("spec_verify_ct") or 0,
                finish_reason=(meta["finish_reason"] or {}).get("type", ""),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ContractError(f"no answer of /generate: {str(body)[:SNIPPET]}") from error


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A piece of a stream; its answer is everything so far.

    Args:
        answer: cumulative.
        at: when it was received, seconds of ``time.perf_counter``.
    """

    answer: Answer
    at: float


class ServerError(ContractError):
    """A server answered a request that was right by an error."""


class Client:
    """Speaks to one server.

    Args:
        base_url: such as "http://127.0.0.1:30000".
        api_key: sent as a bearer token, if there is one.
        timeout_s: without a byte from the server.
    """

    def __init__(
        self, base_url: str, *, api_key: str | None = None, timeout_s: float = 60.0
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._session = requests.Session()
        if api_key:
            self._session.headers["Authorization"] = f"Bearer {api_key}"

    def health(self) -> bool:
        """Whether the server says that it is well."""
        try:
            answer = self._session.get(f"{self.base_url}/health", timeout=HEALTH_S)
        except requests.RequestException:
            return False
        return answer.status_code == requests.codes.ok

    def server_info(self) -> dict[str, Any]:
        """What ``/server_info`` says."""
        return dict(self._call("GET", "/server_info").json())

    def models(self) -> list[str]:
        """Ids of ``/v1/models``."""
        return [model["id"] for model in self._call("GET", "/v1/models").json()["data"]]

    def slow_down(self, seconds: float | None) -> None:
        """Let sglang sleep before every forward, None to stop: a planted slowdown."""
        self._call("POST", "/slow_down", {"forward_sleep_time": seconds})

    def abort(self, rid: str) -> None:
        """Abort the request of this id."""
        self._call("POST", "/abort_request", {"rid": rid})

    def generate(
        self, input_ids: Sequence[int], max_new_tokens: int, *, ignore_eos: bool = True
    ) -> Answer:
        """Greedy continuation of a prompt.

        Raises:
            ServerError: the server refused, or answered with an error.
            requests.RequestException: it could not be reached, or fell silent.
        """
        body = _body(list(input_ids), max_new_tokens, ignore_eos)
        return Answer.parse(self._call("POST", "/generate", body).json())

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, ignore_eos: bool = True
    ) -> list[Answer]:
        """The same of several prompts in one request."""
        body = _body([list(prompt) for prompt in prompts], max_new_tokens, ignore_eos)
        return [Answer.parse(part) for part in self._call("POST", "/generate", body).json()]

    def stream(
        self, input_ids: Sequence[int], max_new_tokens: int, *, ignore_eos: bool = True
    ) -> Iterator[Chunk]:
        """Chunks of a continuation as they come.

        Raises:
            ServerError: as in ``generate``, or the stream ended before it was done.
        """
        body = _body(list(input_ids), max_new_tokens, ignore_eos) | {"stream": True}
        with self._call("POST", "/generate", body, stream=True) as answer:
            for line in answer.iter_lines():
                at = time.perf_counter()
                data = line.decode().removeprefix("data:").strip()
                if data == DONE:
                    return
                if data:
                    found = json.loads(data)
                    if "error" in found:
                        raise ServerError(f"{self.base_url}/generate: {found['error']}")
                    yield Chunk(answer=Answer.parse(found), at=at)
        raise ServerError(f"{self.base_url}/generate: the stream broke off")

    def _call(
        self, method: str, path: str, body: Any = None, *, stream: bool = False
    ) -> requests.Response:
        url = self.base_url + path
        answer = self._session.request(
            method, url, json=body, timeout=self._timeout_s, stream=stream
        )
        if not answer.ok:
            raise ServerError(f"{url}: {answer.status_code}: {answer.text[:SNIPPET]}")
        return answer


def _body(input_ids: Any, max_new_tokens: int, ignore_eos: bool) -> dict[str, Any]:
    sampling = {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": ignore_eos}
    return {"input_ids": input_ids, "sampling_params": sampling}
