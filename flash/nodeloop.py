"""The node loop: one asyncio event loop per node. Node 0's also runs the hub and writes the run directory.

Ends when the hub has no more work, on the first error, or after an interrupt (SIGINT, SIGTERM): then trainer ranks
finish their step and write a checkpoint within deadlines.shutdown.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio

from envs.base import Environment, Kinds, Prepared, wrap
from flash.config import Config
from flash.errors import FlashError, TransportError
from flash.hub import protocol as p
from flash.hub.hub import Hub, RunEnd
from flash.imports import check_options, load_object
from flash.observe.recorder import Recorder
from flash.rollout.node import RolloutNode
from flash.rollout.tokenizer import HfTokenizer
from flash.rollout.vllm_engine import VLLMEngine
from flash.trainer.checkpoint import newest_complete, read_hub_state
from flash.transport.client import connect
from flash.transport.server import Peer, serve
from flash.worker import HubAddress, Meeting, Place, advertised_host


def run_node_loop(place: Place, config: Config) -> int:
    """Run this node until the end of the run; the exit code."""
    return anyio.run(_node_loop, place, config)


async def _node_loop(place: Place, config: Config) -> int:
    meeting = await anyio.to_thread.run_sync(Meeting, place, config.deadlines.rendezvous)
    await anyio.to_thread.run_sync(meeting.trainer_rank, place, config)
    now = _clock()
    try:
        if place.node == 0:
            await _first_node(place, config, meeting, now)
        else:
            address = await anyio.to_thread.run_sync(meeting.hub)
            await _other_node(place.node, config, address, now)
    except BaseExceptionGroup as group:  # of the task groups below: people see the error that tells most
        raise _first_error(group) from None
    return 0


def _clock() -> Callable[[], float]:
    """Unix seconds that advance with the loop's clock."""
    offset = time.time() - anyio.current_time()
    return lambda: anyio.current_time() + offset


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error people should see: the most specific of our own, else the first."""
    flat: list[BaseException] = []

    def walk(error: BaseException) -> None:
        if isinstance(error, BaseExceptionGroup):
            for inner in error.exceptions:
                walk(inner)
        else:
            flat.append(error)

    walk(group)
    ours = [error for error in flat if isinstance(error, FlashError)]
    # What a lost connection reports is the echo of another error, when there is one.
    telling = [error for error in ours if not isinstance(error, TransportError)]
    return (telling or ours or flat)[0]


async def _first_node(place: Place, config: Config, meeting: Meeting, now: Callable[[], float]) -> None:
    resume = config.run.resume or place.life > 0
    checkpoint = newest_complete(config.run_dir) if resume else None
    state = read_hub_state(checkpoint) if checkpoint is not None else None
    version = None
    if resume:
        version = Hub.version_of(state) if state is not None else 0
    tokenizer = await anyio.to_thread.run_sync(HfTokenizer, config.model)
    with Recorder(config, tokenizer, now=now, resume_at=version, restarts=place.life) as recorder:
        hub = Hub(config, recorder, now=now, state=state, kind_of=kind_of(config))
        async with anyio.create_task_group() as signals:
            # Outermost: torchrun's SIGTERM must not cut the orderly end of a run that has failed, nor hide its error.
            signals.start_soon(_interrupt_on_signal, hub)
            async with _serving(hub, config, meeting, checkpoint) as address:
                end = await _run_hub(hub, config, address, now)
            finish = partial(recorder.finish, end.ledger, interrupted=end.reason == "interrupted")
            await anyio.to_thread.run_sync(finish)
            signals.cancel_scope.cancel()


@asynccontextmanager
async def _serving(hub: Hub, config: Config, meeting: Meeting, checkpoint: Path | None) -> AsyncGenerator[HubAddress]:
    """The hub's port is open inside the block."""
    token = secrets.token_bytes(32)
    host = advertised_host(config)

    async def handler(peer: Peer, request: p.Request) -> p.Reply:
        return await hub.handle(request)

    def gone(peer: Peer) -> None:
        hub.peer_lost(peer.name)

    async with anyio.create_task_group() as group:
        server = partial(serve, deadline=config.deadlines.connect, on_disconnect=gone)
        port = await group.start(server, host, config.cluster.hub_port, token, p.Request, handler)
        address = HubAddress(host, port, token, str(checkpoint or ""))
        await anyio.to_thread.run_sync(meeting.announce, address)
        yield address
        group.cancel_scope.cancel()


async def _run_hub(hub: Hub, config: Config, address: HubAddress, now: Callable[[], float]) -> RunEnd:
    async with anyio.create_task_group() as group:
        group.start_soon(_roll_out, 0, config, address, now)
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
            await _roll_out(node, config, address, now)
            group.cancel_scope.cancel()
    except BaseExceptionGroup as errors:  # whatever ended this node also ends the run
        error = _first_error(errors)
        if isinstance(error, FlashError) and error.fatal:
            with suppress(TransportError):  # what the hub answers is the end of the connection
                await _tell(config, address, node, p.Fatal(type(error).__name__, f"node {node}: {error}"))
        raise error from None


async def _tell(config: Config, address: HubAddress, node: int, message: p.Fatal | p.Interrupt) -> None:
    """Send one message on a connection of its own."""
    name, deadline = f"messenger-{node}", config.deadlines.connect
    async with connect(address.host, address.port, address.token, name, p.REPLY, deadline) as hub:
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


async def _roll_out(node: int, config: Config, address: HubAddress, now: Callable[[], float]) -> None:
    """The node's engines and episodes."""
    count = config.engines_on(node)
    if count == 0:
        return
    first = sum(config.engines_on(earlier) for earlier in range(node))
    engines = [VLLMEngine(config, first + i, config.engine_gpus(node, i)) for i in range(count)]
    tokenizer = await anyio.to_thread.run_sync(HfTokenizer, config.model)
    async with connect(
        address.host, address.port, address.token, f"node-{node}", p.REPLY, config.deadlines.connect
    ) as hub:
        make, prepare = make_env(config), prepare_env(config)
        await RolloutNode(node, config, engines, first, tokenizer, make, hub, now=now, prepare=prepare).run()


def make_env(config: Config) -> Callable[[str], Environment]:
    """A factory of the configured environment; its options are checked once. It finds a task's kind by its seed."""
    env = load_object(config.env.path)
    options = check_options(env, config.env.options, "env.options")
    return lambda kind: wrap(env(**options))


def prepare_env(config: Config) -> Callable[[], Awaitable[None]] | None:
    """Opens what the episodes of a node share; None where the environment has nothing of the kind."""
    env: Any = load_object(config.env.path)
    if not isinstance(env, Prepared):
        return None
    return partial(env.prepare, **check_options(cast("type[object]", env), config.env.options, "env.options"))


def kind_of(config: Config) -> Callable[[int], str]:
    """The kind of the problem of a seed, for environments that have several; one unnamed kind for the others."""
    env: Any = load_object(config.env.path)
    if not isinstance(env, Kinds):
        return lambda seed: ""
    options = check_options(cast("type[object]", env), config.env.options, "env.options")
    return lambda seed: env.kind_of(seed, **options)
