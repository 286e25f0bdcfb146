"""Pieces of an answer that an agent receives while it is sampled: none is taken back, and all are the answer."""

from __future__ import annotations

import random

import pytest

from flash.rollout.episode.tokenizer import INCOMPLETE, ResponseReader
from flash.service.fields import before_stop
from flash.service.sessions import AnswerDeltas
from flash.types import Message, Piece
from tests.envs.agents import BYTES

LETTERS = "aab \n🙂é"


def cut_at_random(text: str, dice: random.Random) -> list[str]:
    """Return a text in up to six pieces, some of which may be empty."""
    places = sorted(dice.randrange(len(text) + 1) for _ in range(dice.randrange(6)))
    return [text[start:stop] for start, stop in zip([0, *places], [*places, len(text)], strict=True)]


def test_the_pieces_are_the_answer_whatever_ends_it() -> None:
    for seed in range(60):
        dice = random.Random(seed)
        text = "".join(dice.choices(LETTERS, k=dice.randrange(30)))
        stops = ["".join(dice.choices(LETTERS, k=dice.randrange(1, 4))) for _ in range(dice.randrange(3))]
        content, _ = before_stop(text, stops)
        deltas, told = AnswerDeltas(stops), ""
        for piece in cut_at_random(text, dice):
            deltas.add(Piece(piece))
            told = "".join(one.content for one in deltas.pieces)
            assert content.startswith(told), "nothing is told that the answer does not have"
        assert len(content) - len(told) < max(map(len, stops), default=1), "nothing is held back for long"
        assert deltas.finish(Message("assistant", content)).content == content
        assert "".join(one.content for one in deltas.pieces) == content


def test_a_text_to_stop_at_may_be_far_longer_than_the_answer() -> None:
    deltas = AnswerDeltas(("7" * 1_000_000,))
    for _ in range(100):
        deltas.add(Piece("46"))
    assert deltas.finish(Message("assistant", "46" * 100)).content == "46" * 100


@pytest.mark.parametrize(
    ("pieces", "whole", "told"),
    [
        ([Piece("a")], Message("assistant", "ab", "hm"), ("ab", "hm")),
        ([Piece("\n\na")], Message("assistant", "ab"), ("\n\nab", "")),
        ([Piece("a\n")], Message("assistant", "a"), ("a\n", "")),
        ([Piece("", "so")], Message("assistant", "so what"), ("so what", "so")),
        ([Piece("xy")], Message("assistant", "ab"), ("xy", "")),
    ],
)
def test_what_was_told_stands_where_the_whole_is_read_otherwise(
    pieces: list[Piece], whole: Message, told: tuple[str, str]
) -> None:
    deltas = AnswerDeltas(())
    for piece in pieces:
        deltas.add(piece)
    message = deltas.finish(whole)
    assert (message.content, message.reasoning) == told
    assert "".join(one.content for one in deltas.pieces) == told[0]
    assert "".join(one.reasoning for one in deltas.pieces) == told[1]


def test_a_piece_of_text_ends_where_a_character_does() -> None:
    for seed in range(60):
        dice = random.Random(seed)
        tokens = [*"".join(dice.choices(LETTERS, k=20)).encode()]
        if seed % 2:  # what is sampled need not be text
            tokens = [token if dice.random() < 0.8 else dice.randrange(256) for token in tokens]
        reading, told, at = ResponseReader(BYTES.decode), "", 0
        while at < len(tokens):
            size = dice.randrange(1, 5)
            told += reading.add(tokens[at : at + size]).content
            at += size
            assert BYTES.decode(tokens).startswith(told), "what was read stays"
            if not (text := BYTES.decode(tokens[:at])).endswith(INCOMPLETE):
                assert told == text
