"""Text about a command for the agent or person that gave it: its result, or the reason why it was not run."""

from __future__ import annotations

from envs.sandbox.api import Result
from envs.sandbox.text import PATH_LENGTH

COMMAND_LENGTH = 100_000
"""Most bytes of a command. Sandboxes accept slightly more, which leaves room for a prefix."""


def unusable_command(command: str) -> str:
    """Return the reason why no sandbox can run this command; empty if one can."""
    if "\0" in command:
        return "error: a command cannot have a zero byte"
    if (size := len(command.encode("utf-8", "replace"))) > COMMAND_LENGTH:
        return f"error: a command cannot have more than {COMMAND_LENGTH} bytes, but this one has {size}; write a file"
    return ""


def unusable_path(path: str) -> str:
    """Return the reason why this cannot be a path; empty if it can."""
    if "\0" in path:
        return "error: a path cannot have a zero byte"
    if len(path.encode("utf-8", "replace")) > PATH_LENGTH:
        return f"error: a path cannot have more than {PATH_LENGTH} bytes"
    return ""


def result_text(result: Result) -> str:
    """Return how the command ended on the first line, then its standard output and its standard error."""
    text = (result.stdout + result.stderr).decode("utf-8", "replace").rstrip()
    return f"{how_ended(result)}\n{text}" if text else how_ended(result)


def how_ended(result: Result) -> str:
    """Return how the command ended, in a few words."""
    if result.timed_out:
        return f"stopped after {result.wall_s:.0f} s"
    if result.oom_killed:
        return "out of memory"
    return f"killed by {result.signal}" if result.signal else f"exit code {result.exit_code}"


def clipped(text: str, most: int) -> str:
    """Return a text of at most `most` characters, with a line that says how many are left out in the middle."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
