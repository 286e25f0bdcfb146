"""What was done in a sandbox, in short: for the live page, never for scoring."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from envs.sandbox.sandbox import (
    GetArchive,
    ListFolder,
    OpenSession,
    OpenTerminal,
    PutArchive,
    ReadFile,
    RemovePath,
    RunCommand,
    SandboxOpening,
    SandboxRequest,
    StartJob,
    StreamCommand,
    WriteFile,
)
from envs.sandbox.text import one_line

KEPT = 300
"""Events kept per sandbox, the newest ones."""
TEXT_CHARS = 200
"""Longest text of an event."""


class TimelineEvent(msgspec.Struct, frozen=True):
    """One call, or one change of state."""

    at: float
    """Unix time of its beginning."""
    kind: str
    """run, stream, session, job, terminal, read, write, …, or state."""
    text: str
    """The command or the path, cut."""
    seconds: float
    outcome: str
    """exit 0, SIGKILL, timed out, the name of an error, or the new state."""


class Timeline:
    """The newest events of one sandbox."""

    def __init__(self) -> None:
        self._events: deque[TimelineEvent] = deque(maxlen=KEPT)

    def add(self, at: float, kind: str, text: str, seconds: float, outcome: str) -> None:
        """Keep one event; of its text only the beginning, on one line."""
        self._events.append(TimelineEvent(at, kind, one_line(text[:TEXT_CHARS]), round(seconds, 4), outcome))

    def events(self) -> list[TimelineEvent]:
        """Those that are kept, oldest first."""
        return list(self._events)


def shown(command: str | Sequence[str]) -> str:
    """A command as one line of text."""
    return (command if isinstance(command, str) else " ".join(command))[:TEXT_CHARS].replace("\n", " ⏎ ")


def described(asked: SandboxRequest[Any] | SandboxOpening[Any]) -> tuple[str, str]:
    """The kind and the text of the event that a request is."""
    match asked:
        case RunCommand(exec):
            return "run", shown(exec.command)
        case StreamCommand(exec):
            return "stream", shown(exec.command)
        case StartJob(exec):
            return "job", shown(exec.command)
        case OpenSession(name):
            return "session", f"open {name}"
        case OpenTerminal(command):
            return "terminal", "a shell" if command is None else shown(command)
        case ReadFile(path):
            return "read", path
        case WriteFile(path, data):
            return "write", f"{path} ({len(data)} bytes)"
        case ListFolder(path):
            return "list", path
        case RemovePath(path):
            return "remove", path
        case PutArchive(path):
            return "upload", path
        case GetArchive(path):
            return "download", path
        case _:
            return type(asked).__name__, ""
