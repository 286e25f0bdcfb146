"""How a command ended, in words for whoever gave it."""

from __future__ import annotations

from envs.sandbox.api import Result


def told(result: Result) -> str:
    """Its ending on a line, and what it wrote below it: its output, then its errors."""
    text = (result.stdout + result.stderr).decode("utf-8", "replace").rstrip()
    return f"{ending(result)}\n{text}" if text else ending(result)


def ending(result: Result) -> str:
    """What ended it."""
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
