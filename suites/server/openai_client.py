"""``PYTHON openai_client.py URL PROMPT TOKENS``: responses to OpenAI's package, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import openai


def main(url: str, prompt: str, tokens: int) -> dict[str, Any]:
    """Texts of one prompt from every endpoint, their usage, and a refusal."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    complete: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": tokens}
    first, *rest = prompt.split("\n")
    chat: dict[str, Any] = {
        "model": model,
        "messages": [
            {"role": "system", "content": first},
            {"role": "user", "content": "\n".join(rest)},
        ],
        "max_completion_tokens": tokens,
    }
    counted: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    extra: dict[str, Any] = {"seed": 1, "user": "a test", "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**complete, **extra)
    pieces = list(client.completions.create(**complete, **extra, **counted))
    said = client.chat.completions.create(**chat, **extra)
    deltas = list(client.chat.completions.create(**chat, **extra, **counted))
    try:
        client.completions.create(**complete, temperature=0.7)
        refused = None
    except openai.BadRequestError as error:
        refused = {"param": error.param, "type": error.type, "message": str(error)}
    return {
        "texts": {
            "completion": whole.choices[0].text,
            "completion stream": "".join(
                choice.text for piece in pieces for choice in piece.choices
            ),
            "chat": said.choices[0].message.content,
            "chat stream": "".join(
                choice.delta.content or "" for delta in deltas for choice in delta.choices
            ),
        },
        "completed": [
            answer.usage.completion_tokens for answer in (whole, pieces[-1], said, deltas[-1])
        ],
        "chunks": [len(pieces), len(deltas)],
        "refused": refused,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
