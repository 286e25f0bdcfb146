"""Program of swe-rex's client for `benchmarks.sandbox.run`, in the environment of `benchmarks.sandbox.swerex`.

Reads one JSON request per line, `{"do": NAME, …}`, and answers each with one line: the seconds of every call it made.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable

from swerex.runtime.abstract import (  # pyright: ignore[reportMissingImports]: swe-rex's environment has it
    BashAction,
    Command,
    CreateBashSessionRequest,
)
from swerex.runtime.remote import RemoteRuntime  # pyright: ignore[reportMissingImports]: as above

ALIVE_S = 60.0
"""Longest wait for a server."""


class Client:
    """Client of one server at a time. Each method is an operation that `serve` calls by its name in a request."""

    def __init__(self) -> None:
        self._runtime: RemoteRuntime
        """Connection to the server; set by `connect`, which must be the first call."""

    async def connect(self, port: int, token: str) -> list[float]:
        """Wait for the server, as swe-rex's own deployments do, and run a first command. Returns its seconds."""
        self._runtime = RemoteRuntime(port=port, auth_token=token)
        await self._runtime.wait_until_alive(timeout=ALIVE_S)
        return await self.execute(1)

    async def open_session(self) -> list[float]:
        """Open a shell; return the seconds that it took."""
        return await _seconds(lambda: self._runtime.create_session(CreateBashSessionRequest()), 1)

    async def session(self, count: int) -> list[float]:
        """Return the seconds of each command in the shell."""
        return await _seconds(lambda: self._runtime.run_in_session(BashAction(command="true")), count)

    async def execute(self, count: int) -> list[float]:
        """Return the seconds of each command, each a process of its own."""
        return await _seconds(lambda: self._runtime.execute(Command(command=["true"])), count)


async def _seconds(call: Callable[[], Awaitable[object]], count: int) -> list[float]:
    """Return the seconds of each of `count` calls."""
    taken: list[float] = []
    for _ in range(count):
        begin = time.perf_counter()
        await call()
        taken.append(time.perf_counter() - begin)
    return taken


def serve() -> None:
    """Answer requests until the end of the input."""
    client = Client()
    # Answers go to a copy of standard output. Standard output itself becomes standard error, because swe-rex's own
    # output must not get between the answers.
    with os.fdopen(os.dup(1), "w") as answers, asyncio.Runner() as loop:
        os.dup2(2, 1)
        for line in sys.stdin:
            request = json.loads(line)
            operation = getattr(client, request.pop("do"))
            answers.write(json.dumps(loop.run(operation(**request))) + "\n")
            answers.flush()


if __name__ == "__main__":
    serve()
