"""What the oracle says along a text that somebody else generated."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

import torch

from harness.oracle.decoder import Decoder, Draft
from harness.oracle.generation import greedy


@dataclass(frozen=True, kw_only=True)
class FollowedText:
    """What the oracle says of a text. Shortfalls are in units of a row's root mean square.

    Args:
        shortfalls: of every token, the best logit behind its prefix minus its own; 0 where it is
            the best, infinite where the vocabulary lacks it, and nothing is known behind that.
        best_ids: the best token behind each of these prefixes.
        accept_lengths: tokens of every verify step, bonus included; the last bonus may lie past
            the text.
        step_shortfalls: of every verify step, how much nearer two of the oracle's logits would
            have to be for it to have the accept length that was given; 0 where it has it, infinite
            where no step could.
    """

    shortfalls: tuple[float, ...]
    best_ids: tuple[int, ...]
    accept_lengths: tuple[int, ...]
    step_shortfalls: tuple[float, ...]


def follow(
    target: Decoder,
    draft: Draft,
    prompt: Sequence[int],
    text: Sequence[int],
    *,
    num_steps: int,
    num_draft_tokens: int,
    accept_lengths: Sequence[int] | None = None,
) -> FollowedText:
    """Judge each token of ``text`` behind the ones before it, and each verify step along it.

    The target's choices are those of the text, whose first token is the prefill's; the draft's are
    the oracle's own. So a tie, of tokens or of drafts, parts no judgement behind it.

    Args:
        target: the oracle's.
        draft: the oracle's.
        prompt: token ids.
        text: token ids, one or more.
        num_steps: that the draft proposes.
        num_draft_tokens: that a step verifies, the last true one among them.
        accept_lengths: of the steps that made the text: each is judged where it began. The last
            may reach past the text, where the target's own choices stand. None: the oracle's own
            steps.
    """
    whole = list(takewhile(lambda token: 0 <= token < target.vocab_size, text))
    tokens, most = [*prompt, *whole], min(num_steps, num_draft_tokens - 1)
    end, past = len(tokens), list[float]()
    if accept_lengths is not None and (cut := 1 + sum(accept_lengths) - len(text)) > 0:
        beyond, past = greedy(target, tokens, min(cut, most))
        tokens += beyond
    hidden, logits = target.forward(torch.tensor(tokens))
    rows = logits[len(prompt) - 1 :][: min(len(whole) + 1, len(text))]
    best = rows.max(-1)
    own = rows[range(len(whole)), whole]
    shortfalls = (best.values[: len(whole)] - own) / rows[: len(whole)].square().mean(-1).sqrt()
    foreign = [math.inf] * (len(rows) - len(whole))
    rounds = _Rounds(draft, tokens, hidden[:-1], most)
    steps, known = list[tuple[int, float]](), len(prompt) + 1
    if accept_lengths is None:
        while known < end:
            accepted, _ = rounds.at(known, 1)
            steps.append((accepted, 0.0))
            known += accepted
    else:
        for claimed in accept_lengths:
            steps.append(rounds.at(known, claimed) if known < end else (0, math.inf))
            known += claimed
    if past and math.isfinite(steps[-1][1]):
        # Where a token past the text ties, another may have stood there.
        steps[-1] = (steps[-1][0], min(steps[-1][1], *past))
    return FollowedText(
        shortfalls=(*shortfalls.tolist(), *foreign),
        best_ids=tuple(best.indices.tolist()),
        accept_lengths=tuple(accepted for accepted, _ in steps),
        step_shortfalls=tuple(shortfall for _, shortfall in steps),
    )


class _Rounds:
    """Drafts of the oracle that could begin anywhere in a text.

    Args:
        draft: the oracle's.
        tokens: prompt and text.
        hidden: [tokens - 1, hidden] the target's, of all but the last token.
        most: drafts that a verify step verifies.
    """

    def __init__(
        self, draft: Draft, tokens: Sequence[int], hidden: torch.Tensor, most: int
    ) -> None:
        self.draft, self.tokens, self.hidden, self.most = draft, tokens, hidden, most

    @cached_property
    def first(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The first draft of every step, of one forward: the draft is causal."""
        return self.draft.forward(torch.tensor(self.tokens[1:]), self.hidden)

    def at(self, known: int, claimed: int) -> tuple[int, float]:
        """Accept length of the step after ``known`` tokens, and its shortfall of ``claimed``."""
        falls, gaps = list[float](), list[float]()
        due = self.tokens[known : known + self.most]
        for token, row in zip(due, self._along(known), strict=False):
            best, second = row.topk(2).values.tolist()
            rms = float(row.square().mean().sqrt())
            falls.append((best - float(row[token])) / rms)
            gaps.append((best - second) / rms)
            if any(falls) and len(falls) >= claimed - 1:
                break
        matches = next((i for i, fall in enumerate(falls) if fall > 0), len(falls))
        if not 1 <= claimed <= len(falls) + 1:
            return matches + 1, math.inf
        if claimed <= matches:
            return matches + 1, gaps[claimed - 1]
        return matches + 1, max(falls[matches : claimed - 1], default=0.0)

    def _along(self, known: int) -> Iterator[torch.Tensor]:
        """Logits [vocab] of every draft after ``known`` tokens, each behind the text's own."""
        states, logits = self.first
        read, state = self.hidden[: known - 1], states[known - 2 : known - 1]
        yield logits[known - 2]
        while True:
            known += 1
            read = torch.cat((read, state))
            out, logits = self.draft.forward(torch.tensor(self.tokens[1:known]), read)
            state = out[-1:]
            yield logits[-1]
