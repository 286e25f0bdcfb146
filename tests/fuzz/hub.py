"""Fuzzes the hub's port: a run of two peers goes on while attackers connect, prove the token or not, and say anything.

Oracles: nothing is logged with a traceback or as an error; an attacker is told one line of in the log at most, and its
connection ends; the good peers' steps go on, their results are what they sent, and the books balance.
"""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
from anyio.abc import SocketAttribute, SocketStream

from flash.config.load import dump
from flash.errors import FlashError, ProtocolError
from flash.hub import protocol as p
from flash.hub.fleet import config_digest
from flash.hub.gate import Gate
from flash.hub.hub import Hub
from flash.observe.observer import MemoryObserver
from flash.transport import Client, Peer, Request, connect, new_token, serve
from flash.transport.auth import MAGIC, prove_to_server
from flash.types import Activity, Canary, Failure, Lease, Outcome, Published, Task
from tests.fuzz.mutate import body, flipped, frame
from tests.hub.test_hub import make_config
from tests.samples.cases import trajectory

FRAMES = 20
"""Most frames of one attacker."""
PATIENCE_S = 20.0
"""Seconds in which an attacker's connection ends, and the good peers take a step: far above what either needs."""
STEP_EVERY = 25
"""Attackers between two steps of the good peers."""


