"""Programs as agents, on the node itself."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from subprocess import PIPE

import anyio
from anyio.abc import ByteReceiveStream

from flash.errors import EnvError

OUTPUT_BYTES = 1 << 20
"""Kept of what a command writes, from its beginning."""

REST_S = 5.0
"""Seconds for the rest of what a program wrote to be read, once it has ended."""

STDERR_SHOWN = 500
"""Characters shown of what a command that failed complained of, from the end."""


async def run_command(command: list[str], base_url: str, api_key: str, task: str) -> str:
    """Run a program on the task; what it wrote is the answer.

    Raises:
        EnvError: it failed.
    """
    variables = {**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
    process = await anyio.open_process(
        command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=variables, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    written, complaint = bytearray(), bytearray()
    try:
        async with anyio.create_task_group() as streams:
            streams.start_soon(_gather, process.stdout, written)
            streams.start_soon(_gather, process.stderr, complaint)
            with suppress(anyio.BrokenResourceError):  # it need not read its task
                await process.stdin.send(task.encode())
            await process.stdin.aclose()
            await process.wait()
            # What it has started and left behind may hold them open for ever.
            streams.cancel_scope.deadline = anyio.current_time() + REST_S
    finally:
        # With all that it has started.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with anyio.CancelScope(shield=True):
            await process.aclose()
    code = process.returncode
    if code != 0:
        said = complaint.decode("utf-8", "replace").strip()[-STDERR_SHOWN:]
        raise EnvError(f"`{command[0]}` ended with exit code {code}: {said}")
    return written.decode("utf-8", "replace")


async def _gather(stream: ByteReceiveStream, into: bytearray) -> None:
    """Read all there is, and keep OUTPUT_BYTES of it."""
    async for piece in stream:
        into += piece[: OUTPUT_BYTES - len(into)]
