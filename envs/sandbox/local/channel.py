"""Calls to the agent of one sandbox, any number at a time, over one link.

Law of a call: it ends exactly once, by its result, a typed refusal, its deadline, the loss of the channel or its own
cancellation; in the last cases the agent is told, so that what was started ends as well. A call that did not end by its
result may or may not have been carried out.

Nothing is lost between calls: a frame is written whole or not at all, also when its caller is cancelled. What a call
may hold here is bounded: output by the credit that the host gave or by the cap of the result, input by the agent's.
Whatever a sandbox sends is only ever decoded as the types that are expected. A frame is

    length u32 | crc32 u32 | body (msgpack)

To the agent the body is [call, operation, argument], from it [call, kind, value]; call 0 is the end of the channel.
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
from flash.errors import SandboxError, SandboxLimitError, SandboxLostError, SandboxRefusedError, SandboxTimeoutError

MAX_FRAME = 1 << 18
"""Longest body in bytes, both ways. A longer one ends the channel."""
PIECE = 1 << 16
"""Bytes of data sent in one frame."""
PIECE_COST = 64
"""Bytes of credit that a piece of output takes beyond its data: many small pieces are more to hold than a large one."""
INPUT_WINDOW = 4 * PIECE
"""Bytes of input that may be on their way to a command which does not read them."""
OUTPUT_WINDOW = 8 * PIECE
"""Bytes of streamed output that may be on their way to a caller who does not take them."""
CLOSE_SECONDS = 5.0
"""For a broken link to be closed."""

T = TypeVar("T")

_HEADER = struct.Struct(">II")
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(tuple[int, int, msgspec.Raw])
_COUNT = msgspec.msgpack.Decoder(int)
_REFUSALS: dict[str, type[SandboxError]] = {
    "file": errors.SandboxFileError,
    "limit": SandboxLimitError,
    "busy": errors.SandboxBusyError,
    "gone": errors.SandboxClosedError,
    "request": SandboxRefusedError,
}


class AgentFrameKind(IntEnum):
    """What a frame of the agent is: the end of a call, well or badly, output, or room for more input."""

    RESULT = 0
    FAILURE = 1
    CHUNK = 2
    CREDIT = 3


def encode(call: int, operation: str, argument: object) -> bytes:
    """One frame to the agent.

    Raises:
        SandboxLimitError: it would be too long. SandboxRefusedError: something in it cannot be encoded.
    """
    try:
        body = _ENCODER.encode((call, operation, argument))
    except (OverflowError, UnicodeEncodeError) as error:
        raise SandboxRefusedError(f"`{operation}` cannot be asked for: {error}") from None
    if len(body) > MAX_FRAME:
        raise SandboxLimitError(
            f"`{operation}` needs {len(body)} bytes with all its arguments; a sandbox takes {MAX_FRAME} at once"
        )
    return _HEADER.pack(len(body), zlib.crc32(body)) + body


class Decoder:
    """Cuts what the agent sends into (call, kind, value)."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, int, msgspec.Raw]]:
        """The frames that are complete now.

        Raises:
            SandboxLostError: this is not what an agent sends.
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
            except (msgspec.DecodeError, RecursionError) as error:
                raise SandboxLostError(f"the agent sent what is no frame: {error}") from error
            start = stop
        del self._buffer[:start]
        return frames


class AgentCall:
    """One call to the agent, until it ends. Made by `Channel.open`."""

    def __init__(self, channel: Channel, number: int, room: int) -> None:
        self._channel = channel
        self.number = number
        self._room = room
        """Bytes that the agent may still send; more is a breach of the protocol."""
        self._frames: deque[tuple[int, msgspec.Raw]] = deque()
        self._arrived = anyio.Event()
        self._input_window = INPUT_WINDOW
        self._room_for_input = anyio.Event()
        self.ended = False

    def take(self, kind: int, value: msgspec.Raw) -> None:
        """The channel has a frame for this call. Raises SandboxLostError when it may not have come."""
        if kind == AgentFrameKind.CREDIT:
            self._input_window += _COUNT.decode(value)
            self._room_for_input.set()
            return
        self._room -= max(len(value), PIECE_COST)
        if self._room < 0:
            raise SandboxLostError("the agent sent more output than it may")
        self.ended = self.ended or kind in (AgentFrameKind.RESULT, AgentFrameKind.FAILURE)
        self._frames.append((kind, value))
        self._arrived.set()

    def break_off(self) -> None:
        """The channel is gone."""
        self._arrived.set()
        self._room_for_input.set()

    async def next(self) -> tuple[str, msgspec.Raw] | msgspec.Raw:
        """The next piece of output, or the result.

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
        """The result, and the output that came before it, by stream."""
        gathered: dict[str, bytearray] = {}
        while True:
            piece = await self.next()
            if isinstance(piece, msgspec.Raw):
                return decode(piece, result_type), {name: bytes(data) for name, data in gathered.items()}
            name, data = piece
            gathered.setdefault(name, bytearray()).extend(decode(data, bytes))

    async def send(self, data: bytes, *, last: bool = False) -> None:
        """Send input, as fast as the agent takes it."""
        view = memoryview(data)
        while len(view) > PIECE:
            await self._post_input("data", view[:PIECE])
            view = view[PIECE:]
        await self._post_input("eof" if last else "data", view)

    async def _post_input(self, operation: str, piece: memoryview) -> None:
        while self._input_window <= 0 and not self.ended:
            self._channel.check()
            self._room_for_input = anyio.Event()
            await self._room_for_input.wait()
        if self.ended:
            return
        self._input_window -= len(piece)
        await self.post(operation, piece)

    async def post(self, operation: str, argument: object) -> None:
        """Tell the agent something about this call."""
        await self._channel.post(self.number, operation, argument)

    async def grant(self, data: bytes) -> None:
        """Let the agent send as much output as this was."""
        count = len(data) + PIECE_COST
        self._room += 2 * count
        await self.post("credit", count)


