"""The rollout side of one node: engines, proxy, episodes and scheduler in one task group.

Lifecycle: what environments share is opened (`flash.environment.shared`) → engines start → each loads the newest
published version whenever it is behind, on its own → the scheduler turns leases into results until the hub has no more,
or the node is drained → engines close, then what was shared. An engine that dies leaves its requests to the others, or
to the one that starts in its place (`flash.rollout.supervisor`). When no place can be filled any more the node ends,
with the last one's error. No sample counts as failed for any of that.

A node may outlive its hub. Its episodes go on meanwhile, what they come to waits, and it presents to the next hub what
it holds (`move`): what that one does not know is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import anyio

from flash.config import waits
from flash.config.tree import Config
from flash.environment.calls import UserTask
from flash.environment.interface import Environment
from flash.environment.shared import sharing
from flash.errors import DeadlineError, EngineDeadError, EngineError, TransportError
from flash.hub import protocol as p
from flash.rollout.engine import Engine
from flash.rollout.episode.episode import Episode, EpisodeProgress
from flash.rollout.episode.phases import phases
from flash.rollout.episode.rehearsal import rehearse
from flash.rollout.episode.tokenizer import Tokenizer
from flash.rollout.hubs import HubLink, Hubs
from flash.rollout.node_watch import NodeWatch
from flash.rollout.outage import OutageClock
from flash.rollout.proxy import LLMProxy
from flash.rollout.scheduler import MOST_EPISODES, Scheduler
from flash.rollout.settings import episode_settings, proxy_settings
from flash.rollout.supervisor import Restart, Supervisor, start_all
from flash.samples.rules import ONE_KIND, Problems
from flash.transport.connection import rare_garbage_collection
from flash.transport.frames import ReplyT, Request
from flash.types import Failure, Lease, Published, Trajectory
from flash.waiting import deadline, unwrapped_group

if TYPE_CHECKING:
    from flash.rollout.teacher import ServedTeacher

CLAIMS_AT_ONCE = 1024
"""Leases that are presented in one message: others are served between two."""


class NodeEnvironment(NamedTuple):
    """What the episodes of a node play."""

    make: Callable[[str], Environment]
    """Makes the environment of a kind."""
    problems: Problems = ONE_KIND
    prepare: Callable[[], Awaitable[None]] | None = None
    """Opens what they share, before anything starts."""
    rehearsed: bool = False
    """Whether a first turn is tried after that."""


class RolloutNode:
    """Runs the engines and episodes of one node.

    Args:
        config: the run.
        link: its hub, and what its number and that of its first engine are there.
        make_engines: make its engines, given their numbers, not started; each the next one, too, where one has died.
        tokenizer: the model's.
        env: what episodes play.
        on_loss: told when the hub is lost, to `move` to the next one; None: the node ends with its hub.
        now: Unix seconds on the loop's clock.
        status_s: between two words on how it is; None: nobody looks.
        teacher: says what it gives the samples' tokens.
        blocked_s: seconds in which the loop was blocked so far.
    """

    def __init__(
        self,
        config: Config,
        link: HubLink,
        make_engines: Sequence[Callable[[int], Engine]],
        tokenizer: Tokenizer,
        env: NodeEnvironment,
        *,
        now: Callable[[], float],
        on_loss: Callable[[TransportError], None] | None = None,
        status_s: float | None = None,
        teacher: ServedTeacher | None = None,
        blocked_s: Callable[[], float] = float,
    ) -> None:
        self._teacher = teacher
        self._blocked_s = blocked_s
        self._misbehaved = blocked_s(), UserTask.abandoned
        """Seconds and calls that were reported."""
        self._report_numbers = count(1)
        self._status_s = status_s
        self._config = config
        self._make_engines = make_engines
        self._first_engine = link.first_engine
        restarts, start_s = config.engine.max_restarts, config.deadlines.engine_start
        self._supervisors = [
            Supervisor(place, partial(self._make_engine, place), restarts, start_s)
            for place in range(len(make_engines))
        ]
        self._tokenizer = tokenizer
        self._env = env
        self.start_s = math.nan
        """How long that took."""
        self._served: set[int] = set()
        """Places whose engine has loaded a version, this one or one before it."""
        self._died_at: dict[int, float] = {}
        """Places whose next engine has not loaded a version yet."""
        self._notes: list[str] = []
        self._restarts = 0
        """Engines that came back since the last report."""
        self._now = now
        self._hubs = Hubs(link, on_loss)
        self._starting = anyio.CancelScope()
        self._leaving = False
        self._open = set(range(len(self._supervisors)))
        """Places that have an engine, or will have one."""
        # The scheduler asks the proxy for room, the proxy wakes the scheduler: one of them has to look it up later.
        engines = [supervisor.engine for supervisor in self._supervisors]
        outages, on_room = OutageClock(waits.engine_return_s(config), now), lambda: self._scheduler.wake()
        self._proxy = LLMProxy(engines, link.first_engine, proxy_settings(config), outages, on_room=on_room, now=now)
        settings = episode_settings(config, env.problems.domains)
        self._episode = Episode(env.make, tokenizer, self._proxy, settings, phases(config), outages, now=now)
        most = config.rollout.max_concurrent
        self._scheduler = Scheduler(
            self,
            self._run_episode,
            room=self._proxy.capacity if most == "auto" else None,
            max_concurrent=MOST_EPISODES if most == "auto" else most,
        )
        self._watch = NodeWatch(self._proxy, self._scheduler, now)

    async def _run_episode(self, lease: Lease, progress: EpisodeProgress) -> Trajectory | Failure:
        made = await self._episode.run(lease, progress)
        return made if self._teacher is None else await self._teacher.told(made)

    def _make_engine(self, place: int) -> Engine:
        return self._make_engines[place](self._first_engine + place)

    async def run(self) -> None:
        """Work until the hub has no more, or until `drain`, and end."""
        async with sharing(self._config.run.name, close_s=self._config.deadlines.close):
            try:
                await self.work()
            finally:
                await self.close()

    async def work(self) -> None:
        """As `run`, within the caller's `sharing`; the engines stay."""
        async with unwrapped_group() as group:
            group.start_soon(self._heed_while_starting)
            group.start_soon(self._tell_status)
            with self._starting:
                await self._start()
            group.cancel_scope.cancel()
        if not self._starting.cancel_called:
            await self._serve_hub()

    @property
    def newest_version(self) -> int:
        """The newest version that an engine has."""
        return max(self._proxy.versions())

    @property
    def in_hand(self) -> int:
        """Leases whose results the hub has not acknowledged."""
        return len(self._scheduler.held)

    async def move(self, link: HubLink) -> None:
        """The hub is gone: go on at the next one, with what it lets us keep of what is in hand.

        Errors as of `HubCaller.call`.
        """
        node, first_engine, hub = link
        self._first_engine, seconds = first_engine, self._config.deadlines.request
        self._proxy.renumber(first_engine)
        for place, supervisor in enumerate(self._supervisors):
            supervisor.engine.reassign(first_engine + place)
        held = self._scheduler.held
        for begin in range(0, len(held), CLAIMS_AT_ONCE):
            some = held[begin : begin + CLAIMS_AT_ONCE]
            reply = await hub.call(p.ClaimRequest(node, some), seconds)
            self._scheduler.drop({lease.lease_id for lease in some}.difference(reply.lease_ids))
        await hub.call(self._make_report()(node), seconds)
        self._hubs.moved(link)

    async def close(self) -> None:
        """End the engines."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(self._config.deadlines.close):
            for supervisor in self._supervisors:
                await supervisor.engine.close()
            if self._teacher is not None:
                await self._teacher.aclose()

    async def drain(self) -> None:
        """Take no more leases, and end within deadlines.shutdown what runs, or hand it back. `run` returns then."""
        self._leaving = True
        self._starting.cancel()
        seconds = self._config.deadlines.shutdown
        with suppress(TransportError), anyio.move_on_after(seconds):  # a hub that cannot be told notices it anyway
            await self._hubs.call(p.Leave, seconds)
        await self._scheduler.drain(seconds if self._has_engine else 0.0)

    @property
    def _has_engine(self) -> bool:
        """Whether an engine is there, and not only on its way back."""
        return not self._open <= self._died_at.keys()

    async def _start(self) -> None:
        await self._prepare_env()
        if self._env.rehearsed:
            run, problems = self._config, self._env.problems
            settings, seed = episode_settings(run), run.run.seed
            await rehearse(self._tokenizer, self._env.make, problems.kind_of, settings, run_seed=seed, now=self._now)
        begun = self._now()
        await start_all(self._supervisors, self._config.deadlines.engine_start)
        self.start_s = self._now() - begun

    async def _prepare_env(self) -> None:
        if self._env.prepare is None:
            return
        seconds = self._config.deadlines.env_reset
        with deadline(seconds, "the environment to be ready", "its `prepare`, and deadlines.env_reset"):
            await self._env.prepare()

    async def _serve_hub(self) -> None:
        with rare_garbage_collection():
            async with anyio.create_task_group() as group:
                for place in range(len(self._supervisors)):
                    group.start_soon(self._keep, place)
                group.start_soon(self._heed)
                group.start_soon(self._tell_status)
                await self._scheduler.run()
                group.cancel_scope.cancel()
            await self._report()

    async def _keep(self, place: int) -> None:
        """Fill a place with engines as long as its budget lasts. Produces the error that ends the node, of the last."""
        death = await self._supervisors[place].run(self)
        if not self._open:
            raise death

    # -- Owner of the supervisors' engines ---------------------------------------------------------------------------

    async def serve(self, place: int) -> EngineDeadError:
        """Keep an engine on the newest version until it dies, whoever notices first."""

        async def follow() -> None:
            try:
                await self._follow(place)
            except EngineDeadError as error:
                self._proxy.fail(place, error)

        errors: list[EngineDeadError] = []
        async with anyio.create_task_group() as group:
            group.start_soon(follow)
            errors.append(await self._proxy.dead(place))
            group.cancel_scope.cancel()
        return errors[0]

    async def died(self, place: int, death: EngineDeadError, restart: Restart | None) -> None:
        """Tell people of it, and the hub which engines are left. A node that leaves needs no other one."""
        self._died_at.setdefault(place, self._now())
        # Of one that never served nobody knows yet.
        self._proxy.fail(place, death)
        if self._leaving:  # whoever ends a whole machine ends its engines too
            if not self._has_engine:
                self._scheduler.hand_back()
            return
        if restart is None:
            self._open.discard(place)
        else:
            self._restarts += 1
        said = f"{death}. {self._what_follows(restart)}"
        self._watch.died(place, said, returns=restart is not None)
        self._notes.append(said)
        if self._open:
            await self._report()
        else:
            # So that people are told of it; it ends the node whether or not the hub hears it.
            with suppress(TransportError):
                await self._report()

    def _what_follows(self, restart: Restart | None) -> str:
        """Of a death, for people."""
        most = self._config.engine.max_restarts
        if restart is not None:
            return f"It starts again in {restart.pause_s:g} s ({restart.number} of {most} restarts in a row)"
        spent = f"engine.max_restarts is {most}"
        if self._open:
            return f"The run goes on without it: {spent}"
        return f"It was the last one of node {self._hubs.node}, which ends with it: {spent}"

    async def replaced(self, place: int, engine: Engine) -> None:
        """Tell the hub of it before it asks for a version, which is kept for it from then on."""
        await self._proxy.replace(place, engine)
        await self._report()

    async def _follow(self, place: int) -> None:
        """Keep one engine on the newest version.

        Consumes published versions. Waits for one newer than the engine's. Produces a report after each swap.
        """
        engine = self._supervisors[place].engine
        while True:
            reply = await self._call(lambda node: p.VersionRequest(node, after=engine.version))
            if reply.done:
                return
            if reply.published is not None and await self._load(place, reply.published):
                await self._report()

    async def _load(self, place: int, published: Published) -> bool:
        """One swap. False: nobody holds the version any more, and the engine waits for the next who do.

        Raises:
            EngineDeadError: it has failed, and another engine may do better.
        """
        try:
            await self._proxy.load(place, published)
        except (EngineError, DeadlineError) as error:
            if not isinstance(error, EngineDeadError):
                reply = await self._call(lambda node: p.LoadFailed(node, published.incarnation))
                if reply.gone:
                    return False
            # What fails before it was ever done will fail again: the model does not fit, or the configuration.
            if isinstance(error, EngineDeadError) or place not in self._served:
                raise
            raise EngineDeadError(str(error)) from error
        self._served.add(place)
        if (died_at := self._died_at.pop(place, None)) is not None:
            seconds, number = self._now() - died_at, self._first_engine + place
            self._notes.append(f"engine {number} is back after {seconds:.0f} s, with version {published.version}")
        return True

    async def _heed(self) -> None:
        """End what has become pointless, be it the node.

        Consumes the hub's cancels. Waits for the next ones. Produces cancelled episodes, whose tokens are reported.
        """
        async with anyio.create_task_group() as leaving:
            while True:
                reply = await self._call(p.CancelRequest)
                self._scheduler.cancel(reply.lease_ids)
                if reply.done:
                    self._scheduler.end()
                    leaving.cancel_scope.cancel()  # a drain gives episodes time, which serve nobody now
                    return
                if reply.leave:
                    leaving.start_soon(self.drain)

    async def _heed_while_starting(self) -> None:
        """Stop the start when the hub has no more work. A lost one is no reason: there may be a next one."""
        with suppress(TransportError):
            await self._heed()
            self._starting.cancel()

    async def _tell_status(self) -> None:
        """Tell the hub now and then how we are. It is for people: that it cannot be told ends nothing."""
        while self._status_s is not None:
            with suppress(TransportError):
                await self._call(lambda node: p.StatusReport(node, self._watch.status()))
            await anyio.sleep(self._status_s)

    async def _report(self) -> None:
        await self._call(self._make_report())

    def _make_report(self) -> Callable[[int], p.EngineReport]:
        engines, activities = self._proxy.report()
        notes, self._notes = self._notes, []
        restarts, self._restarts = self._restarts, 0
        number = next(self._report_numbers)
        before, self._misbehaved = self._misbehaved, (self._blocked_s(), UserTask.abandoned)
        blocked_s, abandoned = self._misbehaved[0] - before[0], self._misbehaved[1] - before[1]
        return lambda node: p.EngineReport(
            node, number, engines, activities, notes, restarts, blocked_s=blocked_s, abandoned=abandoned
        )

    # -- LeaseSource -------------------------------------------------------------------------------------------------

    async def lease(self, capacity: int) -> list[Lease] | None:
        """Ask the hub for tasks."""
        reply = await self._call(lambda node: p.LeaseRequest(node, capacity))
        return None if reply.done else reply.leases

    async def deliver(self, ended: list[p.EndedLease], capacity: int) -> None:
        """Hand results to the hub, those that it waits for."""

        def make(node: int) -> p.DeliverRequest:
            return p.DeliverRequest(node, [each for each in ended if self._scheduler.holds(each.lease_id)], capacity)

        await self._call(make)

    async def _call(self, make: Callable[[int], Request[ReplyT]]) -> ReplyT:
        return await self._hubs.call(make, self._config.deadlines.request)