class Records(logging.Handler):
    """What was logged meanwhile."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.dropped = 0
        self.bad: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.exc_info or record.levelno >= logging.ERROR or "Traceback" in message:
            self.bad.append(f"{record.name}: {message} {record.exc_info}")
        self.dropped += message.startswith("dropped")


class Target:
    """A hub behind its port, with a good node and a good trainer that take steps when asked."""

    def __init__(
        self,
        port: int,
        token: bytes,
        hub: Hub,
        observer: MemoryObserver,
        node: Client,
        trainer: Client,
        join: p.JoinRequest,
    ) -> None:
        self.port = port
        self.token = token
        self.hub = hub
        self._observer = observer
        self._node = node
        self._trainer = trainer
        self.join = join
        """What turns a guest into a node."""
        self.steps = 0

    async def begin(self) -> None:
        await self._publish(0)
        (first,) = (await self._node.call(p.LeaseRequest(0, 1), PATIENCE_S)).leases
        await self._bring([first])

    async def _publish(self, version: int) -> None:
        published = Published(version, "tcp", b"", Canary([1, 2], [-1.0]))
        await self._trainer.call(p.PublishRequest(published), PATIENCE_S)
        status = p.EngineStatus(0, version, 0.0, 1.0, 0.0)
        await self._node.call(p.EngineReport(0, self.steps + 1, [status], []), PATIENCE_S)

    async def _bring(self, leases: list[Any]) -> None:
        ended = [p.EndedLease(one.lease_id, trajectory(one.task, self.hub.progress.version)) for one in leases]
        await self._node.call(p.DeliverRequest(0, ended, 8), PATIENCE_S)

    async def step(self) -> None:
        """One whole step over the port: leases, results, batch, commit, new version."""
        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as tasks:
                done = anyio.Event()

                async def roll_out() -> None:
                    while not done.is_set():
                        reply = await self._node.call(p.LeaseRequest(0, 8), PATIENCE_S)
                        await self._bring(reply.leases)

                tasks.start_soon(roll_out)
                reply = await self._trainer.call(p.BatchRequest(0, self.steps, []), PATIENCE_S)
                done.set()
                tasks.cancel_scope.cancel()
        assert reply.shard is not None
        for sample in reply.shard.samples:
            made = sample.trajectory
            assert made == trajectory(made.task, self.steps), "a good peer's result was changed"
        await self._trainer.call(p.Commit(self.steps, {"loss": 0.0}), PATIENCE_S)
        self.steps += 1
        await self._publish(self.steps)
        self.hub.samples.check()
        assert self.hub.progress.version == self.steps == len(self._observer.steps)


@asynccontextmanager
async def target(steps: int) -> AsyncGenerator[Target]:
    """A hub that has begun its run, until the end of the block."""
    config = make_config()
    config = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, steps=steps + 10))
    observer, token = MemoryObserver(), new_token()
    hub = Hub(config, observer, now=anyio.current_time)
    gate = Gate(hub, config)

    async def handle(peer: Peer, request: Request[Any]) -> msgspec.Struct:
        return await gate.handle(peer, request)

    async def listen(*, task_status: Any) -> None:
        await serve(
            "127.0.0.1",
            0,
            token,
            p.HubRequest,
            handle,
            deadline=PATIENCE_S,
            connection_to_replace=gate.connection_to_replace,
            on_connect=gate.arrived,
            on_disconnect=gate.left,
            task_status=task_status,
        )

    async with anyio.create_task_group() as tasks:
        port = await tasks.start(listen)
        async with (
            connect("127.0.0.1", port, token, "node-0", 5) as node,
            connect("127.0.0.1", port, token, "trainer-0", 5) as trainer,
        ):
            join = p.JoinRequest(config_digest(dump(config)), 1)
            found = Target(port, token, hub, observer, node, trainer, join)
            async with anyio.create_task_group() as both:
                both.start_soon(found.begin)
            yield found
        tasks.cancel_scope.cancel()


DIGEST = config_digest(dump(make_config()))
NO_LEASES = (Lease(0, Task(0, 0, 0, 7), 0), Lease(1, Task(1, 0, 1, 7), 0))
"""Leases that nobody has."""


def messages(version: int, leases: Sequence[Lease] = NO_LEASES) -> list[msgspec.Struct]:
    """One valid message of every kind but those that may end a run."""
    first, second = leases[:2]
    ended = [
        p.EndedLease(first.lease_id, trajectory(first.task, 0)),
        p.EndedLease(second.lease_id, Failure(second.task, Outcome.ENV_ERROR, "boom", 3)),
    ]
    return [
        p.LeaseRequest(1, 4),
        p.ClaimRequest(1, [first]),
        p.DeliverRequest(1, ended, 8),
        p.CancelRequest(1),
        p.VersionRequest(1, 0),
        p.EngineReport(1, 1, [p.EngineStatus(1, version, 0.5, 1.0, 0.0)], [Activity("a", "b", 0.0, 1.0)]),
        p.BatchRequest(0, version, []),
        p.Commit(version, {"loss": 1.0}),
        p.PublishRequest(Published(version, "tcp", b"info", Canary([1, 2], [-1.0]))),
        p.SnapshotRequest(),
        p.Goodbye(0, []),
        p.RunRequest(p.dialect()),
        p.JoinRequest(DIGEST, 1),
        p.DrainRequest(1),
    ]


NAMES = (
    "guest-1",
    "guest-1",
    "guest-1",
    "guest-2",
    "messenger-0",
    "node-0",
    "trainer-0",
    "node-x",
    "trainer-9",
    "",
    "\x1b[2J",
)


async def attack(aim: Target, rng: Random) -> int:
    """One attacker, from its connection to its end; how many frames it sent."""
    async with await anyio.connect_tcp("127.0.0.1", aim.port) as stream:
        if rng.random() < 0.2:
            await _talk(stream, _opening(rng), rng)
            return 1
        with suppress(FlashError):  # its name may be none that is awaited
            name = rng.choice(NAMES)
            await prove_to_server(stream, aim.token, name)
            joins = [aim.join] if name.startswith("guest") and rng.random() < 0.9 else []
            return await _talk(stream, _frames(aim, rng, joins), rng)
    return 1


def _opening(rng: Random) -> list[bytes]:
    """What someone without the token begins with."""
    hello = MAGIC + rng.randbytes(32)
    pieces = [hello, rng.randbytes(32), bytes([rng.randrange(256)]), rng.randbytes(255)]
    return [flipped(piece, rng) if rng.random() < 0.2 else piece for piece in pieces[: rng.randrange(5)]]


def _frames(aim: Target, rng: Random, first: Sequence[msgspec.Struct]) -> list[bytes]:
    valid = messages(aim.hub.progress.version)
    out = [frame(1, 2**32, msgspec.msgpack.encode(message), rng) for message in first]
    for call in range(rng.randrange(1, FRAMES)):
        message = rng.choice(valid)
        content = msgspec.msgpack.encode(message) if rng.random() < 0.3 else body(message, rng)
        number = rng.choice((call, call, call, 0, 2**64 - 1))
        out.append(frame(rng.choice((1, 1, 1, 1, 4)), number, content, rng))
    return out


async def _talk(stream: SocketStream, pieces: list[bytes], rng: Random) -> int:
    """Send it, in one way or another, and see that the connection ends."""
    manner = rng.choice(("whole", "whole", "torn", "slow", "reset", "mute"))
    data = b"".join(pieces)
    with suppress(anyio.BrokenResourceError, anyio.EndOfStream, anyio.ClosedResourceError, ConnectionError):
        if manner == "torn":
            for start in range(0, len(data), 4096):
                await stream.send(data[start : start + 4096])
                await anyio.lowlevel.checkpoint()
        elif manner == "slow":
            for start in range(min(len(data), 40)):
                await stream.send(data[start : start + 1])
                await anyio.lowlevel.checkpoint()
            await stream.send(data[40:])
        else:
            await stream.send(data)
        if manner == "reset":
            raw = stream.extra(SocketAttribute.raw_socket)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return len(pieces)
        if manner == "mute":  # leaves without a word, and without reading
            return len(pieces)
        await stream.send_eof()
        with anyio.fail_after(PATIENCE_S):
            while True:
                await stream.receive()
    return len(pieces)


async def fuzz(frames: int, seed: int) -> dict[str, int]:
    """Send so many frames; raises AssertionError, naming the attacker's seed, where an oracle does not hold."""
    records = Records()
    logging.getLogger().addHandler(records)
    sent, attackers = 0, 0
    try:
        async with target(steps=frames) as aim:
            await aim.step()
            while sent < frames:
                try:
                    sent += await attack(aim, Random(f"{seed}/{attackers}"))
                    attackers += 1
                    if attackers % STEP_EVERY == 0:
                        await aim.step()
                    assert not records.bad, records.bad
                except Exception as error:
                    raise AssertionError(f"hub: seed {seed}, attacker {attackers}: {error!r}") from error
            await aim.step()
            # The good peers' own connections have caused none of these.
            assert records.dropped <= attackers, "a peer was dropped more than once"
            return {"frames": sent, "attackers": attackers, "dropped": records.dropped, "steps": aim.steps}
    finally:
        logging.getLogger().removeHandler(records)
    raise AssertionError("cancelled from outside, and not told")


