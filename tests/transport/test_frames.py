"""Frames and their bytes."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash.errors import TransportError
from flash.transport.frames import Frame, FrameDecoder, FrameKind, append_frame


class Note(msgspec.Struct, frozen=True):
    """Body of the frames here."""

    text: bytes


messages = st.lists(
    st.tuples(st.sampled_from(FrameKind), st.integers(0, 2**64 - 1), st.none() | st.binary(max_size=80)), max_size=8
)


def encode(*contents: tuple[FrameKind, int, bytes | None]) -> bytes:
    """Return the bytes of frames, each given by its kind, its call and the text of its body. None: no body."""
    buffer = bytearray()
    for kind, call, text in contents:
        append_frame(buffer, kind, call, None if text is None else Note(text))
    return bytes(buffer)


def content(frame: Frame) -> tuple[FrameKind, int, bytes | None]:
    """Return a decoded frame in the form that `encode` takes."""
    return frame.kind, frame.call, msgspec.msgpack.decode(frame.body, type=Note).text if frame.body else None


@given(messages, st.data())
def test_any_split_of_the_stream_gives_the_same_frames(contents: list, data: st.DataObject):
    stream = encode(*contents)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    decoder = FrameDecoder()
    frames = [
        frame
        for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True)
        for frame in decoder.feed(stream[start:stop])
    ]
    # Read only now: later pieces must not have changed the bodies of earlier frames.
    assert [content(frame) for frame in frames] == contents
    assert decoder.partial == 0


@given(messages, st.binary(min_size=1, max_size=60))
def test_a_frame_that_is_cut_off_is_held_and_never_given_out(contents: list, text: bytes):
    last = encode((FrameKind.REPLY, 1, text))
    decoder = FrameDecoder()
    frames = decoder.feed(encode(*contents) + last[:-1])
    assert [content(frame) for frame in frames] == contents
    assert (decoder.partial, decoder.wanted) == (len(last) - 1, len(last))


@given(st.binary(max_size=200))
def test_garbage_is_frames_or_a_transport_error_and_nothing_else(garbage: bytes):
    decoder = FrameDecoder(limit=64)
    try:
        frames = decoder.feed(garbage)
    except TransportError:
        return
    assert all(len(frame.body) <= 64 for frame in frames)
    assert decoder.partial < 64 + 4


def test_an_oversized_frame_is_refused_at_its_header():
    header = struct.pack("!IBQ", 65, FrameKind.REQUEST, 1)
    with pytest.raises(TransportError, match="announces 65 bytes, more than the 64"):
        FrameDecoder(limit=64).feed(header)


def test_a_frame_of_the_largest_size_is_taken():
    buffer = bytearray()
    append_frame(buffer, FrameKind.REPLY, 1, Note(b"x" * 40))
    length = len(buffer) - 4
    assert len(FrameDecoder(limit=length).feed(bytes(buffer))) == 1
    with pytest.raises(TransportError):
        FrameDecoder(limit=length - 1).feed(bytes(buffer))


@pytest.mark.parametrize("header", [struct.pack("!IBQ", 20, 9, 1), struct.pack("!IBQ", 8, FrameKind.REPLY, 1)])
def test_an_unknown_kind_or_an_impossible_length_is_refused(header: bytes):
    with pytest.raises(TransportError, match="no frame"):
        FrameDecoder().feed(header)


def test_a_message_too_long_to_send_is_refused_and_leaves_the_buffer_alone():
    buffer = bytearray(b"before")
    with pytest.raises(TransportError, match=r"a Note of .* does not fit a frame of 64; send it in parts"):
        append_frame(buffer, FrameKind.REPLY, 1, Note(b"x" * 64), limit=64)
    assert buffer == b"before"


def test_a_message_that_cannot_be_encoded_leaves_the_buffer_alone():
    buffer = bytearray(b"before")
    with pytest.raises(TypeError):
        append_frame(buffer, FrameKind.REPLY, 1, Note(object()))  # pyright: ignore[reportArgumentType]
    assert buffer == b"before"
