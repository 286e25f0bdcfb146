r"""Text that is not text: names and commands with bytes that are no UTF-8.

Within a process such a byte is what `os.fsdecode` makes of it, a lone surrogate (0xff is U+DCFF). JSON and msgpack
cannot carry those. In bodies and answers of the HTTP API the byte travels as U+0000 and two hexadecimal digits: neither
names nor commands may have a zero byte, so nothing else looks like it. In a query it is percent-encoded as ever.
"""

from __future__ import annotations

import re

from flash.errors import SandboxFileError, SandboxRefusedError
from flash.text import one_line

PATH_LENGTH = 4095
"""Bytes of a path, as Linux has it."""

_ESCAPED = re.compile(r"\0([89a-f][0-9a-f])?")


def as_bytes(text: str) -> bytes:
    """Text as the bytes that a sandbox gets: UTF-8, or what `os.fsdecode` made of other bytes.

    Raises:
        SandboxRefusedError: it has a zero byte, or is nothing that `os.fsdecode` makes.
    """
    if "\0" in text:
        raise _zero(text)
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise SandboxRefusedError(f"{one_line(text[:80])} cannot be encoded: {error.reason}") from None


def to_wire(text: str) -> str:
    """Text as it travels. Raises SandboxRefusedError, as `as_bytes`."""
    as_bytes(text)
    return re.sub("[\udc80-\udcff]", lambda found: f"\0{ord(found[0]) - 0xDC00:02x}", text)


def from_wire(text: str) -> str:
    """Text as this process has it.

    Raises:
        SandboxRefusedError: it has a zero byte that does not stand for another one.
    """
    if "\0" not in text:
        return text

    def byte(found: re.Match[str]) -> str:
        if found[1] is None:
            raise _zero(text)
        return chr(0xDC00 + int(found[1], 16))

    # Bytes that together are UTF-8 are no surrogates, however they came.
    return _ESCAPED.sub(byte, text).encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")


def check_path(path: str) -> None:
    """Refuse what is too long for a path.

    Raises:
        SandboxFileError: saying how long it is.
    """
    if (size := len(path.encode("utf-8", "surrogatepass"))) > PATH_LENGTH:
        raise SandboxFileError(f"a path has at most {PATH_LENGTH} bytes, but {one_line(path[:80])}… has {size}")


def _zero(text: str) -> SandboxRefusedError:
    return SandboxRefusedError(f"{one_line(text[:80])} has a zero byte, which no command, name or path may have")


def encodable(text: str) -> str:
    """Text for people, with what cannot be encoded as an escape."""
    return text.encode("utf-8", "backslashreplace").decode()
