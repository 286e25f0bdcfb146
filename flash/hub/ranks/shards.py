"""Fetching a trainer rank's shard, part by part.

As one message a long shard would not fit a frame, and would lie encoded beside itself in the memory of both ends.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from flash.hub import protocol as p
from flash.transport.request import ReplyT, Request
from flash.types import Activity


class BlockingCaller(Protocol):
    """A connection to the hub that blocks its thread, as `flash.transport.BlockingClient`."""

    def call(self, request: Request[ReplyT], timeout: float) -> ReplyT:
        """Send one request and wait for its reply, for `timeout` seconds at most."""
        ...


async def fetch(hub: p.HubCaller, rank: int, step: int, timeout: float) -> p.BatchReply:
    """A rank's whole shard. Waits for the batch, and up to `timeout` seconds for each part."""
    parts = [await hub.call(p.BatchRequest(rank, step, []), timeout)]
    while parts[-1].left:
        parts.append(await hub.call(p.BatchRequest(rank, step, [], len(parts)), timeout))
    return _whole(parts)


def fetch_blocking(
    hub: BlockingCaller, rank: int, step: int, activities: list[Activity], timeout: float
) -> p.BatchReply:
    """The same for a thread; the hub is also told what the rank was busy with."""
    parts = [hub.call(p.BatchRequest(rank, step, activities), timeout)]
    while parts[-1].left:
        parts.append(hub.call(p.BatchRequest(rank, step, [], len(parts)), timeout))
    return _whole(parts)


def _whole(parts: list[p.BatchReply]) -> p.BatchReply:
    """The first of them, with the samples of all."""
    first, shards = parts[0], [part.shard for part in parts if part.shard is not None]
    if first.shard is None:
        return first
    samples = [sample for shard in shards for sample in shard.samples]
    return msgspec.structs.replace(first, shard=msgspec.structs.replace(first.shard, samples=samples), left=0)
