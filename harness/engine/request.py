"""A request and its generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.engine.kv_lease import Lease
from harness.engine.prefix_cache import Node


@dataclass
class Generation:
    """The tokens generated for one prompt, and their statistics.

    Every token comes from a prefill or a round: ``prefills + sum(accept_lengths) - cut ==
    len(token_ids)``, where ``cut`` counts tokens that a last round emitted after the end.

    Args:
        token_ids: the tokens generated.
        accept_lengths: tokens emitted by each round, in order; all 1 without speculation.
        prefills: 1 + its retractions.
        cut: tokens dropped after max_new_tokens or the end token.
        cached_tokens: of the prompt, found in the prefix cache by its first prefill.
    """

    token_ids: list[int] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)
    prefills: int = 0
    cut: int = 0
    cached_tokens: int = 0

    @property
    def completion_tokens(self) -> int:
        """Tokens generated."""
        return len(self.token_ids)

    @property
    def spec_verify_ct(self) -> int:
        """Rounds."""
        return len(self.accept_lengths)


@dataclass(eq=False)
class Request:
    """A prompt that waits or runs.

    Args:
        prompt: its tokens.
        max_new_tokens: most tokens to generate.
        eos: the token that ends it, None for none.
        generation: so far.
        lease: its row and pages while it runs.
        prefix: pages of the prefix cache that it uses while it runs.
    """

    prompt: list[int]
    max_new_tokens: int
    eos: int | None
    generation: Generation = field(default_factory=Generation)
    lease: Lease | None = None
    prefix: list[Node] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Prompt and generated tokens: what a prefill computes."""
        return self.prompt + self.generation.token_ids

    @property
    def held(self) -> Lease:
        """Its lease, of a running request."""
        assert self.lease is not None
        return self.lease

    @property
    def finished(self) -> bool:
        """Whether nothing more may be emitted."""
        ids = self.generation.token_ids
        return len(ids) >= self.max_new_tokens or (bool(ids) and ids[-1] == self.eos)

    def emit(self, tokens: Sequence[int]) -> None:
        """Append tokens up to the end and count the rest as cut."""
        for token in tokens:
            if self.finished:
                self.generation.cut += 1
            else:
                self.generation.token_ids.append(token)
