"""Client of sglang's HTTP interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import requests
from requests.adapters import HTTPAdapter

from harness.errors import ServerError
from harness.plugin.gpu_delay import STATE
from harness.server.client.sse import SNIPPET, events

Read = TypeVar("Read")
HEALTH_S = 5.0
POOL = 256
"""Connections kept open: as many threads send requests without waiting for one."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The response to one prompt; counts are those of ``meta_info``.

    Args:
        output_ids: the tokens generated.
        text: the same, decoded by the server; empty where it has no tokenizer.
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
        """Parse one element of a response of ``/generate``.

        Raises:
            ServerError: a field is missing.
        """
        try:
            meta = body["meta_info"]
            return cls(
                output_ids=tuple(body["output_ids"]),
                text=body.get("text", ""),
                prompt_tokens=meta["prompt_tokens"],
                completion_tokens=meta["completion_tokens"],
                cached_tokens=meta["cached_tokens"],
                spec_verify_ct=meta.get("spec_verify_ct") or 0,
                finish_reason=(meta["finish_reason"] or {}).get("type", ""),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ServerError(f"no answer of /generate: {str(body)[:SNIPPET]}") from error


@dataclass(frozen=True, kw_only=True)
class StreamChunk:
    """A piece of a stream; its answer is everything so far.

    Args:
        answer: cumulative.
        at: when it was received, seconds of ``time.perf_counter``.
    """

    answer: Answer
    at: float


class Client:
    """Client of one server.

    Args:
        base_url: such as "http://127.0.0.1:30000".
        api_key: sent as a bearer token, if there is one.
        timeout_s: most seconds without a byte from the server.
    """

    path: ClassVar[str] = "/generate"
    flush_path: ClassVar[str] = "/flush_cache"

    def __init__(
        self, base_url: str, *, api_key: str | None = None, timeout_s: float = 60.0
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._session = requests.Session()
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(pool_maxsize=POOL))
        if api_key:
            self._session.headers["Authorization"] = f"Bearer {api_key}"

    def health(self) -> bool:
        """Whether ``/health`` answers 200."""
        return bool(self._status("/health") == requests.codes.ok)

    def answers(self) -> bool:
        """Whether the server answers at all, with any status."""
        return self._status("/v1/models") is not None

    def _status(self, path: str) -> int | None:
        try:
            return self._session.get(self.base_url + path, timeout=HEALTH_S).status_code
        except requests.RequestException:
            return None

    def server_info(self) -> dict[str, Any]:
        """The body of ``/server_info``."""
        return self._get("/server_info", dict)

    def cache_shape(self) -> tuple[int, int]:
        """Tokens per page of the prefix cache, and the number of data-parallel workers."""
        return self._get(
            "/server_info",
            lambda info: (int(info.get("page_size") or 1), int(info.get("dp_size") or 1)),
        )

    def phases(self) -> dict[str, tuple[float, int]]:
        """Microseconds and counts of the phases of all steps so far; none of a server without."""
        return self._get("/server_info", _phases)

    def models(self) -> list[str]:
        """Ids of ``/v1/models``."""
        return self._get("/v1/models", lambda body: [model["id"] for model in body["data"]])

    def owner(self) -> str:
        """The owner of the server's model: "sglang", "vllm", ..."""
        return self._get("/v1/models", lambda body: str(body["data"][0].get("owned_by")))

    def slow_down(self, seconds: float | None) -> None:
        """Let sglang sleep before every forward, None to stop: an injected slowdown."""
        self._call("POST", "/slow_down", {"forward_sleep_time": seconds})

    def profile(self, folder: Path, steps: int) -> None:
        """Let sglang record what its GPU runs in the next steps; ``*.trace.json.gz`` follows."""
        body = {"output_dir": str(folder), "num_steps": steps, "activities": ["GPU"]}
        self._call("POST", "/start_profile", body)

    def delays_gpu(self) -> bool:
        """Whether ``slow_down`` is the wait of a GPU, by our plugin, and no sleep of the host."""
        return self._get("/server_info", lambda info: STATE in _state(info))

    def abort(self, rid: str | None) -> None:
        """Abort the request of this id, None for all."""
        self._call("POST", "/abort_request", {"abort_all": True} if rid is None else {"rid": rid})

    def generate(
        self,
        input_ids: Sequence[int],
        max_new_tokens: int,
        *,
        ignore_eos: bool = True,
        worker: int | None = None,
    ) -> Answer:
        """Greedy continuation of a prompt, by one of several data-parallel workers if named.

        Raises:
            ServerError: the server refused, answered with an error, or could not be reached.
        """
        body = _body(list(input_ids), max_new_tokens, ignore_eos)
        if worker is not None:
            body["routed_dp_rank"] = worker
        return self._post(body, Answer.parse)

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, ignore_eos: bool = True
    ) -> list[Answer]:
        """The same of several prompts in one request."""
        body = _body([list(prompt) for prompt in prompts], max_new_tokens, ignore_eos)
        return self._post(body, lambda parts: [Answer.parse(part) for part in parts])

    def stream(
        self, input_ids: Sequence[int], max_new_tokens: int, *, ignore_eos: bool = True
    ) -> Iterator[StreamChunk]:
        """Chunks of a continuation as they come; closing the iterator disconnects.

        Raises:
            ServerError: as in ``generate``, or the stream ended before it was done.
        """
        body = _body(list(input_ids), max_new_tokens, ignore_eos) | {"stream": True}
        with self._call("POST", self.path, body, stream=True) as answer:
            for at, event in events(answer):
                yield StreamChunk(answer=Answer.parse(event), at=at)

    def _get(self, path: str, read: Callable[[Any], Read]) -> Read:
        return _parsed(self._call("GET", path), path, read)

    def _post(self, body: dict[str, Any], read: Callable[[Any], Read]) -> Read:
        return _parsed(self._call("POST", self.path, body), self.path, read)

    def _call(
        self, method: str, path: str, body: Any = None, *, stream: bool = False
    ) -> requests.Response:
        url = self.base_url + path
        try:
            answer = self._session.request(
                method, url, json=body, timeout=self._timeout_s, stream=stream
            )
            if answer.status_code == requests.codes.ok:
                return answer
            text = answer.text[:SNIPPET]
        except requests.RequestException as error:
            raise ServerError(f"{url}: {error}") from error
        raise ServerError(f"{url}: {answer.status_code}: {text}", answer.status_code)


def _parsed(answer: requests.Response, path: str, read: Callable[[Any], Read]) -> Read:
    """What is read from a body of JSON; a body of another form is a ServerError."""
    try:
        return read(answer.json())
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ServerError(f"no answer of {path}: {answer.text[:SNIPPET]}") from error


def _state(info: Any) -> Any:
    return (info.get("internal_states") or [{}])[0]


def _phases(info: Any) -> dict[str, tuple[float, int]]:
    found = _state(info).get("phases", {})
    return {name: (float(spent), int(count)) for name, (spent, count) in found.items()}


def _body(input_ids: Any, max_new_tokens: int, ignore_eos: bool) -> dict[str, Any]:
    sampling = {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": ignore_eos}
    return {"input_ids": input_ids, "sampling_params": sampling}
