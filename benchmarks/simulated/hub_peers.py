"""The other end of `hub_scale`: bare nodes and trainer ranks, in a process of their own so that they cost the hub none.

`python -m benchmarks.simulated.hub_peers PORT TOKEN NODES ENGINES RANKS` reads one `Order` per line and answers each,
when it is done, with one line: how many leases the nodes hold. Nodes run no engine and no episode: they hold their
leases until they are told to hand them in, and keep the requests waiting that real ones keep waiting.
"""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack
from functools import cache
from itertools import count
from typing import Literal

import anyio
import msgspec
import numpy as np
from anyio.abc import TaskGroup

from flash.hub import protocol as p
from flash.hub.protocol import fetch_shard
from flash.transport.client import Client, connect
from flash.types import Canary, Failure, Lease, Outcome, Published, Span, Trajectory, Turn, VersionRun

TIMEOUT_S = 600.0
"""Of every call: the machine may be busy with other things."""
PROMPT = 32
"""Tokens of a sample that were shown."""
CAPACITY = 8
"""Tasks that a node could always start."""


class Order(msgspec.Struct):
    """What the peers are to do next."""

    do: Literal["publish", "lease", "listen", "deliver", "fail", "train", "commit", "snapshot"]
    count: int = 0
    """`lease`: leases to hold, over all nodes. `deliver`, `fail`: results to hand in, those of the oldest tasks."""
    per_message: int = 1
    version: int = 0
    """`publish`: the version. `train`, `commit`: the step. `deliver`: the version that has sampled."""
    kind: str = ""
    """`fail`: only samples of this kind."""
    tokens: int = 64
    """`deliver`: of a sample, those of its prompt included."""


@cache
def _arrays(tokens: int) -> tuple[bytes, bytes]:
    return np.arange(tokens, dtype="<i4").tobytes(), np.zeros(tokens - PROMPT, dtype="<f4").tobytes()


def trajectory(lease: Lease, version: int, tokens: int) -> Trajectory:
    """What a node brings home."""
    token_ids, logprobs = _arrays(tokens)
    return Trajectory(
        task=lease.task,
        outcome=Outcome.OK,
        reward=float(lease.task.sample_index % 2),
        token_ids=token_ids,
        action_spans=[Span(PROMPT, tokens)],
        logprobs=logprobs,
        versions=[VersionRun(version, tokens - PROMPT)],
        turns=[Turn("prompt", "response", 1.0, 0.0, 1.0, 0.0)],
    )


class BareNode:
    """A connection that speaks for a node and all its engines."""

    def __init__(self, index: int, engines: int, hub: Client) -> None:
        self._index = index
        self._hub = hub
        self._numbers = count(1)
        self._versions = [-1] * engines
        self.held: dict[int, Lease] = {}

    async def report(self, version: int, engine: int | None = None) -> None:
        """One engine, or all of them, have loaded a version."""
        for index in range(len(self._versions)) if engine is None else [engine]:
            self._versions[index] = version
        first = self._index * len(self._versions)
        statuses = [p.EngineStatus(first + i, version, 0.0, 1.0, 0.0) for i, version in enumerate(self._versions)]
        await self._hub.call(p.EngineReport(self._index, next(self._numbers), statuses, []), TIMEOUT_S)

    async def lease(self, wanted: int) -> None:
        """Hold so many leases, unless the hub has no more."""
        while len(self.held) < wanted:
            reply = await self._hub.call(p.LeaseRequest(self._index, wanted - len(self.held)), TIMEOUT_S)
            self.held |= {lease.lease_id: lease for lease in reply.leases}
            if not reply.leases:
                return

    def listen(self, tasks: TaskGroup) -> None:
        """Wait as a real node does: each engine for its next version, all of it for cancels and for leases."""
        for engine in range(len(self._versions)):
            tasks.start_soon(self._follow, engine)
        tasks.start_soon(self._heed)
        tasks.start_soon(self._ask)

    async def _follow(self, engine: int) -> None:
        while True:
            reply = await self._hub.call(p.VersionRequest(self._index, self._versions[engine]), TIMEOUT_S)
            if reply.done:
                return
            if reply.published is not None:
                await self.report(reply.published.version, engine)

    async def _heed(self) -> None:
        while True:
            reply = await self._hub.call(p.CancelRequest(self._index), TIMEOUT_S)
            if reply.done:
                return
            gone = [self.held.pop(lease_id) for lease_id in reply.lease_ids if lease_id in self.held]
            await self._bring([(lease, Failure(lease.task, Outcome.CANCELLED, "cancelled", 1)) for lease in gone], 256)

    async def _ask(self) -> None:
        while True:
            reply = await self._hub.call(p.LeaseRequest(self._index, CAPACITY), TIMEOUT_S)
            if reply.done:
                return
            self.held |= {lease.lease_id: lease for lease in reply.leases}

    async def hand_in(self, leases: list[Lease], order: Order) -> None:
        """End leases, so many per message, one message after the other."""
        for lease in leases:
            del self.held[lease.lease_id]
        if order.do == "fail":
            await self._bring(
                [(lease, Failure(lease.task, Outcome.ENV_ERROR, "it always fails", 1)) for lease in leases],
                order.per_message,
            )
        else:
            version, tokens = order.version, order.tokens
            await self._bring([(lease, trajectory(lease, version, tokens)) for lease in leases], order.per_message)

    async def _bring(self, results: list[tuple[Lease, Trajectory | Failure]], per_message: int) -> None:
        for start in range(0, len(results), per_message):
            ended = [p.EndedLease(lease.lease_id, result) for lease, result in results[start : start + per_message]]
            await self._hub.call(p.DeliverRequest(self._index, ended, CAPACITY), TIMEOUT_S)


