"""Answers as streams tell them."""

from __future__ import annotations

from flash.service.chat import Answer
from flash.service.streamed import Events
from flash.service.telling import Telling
from flash.types import Piece


def told_in(events: Events, answer: Answer) -> bytes:
    """The whole of a stream: letter by letter what was thought, then what was said but its end, and that at last."""
    telling = Telling(())
    for letter in answer.message.reasoning:
        telling.hears(Piece("", letter))
    for letter in answer.message.content[:-1]:
        telling.hears(Piece(letter))
    assert telling.ends(answer.message) == answer.message
    lines = [events.begin(0)]
    lines += [events.piece(piece, 0) for piece in telling.pieces]
    return b"".join([*lines, events.said(answer, 0), events.end([answer])])
