"""Encoding of names and commands that contain bytes which are not UTF-8.

Inside a process such a byte is a lone surrogate, as `os.fsdecode` makes it (0xff is U+DCFF). JSON and msgpack cannot
carry surrogates. In bodies of the HTTP API the byte is sent as U+0000 and two hexadecimal digits. Names and commands
cannot contain a zero byte, so this is unambiguous. In a query the byte is percent-encoded as usual.
"""

from __future__ import annotations

import re

from flash.errors import SandboxFileError, SandboxRefusedError
from flash.text import one_line

PATH_LENGTH = 4095
"""Most bytes of a path in Linux."""

_ESCAPED = re.compile(r"\0([89a-f][0-9a-f])?")


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
    """Decode a text from the HTTP API.

    Raises:
        SandboxRefusedError: the text has a zero byte that does not begin an encoded byte.
    """
    if "\0" not in text:
        return text

    def byte(found: re.Match[str]) -> str:
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
    return SandboxRefusedError(f"{one_line(text[:80])} has a zero byte, which no command, name or path may have")


def encodable(text: str) -> str:
    """Return a text for people, with escapes for characters that cannot be encoded."""
    return text.encode("utf-8", "backslashreplace").decode()
