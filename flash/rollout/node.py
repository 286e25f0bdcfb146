"""The rollout side of one node: engines, proxy, episodes and scheduler in one task group.

Lifecycle: what environments share is opened (`flash.environment.shared`) → engines start → each loads the newest
published version whenever it is behind, on its own → the scheduler turns leases into results until the hub has no more
→ engines close, then what was shared. An engine that dies leaves its requests to the others; the death of the last one
ends the node with its error.
"""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable, Sequence

import anyio

from flash.config.tree import Config
from flash.environment.interface import Environment
from flash.environment.shared import sharing
from flash.errors import EngineDeadError
from flash.hub import protocol as p
from flash.rollout.engine import Engine, SamplingSettings
from flash.rollout.episode import Episode, EpisodeSettings, Tokenizer
from flash.rollout.phases import phases
from flash.rollout.proxy import LLMProxy, ProxySettings, start_engines
from flash.rollout.scheduler import MOST_EPISODES, Scheduler
from flash.transport.request import ReplyT, Request
from flash.types import Lease
from flash.waiting import deadline

COLLECTION_THRESHOLDS = (200_000, 10, 10)
"""Of Python's cyclic garbage collector while a node serves. Episodes leave no cycles behind, but they live long enough
to be looked at again and again: at Python's own thresholds that stops a loop of 10,000 episodes for a second."""


def episode_settings(config: Config) -> EpisodeSettings:
    """The part of the configuration that episodes use."""
    limit = config.rollout.max_new_tokens
    return EpisodeSettings(
        train=SamplingSettings(limit, config.rollout.temperature),
        eval=SamplingSettings(limit, config.eval.temperature),
        max_length=config.model.max_length,
        max_turns=config.rollout.max_turns,
        reset_s=config.deadlines.env_reset,
        step_s=config.deadlines.env_step,
        close_s=config.deadlines.shutdown,
        generate_s=config.deadlines.generate,
        episode_s=config.deadlines.episode,
    )


def proxy_settings(config: Config) -> ProxySettings:
    """The part of the configuration that the proxy uses."""
    return ProxySettings(
        max_sequences=config.engine.max_sequences,
        swap=config.rollout.swap,
        bind_groups=not config.rollout.replicate_prompts,
        swap_s=config.deadlines.swap,
        drain_s=config.deadlines.generate,
    )


class RolloutNode:
    """Runs the engines and episodes of one node.

    Args:
        node: its number in the run.
        config: the run.
        engines: its engines, not started.
        first_engine: the first engine's number in the run.
        tokenizer: the model's.
        make_env: makes the environment of a kind.
        hub: the connection to the hub.
        now: Unix seconds on the loop's clock.
        prepare: opens what the environments of this node share, before anything starts.
    """

    def __init__(
        self,
        node: int,
        config: Config,
        engines: Sequence[Engine],
        first_engine: int,
        tokenizer: Tokenizer,
        make_env: Callable[[str], Environment],
        hub: p.HubCaller,
        *,
        now: Callable[[], float],
        prepare: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._node = node
        self._prepare = prepare
        self._config = config
        self._engines = engines
        self._hub = hub
        # The scheduler asks the proxy for room, the proxy wakes the scheduler: one of them has to look it up later.
        self._proxy = LLMProxy(
            engines, first_engine, proxy_settings(config), on_room=lambda: self._scheduler.wake(), now=now
        )
        episode = Episode(make_env, tokenizer, self._proxy, episode_settings(config), phases(config), now=now)
        most = config.rollout.max_concurrent
        self._scheduler = Scheduler(
            self,
            episode.run,
            room=self._proxy.capacity if most == "auto" else None,
            max_concurrent=MOST_EPISODES if most == "auto" else most,
        )

    async def run(self) -> None:
        """Serve until the hub has no more work."""
        async with sharing(self._config.run.name, close_s=self._config.deadlines.shutdown):
            await self._prepare_env()
            await self._serve_hub()

    async def _prepare_env(self) -> None:
        if self._prepare is None:
            return
        seconds = self._config.deadlines.env_reset
        with deadline(seconds, "the environment to be ready", "its `prepare`, and deadlines.env_reset"):
            await self._prepare()

    async def _serve_hub(self) -> None:
        thresholds = gc.get_threshold()
        try:
            await start_engines(self._engines, self._config.deadlines.engine_start)
            # What vLLM and torch have loaded stays for good: a full collection over it stops the loop for 0.3 s.
            gc.freeze()
            gc.set_threshold(*COLLECTION_THRESHOLDS)
            async with anyio.create_task_group() as group:
                for index in range(len(self._engines)):
                    group.start_soon(self._serve, index)
                group.start_soon(self._heed)
                await self._scheduler.run()
                group.cancel_scope.cancel()
            await self._report()
        finally:
            gc.set_threshold(*thresholds)
            gc.unfreeze()
            with anyio.CancelScope(shield=True), anyio.move_on_after(self._config.deadlines.shutdown):
                for engine in self._engines:
                    await engine.close()

    async def _serve(self, index: int) -> None:
        """One engine's life: it follows the published versions until it dies.

        Produces a report of those that are left, or the error that ends the node when there are none.
        """
        error = await self._dead(index)
        self._proxy.fail(index, error)
        if not self._proxy.alive:
            raise error
        await self._report()

    async def _dead(self, index: int) -> EngineDeadError:
        """Keep an engine on the newest version until it dies, whoever notices first."""
        errors: list[EngineDeadError] = []
        async with anyio.create_task_group() as group:

            async def follow() -> None:
                try:
                    await self._follow(index)
                except EngineDeadError as error:
                    errors.append(error)
                    group.cancel_scope.cancel()

            group.start_soon(follow)
            errors.append(await self._engines[index].wait_dead())
            group.cancel_scope.cancel()
        return errors[0]

    async def _follow(self, index: int) -> None:
        """Keep one engine on the newest version.

        Consumes published versions. Waits for one newer than the engine's. Produces a report after each swap.
        """
        engine = self._engines[index]
        while True:
            reply = await self._call(p.VersionRequest(self._node, after=engine.version))
            if reply.done:
                return
            if reply.published is not None:
                await self._proxy.load(index, reply.published)
                await self._report()

    async def _heed(self) -> None:
        """End what has become pointless.

        Consumes the hub's cancels. Waits for the next ones. Produces cancelled episodes, whose tokens are reported.
        """
        while True:
            reply = await self._call(p.CancelRequest(self._node))
            self._scheduler.cancel(reply.lease_ids)
            if reply.done:
                return

    async def _report(self) -> None:
        engines, activities = self._proxy.report()
        await self._call(p.EngineReport(self._node, engines, activities))

    # -- LeaseSource -------------------------------------------------------------------------------------------------

    async def lease(self, capacity: int) -> list[Lease] | None:
        """Ask the hub for tasks."""
        reply = await self._call(p.LeaseRequest(self._node, capacity))
        return None if reply.done else reply.leases

    async def deliver(self, ended: list[p.EndedLease]) -> None:
        """Hand results to the hub."""
        await self._call(p.DeliverRequest(self._node, ended))

    async def _call(self, request: Request[ReplyT]) -> ReplyT:
        return await self._hub.call(request, timeout=self._config.deadlines.request)
