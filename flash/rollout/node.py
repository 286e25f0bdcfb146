"""The rollout side of one node: engines, proxy, episodes and scheduler in one task group.

Lifecycle: engines start → each loads the newest published version whenever it is behind, on its own → the scheduler
turns leases into results until the hub has no more → engines close. An engine that dies ends the node with its error.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Protocol

import anyio

from envs.base import Environment
from flash.config import Config
from flash.errors import ContractError
from flash.hub import protocol as p
from flash.rollout.engine import Engine, SamplingSettings
from flash.rollout.episode import Episode, EpisodeSettings, Tokenizer
from flash.rollout.proxy import LLMProxy, start_engines
from flash.rollout.scheduler import Scheduler
from flash.types import Lease


class HubCaller(Protocol):
    """The connection to the hub."""

    async def call(self, request: p.Request, *, timeout: float) -> p.Reply:
        """Send one request and wait for its reply."""
        ...


def episode_settings(config: Config) -> EpisodeSettings:
    """The part of the configuration that episodes use."""
    limit = config.rollout.max_new_tokens
    return EpisodeSettings(
        train=SamplingSettings(limit, config.rollout.temperature),
        eval=SamplingSettings(limit, config.eval.temperature),
        max_length=config.model.max_length,
        reset_s=config.deadlines.env_reset,
        step_s=config.deadlines.env_step,
        close_s=config.deadlines.shutdown,
        generate_s=config.deadlines.generate,
    )


class RolloutNode:
    """Runs the engines and episodes of one node."""

    def __init__(
        self,
        node: int,
        config: Config,
        engines: Sequence[Engine],
        first_engine: int,
        tokenizer: Tokenizer,
        make_env: Callable[[], Environment],
        hub: HubCaller,
        *,
        now: Callable[[], float],
    ) -> None:
        self._node = node
        self._config = config
        self._engines = engines
        self._hub = hub
        self._proxy = LLMProxy(engines, first_engine, now=now)
        self._episode = Episode(make_env, tokenizer, self._proxy, episode_settings(config))

    async def run(self) -> None:
        """Serve until the hub has no more work."""
        try:
            await start_engines(self._engines, self._config.deadlines.engine_start)
            # What vLLM and torch have loaded stays for good: a full collection over it stops the loop for 0.3 s.
            gc.freeze()
            async with anyio.create_task_group() as group:
                for i, engine in enumerate(self._engines):
                    group.start_soon(self._follow, i)
                    group.start_soon(self._watch, engine)
                await Scheduler(self, self._episode.run, self._config.rollout.max_concurrent).run()
                group.cancel_scope.cancel()
            await self._report()
        finally:
            gc.unfreeze()
            with anyio.CancelScope(shield=True), anyio.move_on_after(self._config.deadlines.shutdown):
                for engine in self._engines:
                    await engine.close()

    async def _follow(self, index: int) -> None:
        """Keep one engine on the newest version.

        Consumes published versions. Waits for one newer than the engine's. Produces a report after each swap.
        """
        engine = self._engines[index]
        while True:
            reply = await self._call(p.VersionRequest(self._node, after=engine.version))
            if not isinstance(reply, p.VersionReply):
                raise ContractError(f"the hub answered a VersionRequest with {type(reply).__name__}")
            if reply.done:
                return
            if reply.published is not None:
                await self._proxy.load(index, reply.published)
                await self._report()

    async def _watch(self, engine: Engine) -> None:
        raise await engine.wait_dead()

    async def _report(self) -> None:
        engines, activities = self._proxy.report()
        await self._call(p.EngineReport(self._node, engines, activities))

    # -- LeaseSource -------------------------------------------------------------------------------------------------

    async def lease(self, capacity: int) -> list[Lease] | None:
        """Ask the hub for tasks."""
        reply = await self._call(p.LeaseRequest(self._node, capacity))
        if not isinstance(reply, p.Leases):
            raise ContractError(f"the hub answered a LeaseRequest with {type(reply).__name__}")
        return None if reply.done else reply.leases

    async def deliver(self, results: list[p.Result]) -> None:
        """Hand results to the hub."""
        await self._call(p.Results(self._node, results))

    async def _call(self, request: p.Request) -> p.Reply:
        return await self._hub.call(request, timeout=self._config.deadlines.request)
