"""Client of vLLM's HTTP interface, for attached servers.

vLLM has ``/reset_prefix_cache`` with ``VLLM_SERVER_DEV_MODE=1``, and counts cached tokens with
``--enable-prompt-tokens-details``. It reports no verify steps of a request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from harness.errors import ServerError, UsageError, rejected
from harness.server.client.sglang import Answer, Client, StreamChunk
from harness.server.client.sse import SNIPPET, events

PAGE_SIZE = 16
"""vLLM's default on CUDA; no endpoint has it."""
NOTHING = Answer(
    output_ids=(),
    text="",
    prompt_tokens=0,
    completion_tokens=0,
    cached_tokens=0,
    spec_verify_ct=0,
    finish_reason="",
)


class VllmClient(Client):
    """Client of one vLLM server."""

    path: ClassVar[str] = "/v1/completions"
    flush_path: ClassVar[str] = "/reset_prefix_cache"

    def cache_shape(self) -> tuple[int, int]:
        """As in ``Client``, of a server with one worker."""
        return PAGE_SIZE, 1

    def generate(
        self,
        input_ids: Sequence[int],
        max_new_tokens: int,
        *,
        ignore_eos: bool = True,
        worker: int | None = None,
    ) -> Answer:
        """As in ``Client``.

        Raises:
            ServerError: as in ``Client``, or cached tokens are not counted.
            UsageError: a worker is named.
        """
        if worker is not None:
            raise UsageError(rejected("worker", worker, "None: vLLM is used as one worker"))
        asked = self._completion(input_ids, max_new_tokens, ignore_eos)
        return self._post(asked, lambda body: _counted(_added(NOTHING, body), body))

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, ignore_eos: bool = True
    ) -> list[Answer]:
        """As in ``Client``, in requests sent together: of a batch vLLM only counts the sum."""
        ask = partial(self.generate, max_new_tokens=max_new_tokens, ignore_eos=ignore_eos)
        with ThreadPoolExecutor(max(len(prompts), 1)) as threads:
            return list(threads.map(ask, prompts))

    def stream(
        self, input_ids: Sequence[int], max_new_tokens: int, *, ignore_eos: bool = True
    ) -> Iterator[StreamChunk]:
        """As in ``Client``; tokens are counted in the last chunk alone, which has no new ones."""
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        body = self._completion(input_ids, max_new_tokens, ignore_eos) | usage
        answer = NOTHING
        with self._call("POST", self.path, body, stream=True) as response:
            for at, event in events(response):
                answer = _added(answer, event)
                if event.get("usage"):
                    answer = _counted(answer, event)
                yield StreamChunk(answer=answer, at=at)

    def _completion(
        self, input_ids: Sequence[int], max_new_tokens: int, ignore_eos: bool
    ) -> dict[str, Any]:
        return {
            "model": self._get("/v1/models", lambda body: body["data"][0]["id"]),
            "prompt": list(input_ids),
            "max_tokens": max_new_tokens,
            "temperature": 0,
            "ignore_eos": ignore_eos,
            "return_token_ids": True,
        }


def client_of(url: str, *, api_key: str | None = None) -> Client:
    """The client for the server there, sglang's or vLLM's."""
    client = Client(url, api_key=api_key)
    return VllmClient(url, api_key=api_key) if client.owner() == "vllm" else client


def _added(so_far: Answer, body: Any) -> Answer:
    """An answer with the tokens of a body, which may have none."""
    try:
        for choice in body["choices"]:
            so_far = replace(
                so_far,
                output_ids=so_far.output_ids + tuple(choice["token_ids"]),
                text=so_far.text + choice["text"],
                finish_reason=choice["finish_reason"] or "",
            )
    except (KeyError, TypeError) as error:
        raise ServerError(f"no completion with token ids: {str(body)[:SNIPPET]}") from error
    return replace(so_far, completion_tokens=len(so_far.output_ids))


def _counted(answer: Answer, body: Any) -> Answer:
    try:
        usage = body["usage"]
        return replace(
            answer,
            prompt_tokens=usage["prompt_tokens"],
            completion_tokens=usage["completion_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"] or 0,
        )
    except (KeyError, TypeError) as error:
        remedy = "vLLM counts them with --enable-prompt-tokens-details"
        raise ServerError(f"no cached tokens in {str(body)[:SNIPPET]}; {remedy}") from error
