"""Records in a file: complete, truncated, or damaged."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash.observe.rundir.recording import append_frame, read_frames, whole_frame_after

VALUES = st.lists(
    st.lists(st.one_of(st.integers(0, 1 << 40), st.binary(max_size=40)), min_size=1), min_size=1, max_size=6
)


def framed(values: list[list[int | bytes]]) -> tuple[bytes, list[int]]:
    """Return the bytes of records, and the position at which each record ends."""
    data, ends = bytearray(), [0]
    for value in values:
        append_frame(data, value)
        ends.append(len(data))
    return bytes(data), ends


@given(VALUES, st.data())
def test_a_cut_leaves_the_records_before_it_and_a_torn_one_is_noticed(
    values: list[list[int | bytes]], data: st.DataObject
) -> None:
    whole, ends = framed(values)
    end = data.draw(st.integers(0, len(whole)))
    found: list[bytes] = []
    torn = False
    try:
        found.extend(read_frames(io.BytesIO(whole[:end])))
    except ValueError:
        torn = True
    assert found == [msgspec.msgpack.encode(value) for value, last in zip(values, ends[1:], strict=True) if last <= end]
    assert torn == (end not in ends)


def test_what_is_wrong_before_a_whole_record_is_no_torn_end(tmp_path: Path) -> None:
    whole, ends = framed([[1, b"x" * 300], [2, b"y" * 300], [3, b"z" * 300]])
    file = tmp_path / "records"
    for place in range(ends[1], ends[2]):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        assert whole_frame_after(file, ends[1])
    for end in range(ends[2], ends[3]):
        file.write_bytes(whole[:end])
        assert not whole_frame_after(file, ends[2])
    file.write_bytes(whole[: ends[2]] + bytes(500))
    assert not whole_frame_after(file, ends[2])
    with pytest.raises(ValueError, match="empty"), file.open("rb") as source:
        list(read_frames(source))
