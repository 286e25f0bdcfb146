"""A response that is read while it is sampled.

What was read stays: the pieces are the beginning of what the whole says, as far as that is certain by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from flash.foreign.vllm_parsers import Parsing
from flash.types import Piece

UNKNOWN = "\ufffd"
"""What the bytes of a character that has not come whole are decoded to."""


class Reading(Protocol):
    """Takes the tokens of one response as they come."""

    def add(self, token_ids: Sequence[int]) -> Piece:
        """What more is said by these."""
        ...


class PlainReading:
    """Text as it is.

    Args:
        decode: gives the text of some tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._text = _Text(decode)

    def add(self, token_ids: Sequence[int]) -> Piece:
        """What more is said by these."""
        text, _ = self._text.add(token_ids)
        return Piece(text)


class ParsedReading:
    """Read by a model's parsers.

    Args:
        parsing: of this response.
        decode: gives the text of some tokens, special ones shown.
    """

    def __init__(self, parsing: Parsing, decode: Callable[[Sequence[int]], str]) -> None:
        self._parsing = parsing
        self._text = _Text(decode)

    def add(self, token_ids: Sequence[int]) -> Piece:
        """What more is said by these."""
        text, tokens = self._text.add(token_ids)
        if not tokens:
            return Piece()
        reasoning, content = self._parsing.add(text, tokens)
        return Piece(content, reasoning)


class _Text:
    """Text of tokens that come piece by piece: a piece ends where a character does."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._known: list[int] = []
        """The tokens of the last piece: what the next ones stand for may depend on them, as a space does."""
        self._new: list[int] = []

    def add(self, token_ids: Sequence[int]) -> tuple[str, list[int]]:
        """The next piece, and its tokens; none, where its last character is not whole."""
        self._new += token_ids
        known, text = self._decode(self._known), self._decode(self._known + self._new)
        if len(text) <= len(known) or text.endswith(UNKNOWN):
            return "", []
        self._known, self._new = self._new, []
        return text[len(known) :], self._known
