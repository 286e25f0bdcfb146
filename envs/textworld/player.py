"""A process that plays games, for all episodes of a node: one request at a time, under a deadline.

A process that does not answer in time, or that dies, is replaced by the next request. Nothing is lost with it: each
request has all the commands of its game. A request that is cancelled is not waited for; its answer is thrown away when
it comes.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from subprocess import DEVNULL, PIPE

import anyio
import msgspec
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from envs.textworld.games import LENGTH, Play, Shown
from flash.errors import EnvError

COMMAND = (sys.executable, "-m", "envs.textworld")

MESSAGE_S = 10.0
"""Seconds for one message to pass, once it has begun."""


class _StuckError(Exception):
    """A message has begun, and does not end."""


class Player:
    """One process, and its successors. Made by `open_player`."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._lock = anyio.Lock()
        self._numbers = itertools.count()
        self._process: Process | None = None
        self._answers: BufferedByteReceiveStream | None = None
        self.started = 0
        """Processes so far."""

    async def play(self, episode: int, file: str, commands: Sequence[str], timeout: float) -> Shown:
        """What a game shows after these commands. The deadline counts from the moment the process is free.

        Raises:
            EnvError: it did not answer in time, or died over it.
        """
        last = repr(commands[-1]) if commands else "its start"
        async with self._lock:
            request = Play(next(self._numbers), episode, file, list(commands))
            try:
                with anyio.fail_after(timeout):
                    return await self._asked(request)
            except TimeoutError:
                await self.end()
                raise EnvError(f"the game did not answer {last} within {timeout:g} s") from None
            except _StuckError:
                await self.end()
                raise EnvError(f"the game's process stopped in the middle of a message over {last}") from None
            except (anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError):
                await self.end()
                raise EnvError(f"the game's process died over {last}") from None

    async def _asked(self, request: Play) -> Shown:
        process, answers = await self._running()
        assert process.stdin is not None
        message = msgspec.msgpack.encode(request)
        with anyio.move_on_after(
            MESSAGE_S, shield=True
        ) as passing:  # half a request would be the beginning of the next one
            await process.stdin.send(LENGTH.pack(len(message)) + message)
        if passing.cancelled_caught:
            raise _StuckError
        while (shown := await self._answer(answers)).number != request.number:
            pass  # that of a request which was cancelled
        return shown

    async def _answer(self, answers: BufferedByteReceiveStream) -> Shown:
        (length,) = LENGTH.unpack(await answers.receive_exactly(LENGTH.size))
        message = b""
        with anyio.move_on_after(
            MESSAGE_S, shield=True
        ) as passing:  # half an answer would be the beginning of the next one
            message = await answers.receive_exactly(length)
        if passing.cancelled_caught:
            raise _StuckError
        return msgspec.msgpack.decode(message, type=Shown)

    async def _running(self) -> tuple[Process, BufferedByteReceiveStream]:
        if self._process is None or self._answers is None:
            process = await anyio.open_process(self._command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
            assert process.stdout is not None
            self._process, self._answers = process, BufferedByteReceiveStream(process.stdout)
            self.started += 1
        return self._process, self._answers

    async def end(self) -> None:
        """Kill the process, if there is one."""
        process, self._process, self._answers = self._process, None, None
        if process is not None:
            with anyio.CancelScope(shield=True):
                process.kill()
                await process.aclose()


@asynccontextmanager
async def open_player(command: Sequence[str] = COMMAND) -> AsyncGenerator[Player]:
    """A player that is ended with the block."""
    player = Player(command)
    try:
        yield player
    finally:
        await player.end()
