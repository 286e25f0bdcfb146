"""Fetching a trainer rank's shard, part by part.

As one message a long shard would not fit a frame, and would lie encoded beside itself in the memory of both ends.
"""

from __future__ import annotations

from collections.abc import Generator
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
    asking = _asking(rank, step, [])
    request = next(asking)
    while True:
        reply = await hub.call(request, timeout)
        try:
            request = asking.send(reply)
        except StopIteration as end:
            return end.value


def fetch_blocking(
    hub: BlockingCaller, rank: int, step: int, activities: list[Activity], timeout: float
) -> p.BatchReply:
    """The same for a thread; the hub is also told what the rank was busy with."""
    asking = _asking(rank, step, activities)
    request = next(asking)
    while True:
        reply = hub.call(request, timeout)
        try:
            request = asking.send(reply)
        except StopIteration as end:
            return end.value


def _asking(rank: int, step: int, activities: list[Activity]) -> Generator[p.BatchRequest, p.BatchReply, p.BatchReply]:
    """Yields what to ask, is sent the answers, and returns the first of them with the samples of all."""
    first = reply = yield p.BatchRequest(rank, step, activities)
    if first.shard is None:
        return first
    samples, part = list(first.shard.samples), 0
    while reply.left:
        part += 1
        reply = yield p.BatchRequest(rank, step, [], part)
        assert reply.shard is not None, "a shard that has begun is given to its end"
        samples += reply.shard.samples
    return msgspec.structs.replace(first, shard=msgspec.structs.replace(first.shard, samples=samples), left=0)
