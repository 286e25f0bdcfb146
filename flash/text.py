"""Foreign text: text of guests, models, files and other services, made harmless for terminals and logs.

Such text may contain anything: escape sequences that move the cursor or rename the window, line breaks that imitate a
line of ours, marks that reverse the reading direction. Everything of it that a command prints or a log records passes
through this module.
"""

from __future__ import annotations

import logging


class OneLine(logging.Formatter):
    """Format of log records in which foreign text neither looks like another record nor moves a terminal's cursor.

    A message is one line. Tracebacks are indented.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = one_line(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        text = super().formatException(ei)  # type: ignore[arg-type]
        return "\n".join(f"    {one_line(line)}" for line in text.splitlines())


def one_line(text: str) -> str:
    """Return the text as one line in which every character that cannot be printed is escaped, line breaks too."""
    # Nearly all texts have nothing to escape.
    return text if text.isprintable() else "".join(map(_shown, text))


def harmless(text: str) -> str:
    """Return the text with its line breaks, and with every other character that cannot be printed escaped."""
    return "\n".join(map(one_line, text.split("\n")))


def _shown(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()
