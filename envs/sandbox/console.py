"""Standard input of `flash sandbox run`, which becomes the input of the command in the sandbox."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

import anyio

from flash.errors import SandboxRefusedError

MAX_INPUT = 16 << 20
"""Most bytes of standard input that `run` accepts."""
SILENCE_S = 2.0
"""Seconds without any input after which `run` prints what it waits for."""


async def standard_input() -> bytes:
    """Read the standard input to its end. Returns nothing if it is a terminal.

    Raises:
        SandboxRefusedError: the input is too long.
    """
    if sys.stdin is None or sys.stdin.isatty():
        return b""
    data = bytearray()
    while len(data) <= MAX_INPUT:
        with anyio.move_on_after(SILENCE_S) as silence:
            # A regular file cannot be polled (PermissionError), and can always be read.
            with suppress(PermissionError):
                await anyio.wait_readable(sys.stdin)
        if silence.cancelled_caught:
            sys.stderr.write("flash: reading the standard input to its end; give `< /dev/null` for none\n")
            with suppress(PermissionError):
                await anyio.wait_readable(sys.stdin)
        piece = os.read(sys.stdin.fileno(), 1 << 16)
        if not piece:
            return bytes(data)
        data += piece
    raise SandboxRefusedError(
        f"the standard input has more than {MAX_INPUT} bytes; write it to a file of the sandbox, and run it with --in"
    )
