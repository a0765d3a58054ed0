"""Incremental detokenization of one request's tokens."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class IncrementalDetokenizer:
    """The text of a growing list of tokens, at the cost of its new tokens alone.

    Args:
        tokenizer: of the tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._text = ""
        self._unfinished: list[int] = []

    def __call__(self, new_ids: Sequence[int]) -> str:
        """The text of all tokens so far, as if they were decoded at once.

        The bytes of a character that is not whole yet are replacement characters in it.
        """
        for token in new_ids:
            self._unfinished.append(token)
            # None until the token ends on the boundary of a character.
            piece = self._stream.step(self._tokenizer, token)
            if piece is not None:
                self._text += piece
                self._unfinished.clear()
        return self._text + str(self._tokenizer.decode(self._unfinished))
