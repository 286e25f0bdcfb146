"""Text that goes into a sandbox or comes out of it. The client, the service, environments and tools use it.

*Bytes that are not UTF-8.* Inside a process such a byte is a lone surrogate, as `os.fsdecode` makes it (0xff is
U+DCFF). JSON and msgpack cannot carry surrogates. In bodies of the HTTP API the byte is sent as U+0000 and two
lower-case hexadecimal digits. Names and commands cannot contain a zero byte, so this is unambiguous. In a query the
byte is percent-encoded as usual.

*Text about a command*, for the policy or person that gave it: its result, or the reason why it was not run.
"""

from __future__ import annotations

import re

from envs.sandbox.api import Result
from flash.errors import SandboxFileError, SandboxRefusedError
from flash.text import one_line

PATH_LENGTH = 4095
"""Most bytes of a path in Linux."""

_ESCAPED = re.compile(r"\0([89a-f][0-9a-f])?")
"""Pattern of an encoded byte in a text of the HTTP API; a zero byte alone is an error."""

COMMAND_LENGTH = 100_000
"""Most bytes of a command of a policy. Sandboxes accept `envs.sandbox.local.agent.LONGEST_COMMAND`, so that a tool can
put a prefix such as `exec 2>&1; ` in front."""


def as_bytes(text: str) -> bytes:
    """Return the bytes that a sandbox gets for a text: UTF-8, with surrogates of `os.fsdecode` as their bytes.

    Raises:
        SandboxRefusedError: the text has a zero byte, or a surrogate that `os.fsdecode` does not make.
    """
    if "\0" in text:
        raise _zero(text)
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise SandboxRefusedError(f"{one_line(text[:80])} cannot be encoded: {error.reason}") from None


def to_wire(text: str) -> str:
    """Encode a text for the HTTP API. Raises SandboxRefusedError as `as_bytes` does."""
    as_bytes(text)
    return re.sub("[\udc80-\udcff]", lambda found: f"\0{ord(found[0]) - 0xDC00:02x}", text)


def from_wire(text: str) -> str:
    """Decode a text from the HTTP API. The service decodes commands with it, and the client names of files.

    Raises:
        SandboxRefusedError: the text has a zero byte that does not begin an encoded byte.
    """
    if "\0" not in text:
        return text

    def byte(found: re.Match[str]) -> str:
        """Return the surrogate of an encoded byte. Raises SandboxRefusedError for a zero byte alone."""
        if found[1] is None:
            raise _zero(text)
        return chr(0xDC00 + int(found[1], 16))

    # Escaped bytes that together are valid UTF-8 become normal characters, not surrogates.
    return _ESCAPED.sub(byte, text).encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")


def check_path(path: str) -> None:
    """Check the length of a path.

    Raises:
        SandboxFileError: the path is too long.
    """
    if (size := len(path.encode("utf-8", "surrogatepass"))) > PATH_LENGTH:
        raise SandboxFileError(f"a path has at most {PATH_LENGTH} bytes, but {one_line(path[:80])}… has {size}")


def _zero(text: str) -> SandboxRefusedError:
    """Return the error for a text with a zero byte."""
    return SandboxRefusedError(f"{one_line(text[:80])} has a zero byte, which no command, name or path may have")


def unusable_command(command: str) -> str:
    """Return the error that a policy is shown as the result of a command that no sandbox can run; empty if one can."""
    if "\0" in command:
        return "error: a command cannot have a zero byte"
    if (size := len(command.encode("utf-8", "replace"))) > COMMAND_LENGTH:
        return f"error: a command cannot have more than {COMMAND_LENGTH} bytes, but this one has {size}; write a file"
    return ""


def unusable_path(path: str) -> str:
    """Return the error that a policy is shown, as the result, for a text that cannot be a path; empty if it can."""
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
    """Return a text. Of a text with more than `most` characters, return the first and the last half of `most`.

    A line between the halves says how many characters are left out; it comes in addition to `most`.
    """
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[len(text) - half :]}"