class Channel:
    """The calls over one link. `run` must run as a task for as long as there are calls.

    Args:
        link: closed by its owner.
        rest: what was read from it already.
    """

    def __init__(self, link: Link, rest: bytes = b"") -> None:
        self._link = link
        self._rest = rest
        self._decoder = Decoder()
        self._calls: dict[int, AgentCall] = {}
        self._numbers = 0
        self._broken: SandboxError | None = None
        self.heard = anyio.Event()
        """Set, and replaced, whenever something comes."""

    @property
    def broken(self) -> bool:
        """Whether no call can end by its result any more."""
        return self._broken is not None

    def check(self) -> None:
        """Raises SandboxLostError, or SandboxClosedError, when the channel is broken."""
        if self._broken is not None:
            raise type(self._broken)(str(self._broken))

    async def run(self) -> None:
        """Hand frames to their calls.

        Consumes the link. Waits for bytes. Unblocked by the agent, or the end of the link. Produces frames for calls;
        returns when the link has ended, and every call in progress then raises.
        """
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
                        call.take(kind, value)
                self.heard.set()
                self.heard = anyio.Event()
            error = SandboxLostError("the channel to the sandbox ended; the call may or may not have been carried out")
        except SandboxLostError as reason:
            error = reason
        except msgspec.DecodeError as reason:
            error = SandboxLostError(f"the agent sent what it may not: {reason}")
        finally:
            self.break_off(error)

    def break_off(self, error: SandboxError) -> None:
        """End every call in progress with this error, and all that follow."""
        self._broken = self._broken or error
        for call in self._calls.values():
            call.break_off()
        self.heard.set()

    async def post(self, number: int, operation: str, argument: object) -> None:
        """Send one frame of a call. Raises SandboxLostError when the channel is broken."""
        self.check()
        await self._link.send(encode(number, operation, argument))

    async def open(self, operation: str, argument: object, *, room: int = 1 << 16) -> AgentCall:
        """Begin a call; its opener must `finish` it. `room`: bytes of output that may come."""
        self._numbers += 1
        call = self._calls[self._numbers] = AgentCall(self, self._numbers, room + (1 << 16))
        try:
            await call.post(operation, argument)
        except BaseException:
            await self.finish(call)
            raise
        return call

    async def finish(self, call: AgentCall) -> None:
        """End a call. One that has no result yet is cancelled: whatever runs for it ends as well."""
        del self._calls[call.number]
        if not call.ended and self._broken is None:
            with anyio.move_on_after(CLOSE_SECONDS, shield=True):
                # A link that is lost ends the call, too.
                with suppress(SandboxLostError):
                    await self._link.send(encode(call.number, "cancel", None))

    @asynccontextmanager
    async def call(
        self, operation: str, argument: object, timeout: float, *, room: int = 1 << 16
    ) -> AsyncGenerator[AgentCall]:
        """A call for the time of the block, which must end within `timeout` seconds.

        Raises:
            SandboxTimeoutError: it did not end in time.
            SandboxError: the agent refused it, or the channel broke.
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
        """A call without input, to its end."""
        async with self.call(operation, argument, timeout, room=room) as call:
            return await call.result(result_type)


@contextmanager
def in_time(operation: str, timeout: float) -> Generator[None]:
    """Raise SandboxTimeoutError when the block takes longer."""
    with anyio.move_on_after(timeout) as scope:
        yield
    if scope.cancelled_caught:
        raise SandboxTimeoutError(
            f"waited {timeout:g} s for the sandbox to answer `{operation}`; look at its state, and its machine's load"
        )


def decode(value: msgspec.Raw, result_type: type[T]) -> T:
    """A value of the agent as what it must be. Raises SandboxLostError when it is something else."""
    try:
        return msgspec.msgpack.decode(value, type=result_type)
    except (msgspec.DecodeError, RecursionError) as error:
        raise SandboxLostError(f"the agent sent another answer than it may: {error}") from error
