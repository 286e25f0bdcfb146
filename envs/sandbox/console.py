"""The console that a command runs in: what is typed goes into a sandbox, what that says comes out."""

from __future__ import annotations

import os
import signal
import sys
import termios
import tty
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import anyio

from flash.errors import SandboxRefusedError

if TYPE_CHECKING:
    from collections.abc import Generator

    from envs.sandbox.api import Terminal

END_OF_INPUT = b"\x04"
"""What a terminal takes for the end of what is typed."""
END_EVERY_S = 0.3
MAX_INPUT = 16 << 20
"""Bytes of standard input that `run` takes."""
SILENCE_S = 2.0
"""Seconds without any input after which `run` says what it waits for."""


async def standard_input() -> bytes:
    """What is piped into this command, to its end; nothing from a terminal.

    Raises:
        SandboxRefusedError: it is too long.
    """
    if sys.stdin is None or sys.stdin.isatty():
        return b""
    data = bytearray()
    while len(data) <= MAX_INPUT:
        with anyio.move_on_after(SILENCE_S) as silence:
            # A file cannot be waited for, and has no need of it.
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


async def join(terminal: Terminal) -> None:
    """This terminal and the sandbox's, until that ends."""
    async with anyio.create_task_group() as tasks:

        async def type_in() -> None:
            last = b"\n"
            while True:
                # A file cannot be waited for, and has no need of it.
                with suppress(PermissionError):
                    await anyio.wait_readable(sys.stdin)
                data = os.read(sys.stdin.fileno(), 4096)
                if data:
                    last = data[-1:]
                    await terminal.write(data)
                    continue
                # Counts at the beginning of a line only. Again: what comes while a program begins or ends may be lost.
                await terminal.write(END_OF_INPUT if last == b"\n" else b"\n" + END_OF_INPUT)
                last = b"\n"
                await anyio.sleep(END_EVERY_S)

        async def resize() -> None:
            with anyio.open_signal_receiver(signal.SIGWINCH) as changes:
                async for _ in changes:
                    await terminal.resize(*window())

        tasks.start_soon(type_in)
        tasks.start_soon(resize)
        while data := await terminal.read():
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        tasks.cancel_scope.cancel()


def window() -> tuple[int, int]:
    """Its rows and columns; 24 and 80 where there is none."""
    try:
        size = os.get_terminal_size(sys.stdout.fileno())
    except OSError:
        return 24, 80
    return max(1, size.lines), max(1, size.columns)


@contextmanager
def raw() -> Generator[None]:
    """Every key goes to the sandbox, ctrl-C too."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setraw(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
