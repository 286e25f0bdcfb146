"""Programs as agents, on the node itself."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE

import anyio
from anyio.abc import ByteReceiveStream, Process

from flash.environment.calls import shortened
from flash.errors import EnvError

LAUNCHER = [sys.executable, "-IS", str(Path(__file__).with_name("launcher.py"))]
"""What runs a command, and ends with it all that it has started."""

OUTPUT_BYTES = 1 << 20
"""That a command may write as its answer."""

REST_S = 5.0
"""Seconds for a program to end, and for the rest of what it wrote to be read, once it has ended."""

STDERR_SHOWN = 1000
"""Characters shown of the standard error of a command that failed, from both of its ends: programs that are wrapped in
others name the cause first, and Python names it last."""

STDERR_BYTES = 1 << 16
"""Bytes that are kept of each end of it."""


async def run_command(command: list[str], base_url: str, api_key: str, task: str) -> str:
    """Run a program on the task; what it wrote is the answer.

    Raises:
        EnvError: it failed.
    """
    variables = {**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
    process = await _begin([*LAUNCHER, *command], variables)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    written, complaint = bytearray(), bytearray()
    try:
        async with anyio.create_task_group() as streams:
            streams.start_soon(_gather, process.stdout, written)
            streams.start_soon(_gather_ends, process.stderr, complaint)
            with suppress(anyio.BrokenResourceError):  # it need not read its task
                await process.stdin.send(task.encode())
            await process.stdin.aclose()
            await process.wait()
            streams.cancel_scope.deadline = anyio.current_time() + REST_S
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process)
    code = process.returncode
    if code != 0:
        said = shortened(complaint.decode("utf-8", "replace").strip(), STDERR_SHOWN)
        raise EnvError(f"`{command[0]}` ended with exit code {code}: {said}")
    if len(written) > OUTPUT_BYTES:
        raise too_long(command)
    return written.decode("utf-8", "replace")


async def _begin(command: list[str], variables: dict[str, str]) -> Process:
    """Start a program. Cancelled half-way, it would be one that nobody knows, with pipes that nobody closes."""
    with anyio.CancelScope(shield=True):
        return await anyio.open_process(
            command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=variables, start_new_session=True
        )
    raise AssertionError("nothing cancels the block")


def too_long(command: list[str]) -> EnvError:
    """Of a command that wrote more than an answer may have."""
    return EnvError(f"`{command[0]}` wrote more than {OUTPUT_BYTES} bytes to its standard output: that is its answer")


async def _end(process: Process) -> None:
    """End a program, if it has not ended, and all that it has started."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.terminate()
        with anyio.move_on_after(REST_S):
            await process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.aclose()


async def _gather(stream: ByteReceiveStream, into: bytearray) -> None:
    """Read all there is, and keep a byte more of it than there may be."""
    async for piece in stream:
        into += piece[: OUTPUT_BYTES + 1 - len(into)]


async def _gather_ends(stream: ByteReceiveStream, into: bytearray) -> None:
    """Read all there is, and keep both ends of it."""
    async for piece in stream:
        into += piece
        del into[STDERR_BYTES:-STDERR_BYTES]
