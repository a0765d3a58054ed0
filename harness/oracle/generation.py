"""Greedy generation, plain and speculative over a chain; every step recomputes everything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from harness.oracle.decoder import Decoder, Draft


@dataclass(frozen=True, kw_only=True)
class OracleGeneration:
    """Expected result of a speculative run.

    Args:
        token_ids: emitted tokens, the one of the prefill first.
        accept_lengths: tokens of every verify step, bonus included, as accepted: those of the
            last step may reach past ``token_ids``, which is cut to the count asked for.
    """

    token_ids: tuple[int, ...]
    accept_lengths: tuple[int, ...]


def relative_margins(logits: torch.Tensor) -> torch.Tensor:
    """Top-1 minus top-2 of every row of logits [n, vocab], in units of the row's RMS: [n]."""
    best = logits.topk(2, -1).values
    return (best[:, 0] - best[:, 1]) / logits.square().mean(-1).sqrt()


def greedy(
    target: Decoder, prompt: Sequence[int], count: int, *, eos: int | None = None
) -> tuple[list[int], list[float]]:
    """At most ``count`` tokens after a prompt, and their margins; ends with ``eos``."""
    tokens, margins = list(prompt), list[float]()
    while len(margins) < count and not (margins and tokens[-1] == eos):
        _, logits = target.forward(torch.tensor(tokens))
        tokens.append(int(logits[-1].argmax()))
        margins.append(float(relative_margins(logits[-1:])))
    return tokens[len(prompt) :], margins


def speculate(
    target: Decoder,
    draft: Draft,
    prompt: Sequence[int],
    *,
    num_steps: int,
    num_draft_tokens: int,
    count: int,
    eos: int | None = None,
) -> OracleGeneration:
    """Greedy chain speculation, topk = 1: at most ``count`` tokens; ends with ``eos``.

    Each round the draft proposes ``num_steps`` tokens after the last true one, of which
    ``num_draft_tokens - 1`` are verified; those that match are accepted, and the target's own
    next token comes as a bonus.

    Raises:
        ValueError: fewer proposals than are verified.
    """
    if not 1 <= num_draft_tokens <= num_steps + 1:
        given, accepted = f"num_draft_tokens = {num_draft_tokens}", f"1 … {num_steps + 1}"
        raise ValueError(f"{given} is not accepted; accepted with {num_steps} steps: {accepted}")
    hidden, logits = target.forward(torch.tensor(prompt))
    text, accept_lengths = [*prompt, int(logits[-1].argmax())], list[int]()
    while len(text) - len(prompt) < count and eos not in text[len(prompt) :]:
        chain = _propose(draft, text, hidden, num_steps)[: num_draft_tokens - 1]
        hidden, logits = target.forward(torch.tensor(text + chain))
        best = logits[len(text) - 1 :].argmax(-1).tolist()
        matches = _matches(chain, best)
        text += best[: matches + 1]
        hidden = hidden[: len(text) - 1]
        accept_lengths.append(matches + 1)
    emitted = text[len(prompt) :]
    length = min([count, *(i + 1 for i, token in enumerate(emitted) if token == eos)])
    return OracleGeneration(token_ids=tuple(emitted[:length]), accept_lengths=tuple(accept_lengths))


def _propose(draft: Draft, text: Sequence[int], hidden: torch.Tensor, num_steps: int) -> list[int]:
    """``num_steps`` tokens after ``text``.

    The draft reads the target's hidden states of the true tokens, then its own.
    """
    proposed: list[int] = []
    for _ in range(num_steps):
        out, logits = draft.forward(torch.tensor([*text[1:], *proposed]), hidden)
        proposed.append(int(logits[-1].argmax()))
        hidden = torch.cat((hidden, out[-1:]))
    return proposed


def _matches(chain: Sequence[int], best: Sequence[int]) -> int:
    """Number of leading draft tokens that are the target's choices."""
    count = 0
    while count < len(chain) and chain[count] == best[count]:
        count += 1
    return count