async def insider(messages_sent: int, seed: int) -> dict[str, int]:
    """Say hostile things in every peer's own name, past the port: only typed errors may come of it.

    A hub whose run ends so is replaced; what it then says must be typed too. On the virtual clock.
    """
    counts = {"answered": 0, "refused": 0, "misbehaved": 0, "waiting": 0, "ended": 0}
    decoder = msgspec.msgpack.Decoder(p.HubRequest)
    sent = round_ = 0
    while sent < messages_sent:
        rng = Random(f"{seed}/{round_}")
        round_ += 1
        hub, gate, speakers = _begun()
        leases = await _prepare(gate, speakers)
        for _ in range(200):
            known = messages(hub.progress.version, rng.sample(leases, 2))
            valid = rng.choice([*known, *known, p.Interrupt("x"), p.Fatal("ClassVar", "x"), p.Leave(1)])
            try:
                request = decoder.decode(body(valid, rng))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
            sent += 1
            with anyio.move_on_after(0.01) as scope:
                try:
                    await gate.handle(rng.choice(speakers), request)
                    counts["answered"] += 1
                except ProtocolError:
                    counts["misbehaved"] += 1
                except FlashError:
                    counts["refused"] += 1
                except Exception as error:
                    raise AssertionError(f"insider: seed {seed}, round {round_ - 1}: {request}") from error
            counts["waiting"] += scope.cancelled_caught
        hub.samples.check()
        counts["ended"] += 1
    return counts


def _begun() -> tuple[Hub, Gate, list[Peer]]:
    config = make_config()
    hub = Hub(config, MemoryObserver(), now=anyio.current_time)
    gate = Gate(hub, config)
    speakers = [Peer(number, name, "") for number, name in enumerate(("node-0", "guest-7", "trainer-0", "messenger-0"))]
    for speaker in speakers:
        gate.arrived(speaker)
    return hub, gate, speakers


async def _prepare(gate: Gate, speakers: list[Peer]) -> list[Lease]:
    """Version 0 is out; the leases that node 1 holds."""
    _, node, trainer, _ = speakers
    await gate.handle(node, p.JoinRequest(DIGEST, 1))
    published = Published(0, "tcp", b"", Canary([1, 2], [-1.0]))
    await gate.handle(trainer, p.PublishRequest(published))
    await gate.handle(node, p.EngineReport(1, 1, [p.EngineStatus(1, 0, 0.0, 1.0, 0.0)], []))
    for lease in await _lease(gate, node, 1):
        ended = p.EndedLease(lease.lease_id, trajectory(lease.task, 0))
        await gate.handle(node, p.DeliverRequest(1, [ended], 8))
    return await _lease(gate, node, 8)


async def _lease(gate: Gate, node: Peer, capacity: int) -> list[Lease]:
    reply = await gate.handle(node, p.LeaseRequest(1, capacity))
    assert isinstance(reply, p.LeaseReply)
    return reply.leases
