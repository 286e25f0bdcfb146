"""Bytes that msgspec cannot decode, in files and messages from outside: each reader raises a typed error.

msgspec raises other errors than DecodeError for lists that nest too deeply, and for text that is not UTF-8.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from envs.sandbox.local import channel
from flash.errors import CheckpointError, ConfigError, FlashError, RecordingError, SandboxLostError, TransportError
from flash.hub.recovery import HubState
from flash.observe.comparison import read_run
from flash.observe.rundir import recording
from flash.run.processes import hub_place
from flash.trainer import checkpoint_files
from tests.hub.test_hub import make_config

DEEP = 100_000
JSON = [b'{"x":' + b"[" * DEEP + b"]" * DEEP + b"}", b'{"x":"\xff"}']
MSGPACK = [b"\x81\xa1x" + b"\x91" * DEEP + b"\xc0", b"\x81\xa1\xff\xc0"]


def framed(data: bytes) -> bytes:
    return recording.HEADER.pack(len(data), zlib.crc32(data)) + data


def read_recording(folder: Path, data: bytes) -> None:
    file = recording.batch_file(folder, 3)
    file.parent.mkdir(exist_ok=True, parents=True)
    file.write_bytes(framed(data))
    recording.read_batch(folder, 3)


def read_manifest(folder: Path, data: bytes) -> None:
    (folder / checkpoint_files.MANIFEST).write_bytes(data)
    checkpoint_files.read_manifest(folder)


def read_summary(folder: Path, data: bytes) -> None:
    (folder / "config.toml").write_text("")
    (folder / "summary.json").write_bytes(data)
    read_run(folder)


def verify_announcement(folder: Path, data: bytes) -> None:
    hub_place.verify(data, folder, None)


def restore_hub(folder: Path, data: bytes) -> None:
    HubState.restore(data, make_config())


def decode_agent_value(folder: Path, data: bytes) -> None:
    channel.decode(msgspec.Raw(data), dict[str, None])


CASES: list[tuple[Callable[[Path, bytes], None], bytes, type[FlashError]]] = [
    *[(read_recording, data, RecordingError) for data in MSGPACK],
    *[(read_manifest, data, CheckpointError) for data in JSON],
    *[(read_summary, data, ConfigError) for data in JSON],
    *[(verify_announcement, data, TransportError) for data in JSON],
    *[(restore_hub, data, CheckpointError) for data in MSGPACK],
    *[(decode_agent_value, data, SandboxLostError) for data in MSGPACK],
]


@pytest.mark.parametrize(("read", "data", "expected"), CASES)
def test_bytes_that_cannot_be_decoded_raise_a_typed_error(
    read: Callable[[Path, bytes], None], data: bytes, expected: type[FlashError], tmp_path: Path
) -> None:
    with pytest.raises(expected):
        read(tmp_path, data)
