"""Foreign text on its way to a terminal or a log."""

from __future__ import annotations

import logging
import sys

import pytest

from flash.text import OneLine, harmless, one_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("plain, wörter, 漢字, 🙂", "plain, wörter, 漢字, 🙂"),
        ("\x1b]0;title\x07\x1b[2J", "\\x1b]0;title\\x07\\x1b[2J"),
        ("one\r\ntwo", "one\\r\\ntwo"),
        ("\x9b31m\x7f", "\\x9b31m\\x7f"),
        ("a\u202eb\u2066\u200b\u2028", "a\\u202eb\\u2066\\u200b\\u2028"),
        ("\udcff\U000e0041", "\\udcff\\U000e0041"),
    ],
)
def test_what_cannot_be_printed_is_escaped(text, shown):
    assert one_line(text) == shown
    assert one_line(one_line(text)) == shown


def test_a_text_of_several_lines_keeps_them_and_nothing_else():
    assert harmless("a\n\x1b[1mb\tc\r\n") == "a\n\\x1b[1mb\\tc\\r\n"


def test_foreign_text_in_a_log_cannot_look_like_a_record_or_reach_the_terminal():
    evil = "\x1b[2J\nERROR flash: another"
    try:
        raise ValueError(evil)
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "it failed: %s", (evil,), sys.exc_info())
    first, *rest = OneLine("%(levelname)s %(name)s: %(message)s").format(record).split("\n")
    assert first == "ERROR x: it failed: \\x1b[2J\\nERROR flash: another"
    assert rest
    assert all(line.startswith("    ") and line.isprintable() for line in rest)
