"""Text for whoever gave a command: how it ended, or why it was not begun."""

from __future__ import annotations

from envs.sandbox.api import Result
from envs.sandbox.text import PATH_LENGTH

COMMAND_LENGTH = 100_000
"""Bytes of a command: a sandbox takes a few more, with what is put before them."""


def unusable_command(command: str) -> str:
    """Why no sandbox runs this; empty where one does."""
    if "\0" in command:
        return "error: a command cannot have a zero byte"
    if (size := len(command.encode("utf-8", "replace"))) > COMMAND_LENGTH:
        return f"error: a command cannot have more than {COMMAND_LENGTH} bytes, but this one has {size}; write a file"
    return ""


def unusable_path(path: str) -> str:
    """Why this is the path of nothing; empty where it may be of something."""
    if "\0" in path:
        return "error: a path cannot have a zero byte"
    if len(path.encode("utf-8", "replace")) > PATH_LENGTH:
        return f"error: a path cannot have more than {PATH_LENGTH} bytes"
    return ""


def result_text(result: Result) -> str:
    """Its ending on a line, and what it wrote below it: its output, then its errors."""
    text = (result.stdout + result.stderr).decode("utf-8", "replace").rstrip()
    return f"{how_ended(result)}\n{text}" if text else how_ended(result)


def how_ended(result: Result) -> str:
    """What ended it, in a few words."""
    if result.timed_out:
        return f"stopped after {result.wall_s:.0f} s"
    if result.oom_killed:
        return "out of memory"
    return f"killed by {result.signal}" if result.signal else f"exit code {result.exit_code}"


def clipped(text: str, most: int) -> str:
    """A text of at most `most` characters, and a line that says how many are missing in the middle."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
