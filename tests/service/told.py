"""Streams of answers, for the tests of the formats of the APIs."""

from __future__ import annotations

from flash.service.app import AnswerFormat
from flash.service.chat import PolicyAnswer
from flash.service.sessions import AnswerDeltas
from flash.types import Piece


def told_in(events: AnswerFormat, answer: PolicyAnswer) -> bytes:
    """Return the whole stream of an answer, encoded by `events`, as a client receives it.

    The reasoning is sent letter by letter, then all letters of the content but the last one. `finish` sends the last.
    """
    deltas = AnswerDeltas(())
    for letter in answer.message.reasoning:
        deltas.add(Piece("", letter))
    for letter in answer.message.content[:-1]:
        deltas.add(Piece(letter))
    assert deltas.finish(answer.message) == answer.message
    lines = [events.begin(0, answer.prompt_tokens)]
    lines += [events.piece(piece, 0) for piece in deltas.pieces]
    return b"".join([*lines, events.finish(answer, 0), events.end([answer])])
