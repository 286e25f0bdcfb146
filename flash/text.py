"""Foreign text: text of guests, models, files and other services, made harmless for terminals and logs.

*Foreign* text comes from outside of Flash and may contain anything: escape sequences that move the cursor or rename the
window, line breaks that imitate a line of ours, marks that reverse the reading direction. All foreign text that a
command prints or a log records passes through this module.
"""

from __future__ import annotations

import logging
import unicodedata


class OneLine(logging.Formatter):
    """Format of log records in which foreign text can neither imitate another record nor move a terminal's cursor.

    A message is one line. The lines of a traceback are indented, so that none looks like a record.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line of a record, with its message made one line. `logging` calls this."""
        record.message = one_line(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        """Return the traceback of the error `ei` with indented lines. `logging` calls this."""
        text = super().formatException(ei)  # type: ignore[arg-type]
        return "\n".join(f"    {one_line(line)}" for line in text.splitlines())


def one_line(text: str) -> str:
    """Return the text as one line: line breaks and all other characters that cannot be printed are escaped."""
    # Nearly all texts have nothing to escape.
    return text if text.isprintable() else "".join(map(_shown, text))


def harmless(text: str) -> str:
    """Return the text with its line breaks; all other characters that cannot be printed are escaped."""
    return "\n".join(map(one_line, text.split("\n")))


def _shown(character: str) -> str:
    """Return a character, or its escape sequence such as `\\x1b` if it cannot be printed."""
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def width(text: str) -> int:
    """Return the terminal columns of a text: wide characters take two, combining characters none.

    The text must be printable (`one_line`): every other character counts as one column.
    """
    return sum(
        0 if unicodedata.combining(one) else 2 if unicodedata.east_asian_width(one) in "WF" else 1 for one in text
    )
