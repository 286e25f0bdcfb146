"""Messages are encoded in slices, byte for byte as in one go."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash.hub import protocol as p
from flash.transport.frames import (
    SLICE_BYTES,
    SLICE_ITEMS,
    FrameConnection,
    FrameDecoder,
    FrameKind,
    encode_slices,
    encoded_pieces,
)
from flash.types import BatchSample, Canary, Failure, Lease, Outcome, Published, Shard, ShardSample, Task
from tests.samples.cases import trajectory


class Inner(msgspec.Struct):
    """Struct inside of another one."""

    numbers: list[int]
    text: str = ""


class Outer(msgspec.Struct, tag=True, rename="camel"):
    """Struct with a tag and renamed fields, of which there are more than a short head of msgpack can count."""

    inner: Inner
    many_items: list[Inner]
    raw: bytes
    nothing: None = None
    wide_0: int = 0
    wide_1: int = 0
    wide_2: int = 0
    wide_3: int = 0
    wide_4: int = 0
    wide_5: int = 0
    wide_6: int = 0
    wide_7: int = 0
    wide_8: int = 0
    wide_9: int = 0
    wide_10: int = 0
    wide_11: int = 0
    wide_12: int = 0


def whole(value: Any) -> tuple[bytes, int]:
    """Encode a value in slices, behind other bytes. Returns the encoding and the number of slices."""
    buffer = bytearray(b"before")
    slices = sum(1 for _ in encode_slices(value, buffer))
    assert buffer.startswith(b"before")
    return bytes(buffer[6:]), slices


TASK = Task(3, 1, 1, 77, kind="sums")
SHARD = Shard(
    3,
    2,
    [ShardSample(i, trajectory(TASK, 3, tokens=5)) for i in range(40)],
    [BatchSample(1, 0.5, 3, 5, False, [0.5])] * 70_000,
    200,
    40,
)


@pytest.mark.parametrize(
    "message",
    [
        p.Ack(),
        p.LeaseReply([Lease(i, TASK, 2) for i in range(300)], done=False),
        p.CancelReply(list(range(100)), done=True),
        p.VersionReply(Published(1, "tcp", b"x" * 3_000_000, Canary([1] * 20, [0.5] * 19)), done=False),
        p.BatchReply(SHARD),
        p.BatchReply(None, finished=True),
        p.BatchReply(SHARD, parts_left=3),
        Failure(TASK, Outcome.ENV_ERROR, "boom", 3),
        Outer(Inner(list(range(70_000))), [Inner([1])] * 17, b""),
    ],
)
def test_a_message_in_slices_has_the_bytes_of_one_in_one_go(message: msgspec.Struct) -> None:
    assert whole(message)[0] == msgspec.msgpack.encode(message)


@given(st.lists(st.lists(st.integers(), max_size=40), max_size=40), st.text(), st.binary())
def test_any_message_in_slices_has_the_bytes_of_one_in_one_go(numbers: list[list[int]], text: str, raw: bytes) -> None:
    inner = [Inner([number % (1 << 63) for number in each], text) for each in numbers]
    message = Outer(Inner([1], text), inner, raw)
    assert whole(message)[0] == msgspec.msgpack.encode(message)


LONG_ITEMS = Outer(Inner([]), [Inner([1] * SLICE_ITEMS, "x" * SLICE_BYTES) for _ in range(20)], b"x" * 2_500_000)


@pytest.mark.parametrize("message", [LONG_ITEMS, p.BatchReply(SHARD), p.Ack()])
def test_the_pieces_of_a_message_are_its_bytes_and_none_is_long(message: msgspec.Struct) -> None:
    pieces = [bytes(piece) for piece in encoded_pieces(message)]
    assert b"".join(pieces) == msgspec.msgpack.encode(message)
    assert max(map(len, pieces)) < 3 * SLICE_BYTES


def test_the_items_of_a_list_are_looked_into_once_one_was_long() -> None:
    inner = Inner([7] * (3 * SLICE_ITEMS))
    nested = Outer(Inner([]), [Inner([], "x" * (SLICE_BYTES + 1)), *[inner] * 19], b"")
    assert whole(nested)[0] == msgspec.msgpack.encode(nested)
    assert whole(nested)[1] >= 19 * 3


def test_long_lists_and_long_bytes_are_cut() -> None:
    assert whole(Inner([1] * (3 * SLICE_ITEMS + 1)))[1] == 3
    assert whole(Outer(Inner([]), [], b"x" * (3 * SLICE_BYTES)))[1] == 3
    assert whole(Outer(Inner([]), [Inner([], "x" * (SLICE_BYTES // 10))] * 40, b""))[1] >= 3


class Sink:
    """A stream that keeps what it is sent."""

    def __init__(self) -> None:
        self.sent = bytearray()

    async def send(self, data: bytes) -> None:
        """Keep the data."""
        self.sent += data


@pytest.mark.anyio
@pytest.mark.virtual
async def test_small_frames_leave_while_a_long_one_is_encoded() -> None:
    sink = Sink()
    connection = FrameConnection(sink, "the other end")  # pyright: ignore[reportArgumentType]
    long = Outer(Inner([1] * (20 * SLICE_ITEMS)), [], b"")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(connection.write)
        tasks.start_soon(connection.send, FrameKind.REPLY, 1, long)
        await anyio.lowlevel.checkpoint()
        connection.post(FrameKind.CANCEL, 2)
        await anyio.sleep(1)
        tasks.cancel_scope.cancel()
    frames = FrameDecoder().feed(bytes(sink.sent))
    assert [(frame.kind, frame.call) for frame in frames] == [(FrameKind.CANCEL, 2), (FrameKind.REPLY, 1)]
    assert msgspec.msgpack.decode(frames[1].body, type=Outer) == long