class Peers:
    """All nodes and trainer ranks of a run."""

    def __init__(self, nodes: list[BareNode], ranks: list[Client], tasks: TaskGroup) -> None:
        self._nodes = nodes
        self._ranks = ranks
        self._tasks = tasks

    async def obey(self, order: Order) -> None:
        """Do what is asked, all nodes at once."""
        match order.do:
            case "publish":
                await self._publish(order.version)
            case "lease":
                share = -(-order.count // len(self._nodes))
                async with anyio.create_task_group() as group:
                    for node in self._nodes:
                        group.start_soon(node.lease, share)
            case "listen":
                for node in self._nodes:
                    node.listen(self._tasks)
                # Until all of it waits in the hub.
                await anyio.sleep(1)
            case "deliver" | "fail":
                await self._hand_in(order)
            case "train":
                async with anyio.create_task_group() as group:
                    for rank, hub in enumerate(self._ranks):
                        group.start_soon(fetch_shard, hub, rank, order.version, TIMEOUT_S)
            case "commit":
                await self._ranks[0].call(p.Commit(order.version, {}), TIMEOUT_S)
            case "snapshot":
                await self._ranks[0].call(p.SnapshotRequest(), TIMEOUT_S)

    async def _publish(self, version: int) -> None:
        published = Published(version, "tcp", b"", Canary([0, 0], [-1.0]))
        await self._ranks[0].call(p.PublishRequest(published), TIMEOUT_S)
        if version > 0:
            return
        # The first one: the engines load it, and the run begins with an evaluation of one sample.
        for node in self._nodes:
            await node.report(0)
        first = self._nodes[0]
        await first.lease(1)
        await first.hand_in(list(first.held.values()), Order("deliver"))

    async def _hand_in(self, order: Order) -> None:
        of_kind = [
            (lease.task.task_id, lease, node)
            for node in self._nodes
            for lease in node.held.values()
            if not order.kind or lease.task.kind == order.kind
        ]
        chosen: dict[BareNode, list[Lease]] = {}
        for _, lease, node in sorted(of_kind, key=lambda entry: entry[0])[: order.count]:
            chosen.setdefault(node, []).append(lease)
        async with anyio.create_task_group() as group:
            for node, leases in chosen.items():
                group.start_soon(node.hand_in, leases, order)

    @property
    def held(self) -> int:
        """Leases that all nodes hold."""
        return sum(len(node.held) for node in self._nodes)


async def serve_orders(port: int, token: bytes, nodes: int, engines: int, ranks: int) -> None:
    """Connect everybody, then obey until standard input ends."""
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(connect("127.0.0.1", port, token, name, TIMEOUT_S))
            for name in (*(f"node-{i}" for i in range(nodes)), *(f"trainer-{i}" for i in range(ranks)))
        ]
        bare = [BareNode(index, engines, client) for index, client in enumerate(clients[:nodes])]
        async with anyio.create_task_group() as tasks:
            peers = Peers(bare, clients[nodes:], tasks)
            while line := await anyio.to_thread.run_sync(sys.stdin.buffer.readline):
                await peers.obey(msgspec.json.decode(line, type=Order))
                sys.stdout.write(f"{peers.held}\n")
                sys.stdout.flush()
            tasks.cancel_scope.cancel()


if __name__ == "__main__":
    PORT, TOKEN, *NUMBERS = sys.argv[1:]
    NODES, ENGINES, RANKS = map(int, NUMBERS)
    anyio.run(serve_orders, int(PORT), bytes.fromhex(TOKEN), NODES, ENGINES, RANKS)
