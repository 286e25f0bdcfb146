"""Agents that are programs, and run on the node itself: the option `command` of `envs.agent` without a `box`."""

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
"""Command that runs a program and kills all its descendants when it ends."""

OUTPUT_BYTES = 1 << 20
"""Largest answer of a command, in bytes."""

REST_S = 5.0
"""Seconds that a program has to exit after SIGTERM, and that the rest of its output has to arrive after its exit."""

STDERR_SHOWN = 1000
"""Number of characters of a failed command's standard error in an error message. They are taken from both ends: wrapped
programs print the cause first, and Python prints it last."""

STDERR_BYTES = 1 << 16
"""Number of bytes of standard error that are kept from each end."""


async def run_command(command: list[str], base_url: str, api_key: str, task: str) -> str:
    """Run a program on the task, which it reads from standard input, and return its standard output as the answer.

    The program calls the policy through the endpoint in its environment variables. If this call is cancelled, the
    program and all its descendants are killed.

    Raises:
        EnvError: the program failed, or wrote more than `OUTPUT_BYTES`.
    """
    variables = {**os.environ, **endpoint_variables(base_url, api_key)}
    # Some clients of Anthropic would send this token of the user instead of the key.
    variables.pop("ANTHROPIC_AUTH_TOKEN", None)
    process = await _begin([*LAUNCHER, *command], variables)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    written, complaint = bytearray(), bytearray()
    try:
        async with anyio.create_task_group() as streams:
            streams.start_soon(_gather, process.stdout, written)
            streams.start_soon(_gather_ends, process.stderr, complaint)
            with suppress(anyio.BrokenResourceError):  # the program may end without reading its task
                await process.stdin.send(task.encode("utf-8", "replace"))
            await process.stdin.aclose()
            await process.wait()
            # A descendant that the launcher could not kill may keep the pipes open for ever.
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


def endpoint_variables(base_url: str, api_key: str) -> dict[str, str]:
    """Return the environment variables in which the clients of OpenAI and Anthropic look for a base URL and a key.

    Anthropic's clients append `/v1` to the base URL themselves.
    """
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": api_key,
    }


async def _begin(command: list[str], variables: dict[str, str]) -> Process:
    """Start a program in a session of its own. A cancellation takes effect only when the program has started."""
    # A cancellation half-way would leave a process without an owner, and pipes that are never closed.
    with anyio.CancelScope(shield=True):
        return await anyio.open_process(
            command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=variables, start_new_session=True
        )
    raise AssertionError("nothing cancels the block")  # For type checkers, since a cancel scope can swallow a return.


def too_long(command: list[str]) -> EnvError:
    """Return the error for a command whose answer is too long."""
    return EnvError(f"`{command[0]}` wrote more than {OUTPUT_BYTES} bytes to its standard output: that is its answer")


async def _end(process: Process) -> None:
    """End a program if it still runs, and kill all processes of its session. Waits for the program `REST_S` at most.

    SIGTERM lets the launcher kill the program's descendants, also those in sessions of their own.
    """
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.terminate()
        with anyio.move_on_after(REST_S):
            await process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.aclose()


async def _gather(stream: ByteReceiveStream, into: bytearray) -> None:
    """Read the stream to its end. Keeps `OUTPUT_BYTES` and one more byte, which shows that the answer is too long."""
    async for piece in stream:
        into += piece[: OUTPUT_BYTES + 1 - len(into)]


async def _gather_ends(stream: ByteReceiveStream, into: bytearray) -> None:
    """Read the stream to its end. Keeps `STDERR_BYTES` from each end."""
    async for piece in stream:
        into += piece
        del into[STDERR_BYTES:-STDERR_BYTES]
