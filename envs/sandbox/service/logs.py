"""What a service writes to its log: one line per record, whatever a client or a sandbox sent."""

from __future__ import annotations

import logging
import sys

from envs.sandbox.text import one_line


class OneLine(logging.Formatter):
    """Escapes what could look like another record, or move a terminal's cursor; tracebacks are indented."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = one_line(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        text = super().formatException(ei)  # type: ignore[arg-type]
        return "\n".join(f"    {one_line(line)}" for line in text.splitlines())


def write_to_stderr() -> None:
    """Send what this process logs to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
