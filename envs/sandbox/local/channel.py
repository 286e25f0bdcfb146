"""Channel: calls to the agent of one sandbox over one link, any number of them at a time.

`envs.sandbox.local.sandbox.LocalSandbox` opens it over the standard streams of the container's first process.
`envs.sandbox.local.agent.AgentSandbox` makes the calls, and `envs.sandbox.agent.main` answers them. In this package the
*host* of an agent is the process that controls it, which is this process.

Law of a call: it ends exactly once, by its result, a typed refusal, its deadline, the loss of the channel, or its own
cancellation. After a deadline or a cancellation the agent is notified, and ends everything that it started for the
call. A call that did not end by its result may or may not have been carried out.

A frame is written completely or not at all, also if its caller is cancelled, so one call cannot damage another. The
data that a call holds in memory is bounded: output by the credit that the host gave or by the cap of the result, input
by the credit of the agent. Credit is a number of bytes that one end allows the other to send. Data from the sandbox is
only ever decoded as the expected types. A frame is

    length u32 | crc32 u32 | body (msgpack)

The body is [call, operation, argument] to the agent, and [call, kind, value] from it. Call 0 ends the channel.
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from enum import IntEnum
from typing import TypeVar

import anyio
import msgspec

from envs.sandbox.engines.backend import Link
from flash import errors
from flash.errors import (
    DECODE_ERRORS,
    SandboxError,
    SandboxLimitError,
    SandboxLostError,
    SandboxRefusedError,
    SandboxTimeoutError,
)

MAX_FRAME = 1 << 18
"""Longest body in bytes, in both directions. A longer one ends the channel."""
PIECE = 1 << 16
"""Most bytes of data in one frame."""
PIECE_COST = 64
"""Bytes of credit that a piece of output takes beyond its data, because many small pieces take more memory than one
large piece."""
INPUT_WINDOW = 4 * PIECE
"""Bytes of input that may be in transit to a command which does not read them."""
OUTPUT_WINDOW = 8 * PIECE
"""Bytes of streamed output that may be in transit to a caller that does not take them."""
CLOSE_SECONDS = 5.0
"""Seconds that the end of a call waits to send its cancellation, over a link that may be broken."""

T = TypeVar("T")

_HEADER = struct.Struct(">II")
"""Length and checksum before each body."""
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(tuple[int, int, msgspec.Raw])
"""Decoder of a body from the agent: call, kind, and a value that is decoded later."""
_COUNT = msgspec.msgpack.Decoder(int)
"""Decoder of the value of a frame with credit."""
_REFUSALS: dict[str, type[SandboxError]] = {
    "file": errors.SandboxFileError,
    "limit": SandboxLimitError,
    "busy": errors.SandboxBusyError,
    "gone": errors.SandboxClosedError,
    "request": SandboxRefusedError,
}
"""Class of error for each code with which the agent refuses a call."""


class AgentFrameKind(IntEnum):
    """Kind of a frame from the agent."""

    RESULT = 0
    """Last frame of a call that was carried out."""
    FAILURE = 1
    """Last frame of a call that was refused: a code and a message."""
    CHUNK = 2
    """Piece of output, or of a listing."""
    CREDIT = 3
    """Number of bytes of input that the agent additionally accepts."""


def encode(call: int, operation: str, argument: object) -> bytes:
    """Encode one frame to the agent.

    Raises:
        SandboxLimitError: the frame would be too long.
        SandboxRefusedError: a value cannot be encoded.
    """
    try:
        body = _ENCODER.encode((call, operation, argument))
    except (OverflowError, UnicodeEncodeError) as error:
        raise SandboxRefusedError(f"the arguments of `{operation}` cannot be encoded: {error}") from None
    if len(body) > MAX_FRAME:
        raise SandboxLimitError(
            f"`{operation}` needs {len(body)} bytes with all its arguments; a sandbox takes {MAX_FRAME} at once"
        )
    return _HEADER.pack(len(body), zlib.crc32(body)) + body


class Decoder:
    """Decoder of the bytes from the agent into frames of (call, kind, value)."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        """Bytes of a frame that is not complete."""

    def feed(self, data: bytes) -> list[tuple[int, int, msgspec.Raw]]:
        """Add bytes, and return the frames that are complete now.

        Raises:
            SandboxLostError: the bytes are not valid frames.
        """
        self._buffer += data
        frames: list[tuple[int, int, msgspec.Raw]] = []
        start, end = 0, len(self._buffer)
        while end - start >= _HEADER.size:
            length, checksum = _HEADER.unpack_from(self._buffer, start)
            if length > MAX_FRAME:
                raise SandboxLostError(f"the agent announces a frame of {length} bytes, more than {MAX_FRAME}")
            stop = start + _HEADER.size + length
            if stop > end:
                break
            body = bytes(memoryview(self._buffer)[start + _HEADER.size : stop])
            if zlib.crc32(body) != checksum:
                raise SandboxLostError("a frame of the agent was damaged")
            try:
                frames.append(_DECODER.decode(body))
            except DECODE_ERRORS as error:
                raise SandboxLostError(f"the agent sent bytes that are not a frame: {error}") from error
            start = stop
        del self._buffer[:start]
        return frames


class AgentCall:
    """A call to the agent that is in progress. Made by `Channel.open`."""

    def __init__(self, channel: Channel, number: int, room: int) -> None:
        """Describe a call that `Channel.open` is about to send. The fields below explain `number` and `room`."""
        self._channel = channel
        self.number = number
        """Number of the call in its frames."""
        self._room = room
        """Bytes that the agent may still send. More than these violate the protocol and end the channel."""
        self._frames: deque[tuple[int, msgspec.Raw]] = deque()
        """Frames that the caller has not taken yet, each with its kind and value."""
        self._arrived = anyio.Event()
        """Event that is set when a frame arrives or the channel breaks; `next` replaces it."""
        self._input_window = INPUT_WINDOW
        """Bytes of input that the agent still accepts."""
        self._room_for_input = anyio.Event()
        """Event that is set when the agent gives credit, or the call or the channel ends; `_post_input` replaces it."""
        self.ended = False
        """True once the result or the failure has arrived."""

    def receive(self, kind: int, value: msgspec.Raw) -> None:
        """Store a frame that has arrived for this call, or count its credit.

        `Channel.run` calls this, and ends the channel if it raises.

        Raises:
            SandboxLostError: the agent has sent more output than it may, which would fill the host's memory.
            msgspec.DecodeError: the credit is not a number.
        """
        if kind == AgentFrameKind.CREDIT:
            self._input_window += _COUNT.decode(value)
            self._room_for_input.set()
            return
        self._room -= max(len(value), PIECE_COST)
        if self._room < 0:
            raise SandboxLostError("the agent sent more output than it may")
        if kind in (AgentFrameKind.RESULT, AgentFrameKind.FAILURE):
            self.ended = True
            # The agent gives no credit for input of a call that has ended, so a task that waits for some must go on.
            self._room_for_input.set()
        self._frames.append((kind, value))
        self._arrived.set()

    def break_off(self) -> None:
        """Wake the waiting tasks of this call, because the channel is broken."""
        self._arrived.set()
        self._room_for_input.set()

    async def next(self) -> tuple[str, msgspec.Raw] | msgspec.Raw:
        """Wait for the next piece of output, and return it as (stream, data), or return the result.

        Both data and result are still encoded; `decode` checks their types. A piece of a listing has the stream `list`.

        Raises:
            SandboxError: the agent refused the call, or the channel broke.
        """
        while not self._frames:
            self._channel.check()
            self._arrived = anyio.Event()
            await self._arrived.wait()
        kind, value = self._frames.popleft()
        if kind == AgentFrameKind.RESULT:
            return value
        if kind == AgentFrameKind.CHUNK:
            return decode(value, tuple[str, msgspec.Raw])
        code, message = decode(value, tuple[str, str])
        raise _REFUSALS.get(code, SandboxRefusedError)(message)

    async def result(self, result_type: type[T]) -> tuple[T, dict[str, bytes]]:
        """Wait for the result. Returns it, decoded as `result_type`, with all output that came before it, by stream.

        Raises the errors of `next` and `decode`.
        """
        gathered: dict[str, bytearray] = {}
        while True:
            piece = await self.next()
            if isinstance(piece, msgspec.Raw):
                return decode(piece, result_type), {name: bytes(data) for name, data in gathered.items()}
            name, data = piece
            gathered.setdefault(name, bytearray()).extend(decode(data, bytes))

    async def send(self, data: bytes, *, last: bool = False) -> None:
        """Send input, in pieces of at most `PIECE` bytes, as fast as the agent takes it. `last` ends the input.

        Input that a command does not read waits here, and not in the agent's memory.
        """
        view = memoryview(data)
        while len(view) > PIECE:
            await self._post_input("data", view[:PIECE])
            view = view[PIECE:]
        await self._post_input("eof" if last else "data", view)

    async def _post_input(self, operation: str, piece: memoryview) -> None:
        """Send a piece of input with the operation `data` or `eof`. Waits while the agent has no room for it.

        Input of a call that has ended is dropped: a command may end without reading all of it. The window may become
        negative by less than one piece. Raises the channel's error if it is broken.
        """
        while self._input_window <= 0 and not self.ended:
            self._channel.check()
            self._room_for_input = anyio.Event()
            await self._room_for_input.wait()
        if self.ended:
            return
        self._input_window -= len(piece)
        await self.post(operation, piece)

    async def post(self, operation: str, argument: object) -> None:
        """Send the agent a frame about this call, with the errors of `Channel.post`. `operation` is from its table."""
        await self._channel.post(self.number, operation, argument)

    async def grant(self, data: bytes) -> None:
        """Give the agent credit for as much output as `data`, which the caller has taken.

        Only streamed calls need this: the agent does not read more of their command's output when the credit is used
        up, so the command waits.
        """
        count = len(data) + PIECE_COST
        # More than the credit, so that only an agent that ignores its credit ever runs out of room.
        self._room += 2 * count
        await self.post("credit", count)


class Channel:
    """The calls over one link. `run` must run as a task as long as there are calls.

    `LocalSandbox` makes a channel for each link to its agent.
    """

    def __init__(self, link: Link, rest: bytes = b"") -> None:
        """Create a channel without calls.

        Args:
            link: link to the agent. The channel's owner closes it.
            rest: bytes that were already read from the link, after the greeting.
        """
        self._link = link
        self._rest = rest
        """Bytes that `run` processes before it reads from the link."""
        self._decoder = Decoder()
        """Decoder of the bytes from the agent."""
        self._calls: dict[int, AgentCall] = {}
        """Calls in progress by their numbers."""
        self._numbers = 0
        """Number of calls so far."""
        self._broken: SandboxError | None = None
        """Error with which every call ends since the channel broke; None while it works."""
        self.heard = anyio.Event()
        """Event that is set, and replaced by a new one, whenever data arrives. Also set when the channel breaks."""

    @property
    def broken(self) -> bool:
        """True if the channel is broken: no call can end by its result any more."""
        return self._broken is not None

    def check(self) -> None:
        """Raise SandboxLostError or SandboxClosedError if the channel is broken."""
        if self._broken is not None:
            # A new error each time: raising one object in many tasks would mix their tracebacks.
            raise type(self._broken)(str(self._broken))

    async def run(self) -> None:
        """Read frames from the link and pass them to their calls.

        `LocalSandbox` runs this in a task for each link. It returns when the link has ended, or when the agent has
        ended the channel or sent invalid data; every call in progress then raises an error.
        """
        # The error if this is cancelled, because the sandbox is being closed.
        error = SandboxLostError("the channel to the sandbox was closed")
        try:
            while data := self._rest or await self._link.receive():
                self._rest = b""
                for number, kind, value in self._decoder.feed(data):
                    if number == 0:
                        raise SandboxLostError(
                            "the agent ended the channel; the call may or may not have been carried out"
                        )
                    if (call := self._calls.get(number)) is not None:
                        call.receive(kind, value)
                self.heard.set()
                self.heard = anyio.Event()
            error = SandboxLostError("the channel to the sandbox ended; the call may or may not have been carried out")
        except SandboxLostError as reason:
            error = reason
        except msgspec.DecodeError as reason:
            error = SandboxLostError(f"the agent sent a value of an unexpected form: {reason}")
        finally:
            self.break_off(error)

    def break_off(self, error: SandboxError) -> None:
        """End every call in progress, and all later ones, with this error. The first error is kept.

        `run` calls this at the end of the link, and `LocalSandbox` when the sandbox ends for another reason.
        """
        self._broken = self._broken or error
        for call in self._calls.values():
            call.break_off()
        self.heard.set()

    async def post(self, number: int, operation: str, argument: object) -> None:
        """Send one frame of the call with this number. Raises the channel's error if it is broken.

        Also raises SandboxLostError if the link breaks, and the errors of `encode`. A link sends a frame as a whole,
        also if this task is cancelled while it waits.
        """
        self.check()
        await self._link.send(encode(number, operation, argument))

    async def open(self, operation: str, argument: object, *, room: int = 1 << 16) -> AgentCall:
        """Begin a call of `operation`, a name in the agent's table, and return it. The caller must `finish` it.

        `room` is the number of bytes of output that the agent may send at first; `AgentCall.grant` adds to it. Raises
        the errors of `post`; nothing needs to be finished then.
        """
        self._numbers += 1
        # The additional bytes are for the result itself.
        call = self._calls[self._numbers] = AgentCall(self, self._numbers, room + (1 << 16))
        try:
            await call.post(operation, argument)
        except BaseException:
            await self.finish(call)
            raise
        return call

    async def finish(self, call: AgentCall) -> None:
        """End a call. If neither result nor failure has arrived, notify the agent, which then ends all that runs for
        it."""
        del self._calls[call.number]
        if not call.ended and self._broken is None:
            with anyio.move_on_after(CLOSE_SECONDS, shield=True):
                # The loss of the link ends the call as well.
                with suppress(SandboxLostError):
                    await self._link.send(encode(call.number, "cancel", None))

    @asynccontextmanager
    async def call(
        self, operation: str, argument: object, timeout: float, *, room: int = 1 << 16
    ) -> AsyncGenerator[AgentCall]:
        """Open a call for the time of the block, which must end within `timeout` seconds. `room` is that of `open`.

        Raises:
            SandboxTimeoutError: the block did not end in time.
            SandboxError: the agent refused the call, or the channel broke.
        """
        with in_time(operation, timeout):
            call = await self.open(operation, argument, room=room)
            try:
                yield call
            finally:
                await self.finish(call)

    async def ask(
        self, operation: str, argument: object, result_type: type[T], timeout: float, *, room: int = 1 << 16
    ) -> tuple[T, dict[str, bytes]]:
        """Carry out a `call` without input. Returns the result, as `result_type`, and the output by stream.

        Raises the errors of `call` and `decode`.
        """
        async with self.call(operation, argument, timeout, room=room) as call:
            return await call.result(result_type)


@contextmanager
def in_time(operation: str, timeout: float) -> Generator[None]:
    """Raise SandboxTimeoutError if the block takes longer than `timeout` seconds. `operation` is for the message."""
    with anyio.move_on_after(timeout) as scope:
        yield
    if scope.cancelled_caught:
        raise SandboxTimeoutError(
            f"waited {timeout:g} s for the sandbox to answer `{operation}`; look at its state, and its machine's load"
        )


def decode(value: msgspec.Raw, result_type: type[T]) -> T:
    """Decode a value from the agent as `result_type`. Raises SandboxLostError if it does not have this type."""
    try:
        return msgspec.msgpack.decode(value, type=result_type)
    except DECODE_ERRORS as error:
        raise SandboxLostError(f"the agent sent an answer of an unexpected form: {error}") from error
