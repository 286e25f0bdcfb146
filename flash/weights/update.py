"""What `Published.update_info` holds, for every backend: how to join once, and what to fetch this time.

The dictionaries go unchanged to vLLM's `init_weight_transfer_engine` and `update_weights`.
"""

from __future__ import annotations

from typing import Any

import msgspec

RECEIVER = "flash"
"""Name under which `flash.weights.plugin` registers our receiver in vLLM's processes; `ipc` is one of vLLM's own."""


NOT_HELD = "is not held any more"
"""What a trainer says of a version that it has forgotten."""
DAMAGED = "is damaged"
"""What a worker says of a version whose bytes are not those that were published."""


class UpdateInfo(msgspec.Struct, frozen=True):
    """The decoded form of `Published.update_info`."""

    update: dict[str, Any]
    """Arguments of this version's `update_weights`."""
    fingerprint: list[int]
    """Of the tensors as published (`flash.weights.fingerprint`)."""
    init: dict[str, Any] | None = None
    """Arguments of the rendezvous with this publisher; None where there is none."""


def encode_update(info: UpdateInfo) -> bytes:
    """Msgpack, as it travels in `Published.update_info`."""
    return msgspec.msgpack.encode(info)


def decode_update(data: bytes) -> UpdateInfo:
    """The reverse of `encode_update`; raises `msgspec.ValidationError` on anything else."""
    return msgspec.msgpack.decode(data, type=UpdateInfo)
