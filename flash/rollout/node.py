"""RolloutNode: the rollout side of one node. It makes and connects the engines, the proxy, the episodes and the
scheduler.

The scheduler gets leases from the hub and calls `EpisodePlayer.play` for each. A *lease* assigns one task to this node.
A task asks for one sample of a problem. The player requests responses from the proxy, which gives each request to an
engine. When an engine has room again, the proxy wakes the scheduler.

Lifecycle: the resources that environments share are opened (`flash.environment.shared`), and the engines start. Each
engine loads the newest published version of the policy's weights whenever it is behind. The scheduler turns leases into
results until the hub has no more work, or until `drain`. Then the engines are closed, and after them the shared
resources.

If an engine dies, its requests go to the other engines, or to the engine that starts in its place (`supervisor`). If no
place can be filled any more, the node ends with the error of the last engine. No sample fails because an engine dies.

A joined node (`flash.run.joined`) may outlive its hub: its episodes go on meanwhile, and their results wait. `move`
presents the leases that the node holds to the next hub, and forgets the leases that this hub does not know.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import anyio

from flash.config import waits
from flash.config.tree import Config
from flash.environment.interface import Environment
from flash.environment.shared import sharing
from flash.errors import TransportError
from flash.hub import protocol as p
from flash.rollout.engine import Engine
from flash.rollout.engine_state import OutageClock
from flash.rollout.episode.episode import EpisodePlayer, EpisodeSettings
from flash.rollout.episode.phases import phases
from flash.rollout.episode.rehearsal import rehearse
from flash.rollout.episode.tokenizer import Tokenizer
from flash.rollout.proxy import LLMProxy, ProxySettings
from flash.rollout.reports import NodeReports
from flash.rollout.scheduler import MAX_EPISODES, HubClient, HubLink, Scheduler, Wakeup
from flash.rollout.supervisor import EnginePlace, EngineSupervisor
from flash.samples.rules import ONE_KIND, BufferRules, ProblemKinds
from flash.waiting import deadline, rare_garbage_collection, unwrapped_group

if TYPE_CHECKING:
    from flash.rollout.teacher import ServedTeacher

CLAIMS_AT_ONCE = 1024
"""Number of leases that are presented to the next hub in one message. Between two messages the hub serves other
nodes."""


class NodeEnvironment(NamedTuple):
    """The environment that the episodes of a node play."""

    make: Callable[[str], Environment]
    """Makes an environment for one episode, given the kind of its problem."""
    problems: ProblemKinds = ONE_KIND
    """Kinds of problems and their settings."""
    prepare: Callable[[], Awaitable[None]] | None = None
    """Opens the resources that the environments share, before the engines start. None: there are none."""
    rehearsed: bool = False
    """True if the first turn of an episode is tried before the engines start (`rehearse`), so that a broken environment
    is found before their start has taken minutes."""


class RolloutNode:
    """Runs the engines and episodes of one node.

    Args:
        config: the configuration of the run.
        link: connection to the hub, and the numbers of the node and of its first engine there.
        make_engines: one function for each place of the node, which has one engine at a time. The function makes an
            engine that is not started, given its number in the run. It is called again when the engine of the place has
            died.
        tokenizer: the model's tokenizer.
        env: environment of the episodes.
        now: clock of Unix seconds, which also runs while the loop is blocked.
        on_loss: called when the hub is lost; the owner then has to `move` the node to the next hub. None: the node ends
            with its hub.
        status_s: seconds between two status reports; None: no reports.
        teacher: client of the teacher, a model on a server of its own, which gives log-probs for the tokens of the
            samples. None: there is no such model.
        blocked_s: returns the seconds in which the event loop was blocked so far. By default always 0.
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
        self._config = config
        self._tokenizer = tokenizer
        self._env = env
        self._now = now
        self._status_s = status_s
        self._teacher = teacher
        self._starting = anyio.CancelScope()
        """Scope around the start of the engines. Cancelling it stops the start."""
        self.start_s = math.nan
        """Seconds that the start of the engines took; NaN before that."""
        self._hub = HubClient(link, on_loss, config.deadlines.request)
        self._places = [
            EnginePlace(index, link.first_engine + index, make, config.deadlines.engine_start)
            for index, make in enumerate(make_engines)
        ]
        engines = [place.engine for place in self._places]
        # An outage, a time without any engine, extends deadlines by at most the time that all restarts may take.
        outages, wakeup = OutageClock(waits.engine_return_s(config), now), Wakeup()
        self._proxy = LLMProxy(
            engines, link.first_engine, ProxySettings.of(config), outages, on_room=wakeup.notify, now=now
        )
        settings = EpisodeSettings.of_run(config, env.problems.domains)
        score = None if teacher is None else teacher.score
        player = EpisodePlayer(
            env.make, tokenizer, self._proxy, settings, phases(config), outages, score=score, now=now
        )
        most = config.rollout.max_concurrent
        self._scheduler = Scheduler(
            self._hub,
            player.play,
            wakeup,
            room=self._proxy.capacity if most == "auto" else None,
            max_concurrent=MAX_EPISODES if most == "auto" else most,
        )
        self._reports = NodeReports(self._hub, self._proxy, self._scheduler, now=now, blocked_s=blocked_s)
        restarts = config.cluster.max_restarts
        self._supervisor = EngineSupervisor(
            self._places, self._proxy, self._hub, self._reports, now=now, max_restarts=restarts
        )

    async def run(self) -> None:
        """Work until the hub has no more work or until `drain`, then close the engines.

        Raises:
            Exception: the error that ended the node, for example of the last engine that could not be replaced, or of
                the hub that was lost.
        """
        async with sharing(self._config.run.name, close_s=self._config.deadlines.close):
            try:
                await self.work()
            finally:
                await self.close()

    async def work(self) -> None:
        """Do the work of `run` inside a `sharing` block of the caller, and leave the engines open.

        `flash.run.joined` calls this instead of `run`, and then `close`. Raises the errors of `run`.
        """
        async with unwrapped_group() as group:
            group.start_soon(self._stop_start_without_work)
            group.start_soon(self._reports.run, self._status_s)
            with self._starting:
                await self._start()
            # `_serve_hub` starts tasks of its own in place of these two.
            group.cancel_scope.cancel()
        if not self._starting.cancel_called:
            await self._serve_hub()

    @property
    def newest_version(self) -> int:
        """Newest policy version that an engine has; −1 if none has any."""
        return max(self._proxy.versions())

    @property
    def leases_held(self) -> int:
        """Number of leases whose results no hub has acknowledged."""
        return len(self._hub.held)

    async def move(self, link: HubLink) -> None:
        """Go on at the next hub, to which `link` is the connection, with the leases that the node holds.

        The node and its engines get the numbers that they have at this hub. Episodes of leases that this hub does not
        know are cancelled. At the end, calls that wait for a hub are sent to this one.

        Raises:
            FlashError: this hub is lost too, or refuses a request. The owner may then call `move` with a link to
                another hub.
        """
        self._proxy.renumber(link.first_engine)
        for place in self._places:
            place.renumber(link.first_engine + place.index)
        seconds, held = self._config.deadlines.request, self._hub.held
        for begin in range(0, len(held), CLAIMS_AT_ONCE):
            leases = held[begin : begin + CLAIMS_AT_ONCE]
            reply = await link.hub.call(p.ClaimRequest(link.node, leases), seconds)
            unknown = {lease.lease_id for lease in leases}.difference(reply.lease_ids)
            self._hub.forget(unknown)
            self._scheduler.cancel(unknown)
        # The hub learns which version each engine has before it gets other requests of this node.
        await link.hub.call(self._reports.next_report()(link.node), seconds)
        self._hub.connected(link)

    async def close(self) -> None:
        """Close the engines, and the connections to the teacher. Takes at most deadlines.close, even if cancelled."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(self._config.deadlines.close):
            await self._supervisor.close()
            if self._teacher is not None:
                await self._teacher.aclose()

    async def drain(self) -> None:
        """Leave the run: notify the hub, take no more leases, and let the episodes end. Then `run` returns.

        This is called when the hub wants the node to leave, or when a signal asks a joined node to leave. Episodes may
        go on for deadlines.shutdown while a place has an engine. Then the leases of the remaining episodes are handed
        back, for other nodes. A start of the engines is stopped.
        """
        self._supervisor.start_leaving()
        self._starting.cancel()
        seconds = self._config.deadlines.shutdown
        # If this message does not reach the hub, it notices that the node leaves when the connection ends.
        with suppress(TransportError), anyio.move_on_after(seconds):
            await self._hub.call(p.Leave, seconds)
        self._scheduler.stop_leasing()
        with anyio.move_on_after(seconds):
            await self._supervisor.no_engine_left()
        self._scheduler.hand_back()

    async def _start(self) -> None:
        """Prepare and rehearse the environment, then start the engines, and measure how long their start takes.

        The rehearsal plays one turn without an engine (`rehearse`).

        Raises:
            ConfigError: the environment cannot be played.
            DeadlineError: the environment's `prepare` took longer than deadlines.env_step.
            Exception: the environment's `prepare` or an engine failed.
        """
        config, problems = self._config, self._env.problems
        if self._env.prepare is not None:
            seconds = config.deadlines.env_step
            with deadline(seconds, "the environment to be ready", "its `prepare`, and deadlines.env_step"):
                await self._env.prepare()
        if self._env.rehearsed:
            settings, seed = EpisodeSettings.of_run(config, problems.domains), config.run.seed
            samplings = BufferRules.of(config, problems.domains).samplings()
            make_env, kind_of = self._env.make, problems.kind_of
            await rehearse(
                self._tokenizer, make_env, kind_of, settings, samplings=samplings, run_seed=seed, now=self._now
            )
        begin = self._now()
        await self._supervisor.start(config.deadlines.engine_start)
        self.start_s = self._now() - begin

    async def _serve_hub(self) -> None:
        """Serve the hub until it has no more work or until `drain`. Then report the final seconds of the engines.

        Raises:
            ExceptionGroup: with the error that ends the node, of the engines or of a request to the hub.
            FlashError: the hub refuses the final report, or is lost and no other hub follows it.
        """
        # A full garbage collection would block the event loop, and so all episodes, for a noticeable time.
        with rare_garbage_collection():
            async with anyio.create_task_group() as group:
                group.start_soon(self._supervisor.run)
                group.start_soon(self._obey_hub)
                group.start_soon(self._reports.run, self._status_s)
                await self._scheduler.run()
                group.cancel_scope.cancel()
            # The hub sums the busy and idle seconds of engines, so the seconds since the last report are sent at the
            # end.
            await self._reports.send()

    async def _obey_hub(self) -> None:
        """Cancel the episodes that the hub has no use for, and end or drain the node when the hub says so.

        Keeps one request open at the hub, which answers it when leases are withdrawn, when the node must leave, or when
        there is no more work. The request is also the node's heartbeat. The results of cancelled episodes say how many
        tokens they had. Returns when the hub has no more work.

        Raises:
            FlashError: the hub refuses the request, or is lost and no other hub follows it.
        """
        async with unwrapped_group() as leaving:
            while True:
                reply = await self._hub.call(p.CancelRequest)
                self._scheduler.cancel(reply.lease_ids)
                if reply.done:
                    self._scheduler.end()
                    # A running drain would give the episodes time to end, but the hub needs no results any more.
                    leaving.cancel_scope.cancel()
                    return
                if reply.leave:
                    leaving.start_soon(self.drain)

    async def _stop_start_without_work(self) -> None:
        """Stop the start of the engines when the hub has no more work. Does nothing if the hub is lost.

        The start then goes on, because another hub may follow; if none does, the first request after it fails.
        """
        with suppress(TransportError):
            await self._obey_hub()
            self._starting.cancel()
