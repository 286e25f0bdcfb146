"""The node loop: one asyncio event loop per node. Node 0's also runs the hub and writes the run directory.

Ends when the hub has no more work, on the first error, or after an interrupt (SIGINT, SIGTERM): then trainer ranks
finish their step and write a checkpoint within deadlines.shutdown.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec

from flash.config.tree import Config
from flash.environment.load import LoadedEnvironment
from flash.errors import FlashError, TransportError
from flash.hub import protocol as p
from flash.hub.hub import Hub, RunEnd
from flash.observe.recorder import Recorder
from flash.rollout.node import RolloutNode
from flash.rollout.tokenizer import HfTokenizer
from flash.rollout.vllm_engine import VLLMEngine
from flash.run.rendezvous import HubAddress, Meeting, Rank, advertised_host
from flash.trainer.checkpoint import newest_complete, read_hub_state
from flash.transport.client import connect
from flash.transport.request import Request
from flash.transport.server import Peer, serve
from flash.waiting import first_error


def run_node_loop(rank: Rank, config: Config) -> int:
    """Run this node until the end of the run; the exit code."""
    return anyio.run(_node_loop, rank, config)


async def _node_loop(rank: Rank, config: Config) -> int:
    meeting = await anyio.to_thread.run_sync(Meeting, rank, config.deadlines.rendezvous)
    await anyio.to_thread.run_sync(meeting.declare, rank, config)
    now = _clock()
    try:
        if rank.node == 0:
            await _first_node(rank, config, meeting, now)
        else:
            address = await anyio.to_thread.run_sync(meeting.hub)
            await _other_node(rank.node, config, address, now)
    except BaseExceptionGroup as group:  # of the task groups below: people see the error that tells most
        raise first_error(group) from None
    return 0


def _clock() -> Callable[[], float]:
    """Unix seconds that advance with the loop's clock."""
    offset = time.time() - anyio.current_time()
    return lambda: anyio.current_time() + offset


async def _first_node(rank: Rank, config: Config, meeting: Meeting, now: Callable[[], float]) -> None:
    resume = config.run.resume or rank.restarts > 0
    checkpoint = newest_complete(config.run_dir) if resume else None
    state = read_hub_state(checkpoint) if checkpoint is not None else None
    version = None
    if resume:
        version = Hub.version_of(state) if state is not None else 0
    tokenizer = await anyio.to_thread.run_sync(HfTokenizer, config.model)
    with Recorder(config, tokenizer, now=now, resume_at=version, restarts=rank.restarts) as recorder:
        env = LoadedEnvironment(config.env.path, config.env.options)
        hub = Hub(config, recorder, now=now, state=state, kind_of=env.kind_of)
        async with anyio.create_task_group() as signals:
            # Outermost: torchrun's SIGTERM must not cut the orderly end of a run that has failed, nor hide its error.
            signals.start_soon(_interrupt_on_signal, hub)
            async with _serving(hub, config, meeting, checkpoint) as address:
                end = await _run_hub(hub, config, env, address, now)
            finish = partial(recorder.finish, end.ledger, interrupted=end.reason == "interrupted")
            await anyio.to_thread.run_sync(finish)
            signals.cancel_scope.cancel()


@asynccontextmanager
async def _serving(hub: Hub, config: Config, meeting: Meeting, checkpoint: Path | None) -> AsyncGenerator[HubAddress]:
    """The hub's port is open inside the block."""
    token = secrets.token_bytes(32)
    host = advertised_host(config)

    async def handler(peer: Peer, request: Request[Any]) -> msgspec.Struct:
        return await hub.handle(request)

    def gone(peer: Peer) -> None:
        hub.peer_lost(peer.name)

    async with anyio.create_task_group() as group:
        server = partial(serve, deadline=config.deadlines.connect, on_disconnect=gone)
        port = await group.start(server, host, config.cluster.hub_port, token, p.HubRequest, handler)
        address = HubAddress(host, port, token, str(checkpoint or ""))
        await anyio.to_thread.run_sync(meeting.announce, address)
        yield address
        group.cancel_scope.cancel()


async def _run_hub(
    hub: Hub, config: Config, env: LoadedEnvironment, address: HubAddress, now: Callable[[], float]
) -> RunEnd:
    async with anyio.create_task_group() as group:
        if config.engines_on(0):
            group.start_soon(_roll_out, 0, config, env, address, now)
        end = await hub.run()
        if end.reason == "finished":
            with anyio.move_on_after(config.deadlines.request):
                await hub.all_nodes_left()
        group.cancel_scope.cancel()
        return end
    raise AssertionError("cancelled from outside, and not told")


async def _other_node(node: int, config: Config, address: HubAddress, now: Callable[[], float]) -> None:
    """Roll out for a hub on another node, and tell it of an error that ends the run."""
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(_forward_signals, config, address, node)
            if config.engines_on(node):
                env = LoadedEnvironment(config.env.path, config.env.options)
                await _roll_out(node, config, env, address, now)
            group.cancel_scope.cancel()
    except BaseExceptionGroup as errors:  # whatever ended this node also ends the run
        error = first_error(errors)
        if isinstance(error, FlashError) and error.fatal:
            with suppress(TransportError):  # what the hub answers is the end of the connection
                await _tell(config, address, node, p.Fatal(type(error).__name__, f"node {node}: {error}"))
        raise error from None


async def _tell(config: Config, address: HubAddress, node: int, message: p.Fatal | p.Interrupt) -> None:
    """Send one message on a connection of its own."""
    name, deadline = f"messenger-{node}", config.deadlines.connect
    async with connect(address.host, address.port, address.token, name, deadline) as hub:
        await hub.call(message, timeout=config.deadlines.request)


async def _interrupt_on_signal(hub: Hub) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            hub.interrupt()


async def _forward_signals(config: Config, address: HubAddress, node: int) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for received in signals:
            reason = f"node {node} received {signal.Signals(received).name}"
            await _tell(config, address, node, p.Interrupt(reason))


async def _roll_out(
    node: int, config: Config, env: LoadedEnvironment, address: HubAddress, now: Callable[[], float]
) -> None:
    """The engines and episodes of a node that has some."""
    first = sum(config.engines_on(earlier) for earlier in range(node))
    engines = [VLLMEngine(config, first + i, config.engine_gpus(node, i)) for i in range(config.engines_on(node))]
    tokenizer = await anyio.to_thread.run_sync(HfTokenizer, config.model)
    async with connect(address.host, address.port, address.token, f"node-{node}", config.deadlines.connect) as hub:
        await RolloutNode(node, config, engines, first, tokenizer, env.make, hub, now=now, prepare=env.prepare).run()
