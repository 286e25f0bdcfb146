"""A process that plays games, for all episodes of a node: one request at a time, under a deadline.

A process first loads TextWorld, which takes a second, and on a busy machine many: that has a deadline of its own. One
that does not answer in time, or that dies, is replaced by the next request. Nothing is lost with it: each
request has all the commands of its game. A request that is cancelled is not waited for; its answer is thrown away when
it comes.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from subprocess import DEVNULL, PIPE

import anyio
import msgspec
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from envs.textworld.games import LENGTH, Play, ShownGame
from flash.errors import EnvError

COMMAND = (sys.executable, "-m", "envs.textworld")

START_S = 180.0
"""Seconds for a process to load TextWorld, which takes one of an idle core."""

MESSAGE_S = 10.0
"""Seconds for one message to pass, once it has begun."""


_GONE = (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError)
"""What a process that has died is noticed by."""


class _StuckError(Exception):
    """A message has begun, and does not end."""


class Player:
    """One process, and its successors. Made by `open_player`."""

    def __init__(self, command: Sequence[str], start_s: float, message_s: float) -> None:
        self._command, self._start_s, self._message_s = command, start_s, message_s
        self._lock = anyio.Lock()
        self._numbers = itertools.count()
        self._process: Process | None = None
        self._answers: BufferedByteReceiveStream | None = None
        self._loaded = False
        self.started = 0
        """Processes so far."""

    async def load(self) -> None:
        """Start the process, unless one is there.

        Raises:
            EnvError: it does not load TextWorld.
        """
        async with self._lock:
            await self._load()

    async def play(self, episode: int, file: str, commands: Sequence[str], timeout: float) -> ShownGame:
        """What a game shows after these commands. The deadline counts from the moment the process is loaded and free.

        Raises:
            EnvError: it did not answer in time, or died over it, or does not load TextWorld.
        """
        last = repr(commands[-1]) if commands else "its start"
        async with self._lock:
            process, answers = await self._load()
            request = Play(next(self._numbers), episode, file, list(commands))
            try:
                with anyio.fail_after(timeout):
                    return await self._asked(process, answers, request)
            except TimeoutError:
                await self.end()
                raise EnvError(f"the game did not answer {last} within {timeout:g} s") from None
            except _StuckError:
                await self.end()
                raise EnvError(f"the game's process stopped in the middle of a message over {last}") from None
            except _GONE:
                await self.end()
                raise EnvError(f"the game's process died over {last}") from None

    async def _load(self) -> tuple[Process, BufferedByteReceiveStream]:
        if self._process is None or self._answers is None:
            # Cancelled half-way, it would leave a process that nobody knows, and pipes that nobody closes.
            with anyio.CancelScope(shield=True):
                self._process = await anyio.open_process(self._command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
            assert self._process is not None
            assert self._process.stdout is not None
            self._answers = BufferedByteReceiveStream(self._process.stdout)
            self._loaded = False
            self.started += 1
        if not self._loaded:
            program = " ".join(self._command)
            try:
                with anyio.fail_after(self._start_s):
                    await self._answers.receive_exactly(LENGTH.size)
            except TimeoutError:
                await self.end()
                message = f"the games' process did not load TextWorld within {self._start_s:g} s"
                raise EnvError(f"{message}: is the machine overloaded? It is `{program}`") from None
            except _GONE:
                await self.end()
                message = f"the games' process died while it loaded TextWorld: `{program}` says why"
                raise EnvError(message) from None
            self._loaded = True
        return self._process, self._answers

    async def end(self) -> None:
        """Kill the process, if there is one."""
        process, self._process, self._answers = self._process, None, None
        if process is not None:
            with anyio.CancelScope(shield=True):
                with suppress(ProcessLookupError):  # it has died by itself, and the event loop has seen it
                    process.kill()
                await process.aclose()

    async def _asked(self, process: Process, answers: BufferedByteReceiveStream, request: Play) -> ShownGame:
        assert process.stdin is not None
        message = msgspec.msgpack.encode(request)
        # Half a request would be the beginning of the next one.
        with anyio.move_on_after(self._message_s, shield=True) as passing:
            await process.stdin.send(LENGTH.pack(len(message)) + message)
        if passing.cancelled_caught:
            raise _StuckError
        while (shown := await self._answer(answers)).number != request.number:
            pass  # that of a request which was cancelled
        return shown

    async def _answer(self, answers: BufferedByteReceiveStream) -> ShownGame:
        (length,) = LENGTH.unpack(await answers.receive_exactly(LENGTH.size))
        message = b""
        # Half an answer would be the beginning of the next one.
        with anyio.move_on_after(self._message_s, shield=True) as passing:
            message = await answers.receive_exactly(length)
        if passing.cancelled_caught:
            raise _StuckError
        return msgspec.msgpack.decode(message, type=ShownGame)


@asynccontextmanager
async def open_player(
    command: Sequence[str] = COMMAND, start_s: float = START_S, message_s: float = MESSAGE_S
) -> AsyncGenerator[Player]:
    """A player that is ended with the block. Times are of a process's start and of one message, in seconds."""
    player = Player(command, start_s, message_s)
    try:
        yield player
    finally:
        await player.end()
