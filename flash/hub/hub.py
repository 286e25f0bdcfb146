"""The Hub: the only stateful place of a run. It wires its parts, speaks the protocol, and watches the run's stages.

Lifecycle: trainers publish the first version → first evaluation → leases and batches until the last step or an
interrupt → last evaluation → trainer ranks, which kept the weights until then, leave → nodes are told that there is no
more work.
Its methods run in the tasks of whoever calls them; `run` watches deadlines, and does what nobody waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count

import anyio
import msgspec

from flash.config.tree import Config
from flash.errors import ContractError, DeadlineError
from flash.hub import protocol as p
from flash.hub.context import HubContext, RunEnd, RunProgress, SliceLimits
from flash.hub.fleet import Fleet, NodeRegistry, RunOrigin
from flash.hub.metrics import StepMetrics
from flash.hub.nodes import Nodes, WeightVersions
from flash.hub.overview import overview
from flash.hub.recovery import Persistence, RecoveredState, TrainerStart
from flash.hub.stages import RunStages, Stage
from flash.hub.steps import TrainingSteps
from flash.hub.trainers import TrainerRanks
from flash.observe.cluster import HubNow
from flash.observe.observer import Observer
from flash.samples.admission import AgeContract
from flash.samples.buffer import SampleBuffer
from flash.samples.evaluation import Evaluations
from flash.samples.rules import ONE_KIND, BufferRules, Problems
from flash.samples.tasks import TaskSource
from flash.transport.frames import ReplyT, Request, check_reply
from flash.waiting import deadline, unwrapped_group

LEASES = 40
"""Bits of a lease's number that count the leases of one incarnation of the hub: none is given twice in a run."""
INCARNATIONS = 20
"""The same of the trainer ranks' incarnations."""

NO_ORIGIN = RunOrigin()
"""Of a hub that nobody joins from another process."""
NEW_RUN = RecoveredState()
"""Of the first hub of a run."""
DEFAULT_LIMITS = SliceLimits()
NO_PERSISTENCE = Persistence()
"""Of a run that starts from the beginning when its hub or a trainer rank is lost."""


class Hub:
    """Serves nodes and trainer ranks; `incarnations` says which of these are listened to.

    Args:
        config: the run.
        observer: is told of everything.
        now: gives Unix seconds on the loop's clock.
        problems: those of the environment.
        recovered: what the hubs before this one have left.
        persistence: where the run keeps what is to be known after a restart.
        origin: where the run was started.
        limits: how much is done in one go.
    """

    def __init__(
        self,
        config: Config,
        observer: Observer,
        *,
        now: Callable[[], float],
        problems: Problems = ONE_KIND,
        recovered: RecoveredState = NEW_RUN,
        persistence: Persistence = NO_PERSISTENCE,
        origin: RunOrigin = NO_ORIGIN,
        limits: SliceLimits = DEFAULT_LIMITS,
    ) -> None:
        self._config = config
        self._observer = observer
        state, incarnation = recovered.state, recovered.hub_number
        version = state.version if state is not None else 0
        contract, rules = AgeContract.of(config), BufferRules.of(config, problems.domains)
        lease_ids = count(incarnation << LEASES)
        cursor = state.buffer.cursor if state is not None else None
        sizes = rules.sizes(config.rollout.group_size)
        self.buffer = SampleBuffer(
            contract,
            TaskSource(config.run.seed, sizes, problems.kind_of, cursor, rules.samplings()),
            rules,
            step=version,
            state=state.buffer if state is not None else None,
            lease_ids=lease_ids,
            members_at_once=limits.members,
            journal=persistence.journal,
        )
        self.samples = self.buffer.samples
        of_run = (config.eval, config.rollout.retries, version, config.run.steps)
        asked = (problems.kind_of, rules.samplings())
        self._evaluations = Evaluations(*of_run, *asked, lease_ids, recovered.evaluated)
        self.progress = RunProgress(version, newest=version if state is not None else -1)
        self._parts = parts = HubContext(
            config,
            observer,
            now,
            progress=self.progress,
            contract=contract,
            buffer=self.buffer,
            evaluations=self._evaluations,
            persistence=persistence,
            metrics=StepMetrics(self.samples),
            fleet=Fleet(),
        )
        self.members = NodeRegistry(config, origin)
        self._nodes = Nodes(parts, self.members)
        self.work = self._nodes.work
        self._versions = WeightVersions(parts, self.work)
        start, number = recovered.start or TrainerStart(version, ""), (incarnation << INCARNATIONS) + 1
        self._trainers = TrainerRanks(parts, start, number)
        self.incarnations = self._trainers.incarnations
        self._steps = TrainingSteps(parts, self.work, self._versions, self._trainers, limits.part_bytes)
        self.stages = RunStages(parts, self.members, self.incarnations, self._steps)

    @property
    def late_restarts(self) -> dict[str, int]:
        """Of engines and of trainer ranks, since the last step."""
        return self._parts.metrics.restarts

    def interrupt(self) -> str:
        """Stop after the running step, leaving a checkpoint; a run that has trained everything ends at once.

        What it still does, in words; empty: nothing.
        """
        over = self.progress.done or self.progress.error is not None
        self.progress.interrupt()
        return "" if over else self.stages.last_work

    # -- stages ------------------------------------------------------------------------------------------------------

    async def run(self) -> RunEnd:
        """Watch the run from the first version to the last goodbye. Raises the error that ended the run."""
        progress = self.progress
        async with unwrapped_group() as tasks:
            tasks.start_soon(self._nodes.watch)
            tasks.start_soon(self._trainers.watch)
            tasks.start_soon(self.work.catch_up)
            tasks.start_soon(self.work.expire_claims)
            unfinished = await self._watch_trainers()
            tasks.cancel_scope.cancel()
        progress.end()
        self.samples.check()
        return RunEnd(progress.stopping or "finished", progress.version, self.samples.totals(), unfinished)

    async def _watch_trainers(self) -> str:
        """Wait for each stage of the run to end, under its deadline; what an interrupt has cut short, in words."""
        while not self._trainers.done:
            seen, stage = self.progress.stages_ended, self.stages.now
            with anyio.move_on_after(stage.seconds(self._config)) as scope:
                await self.progress.until(
                    "run",
                    lambda seen=seen, stage=stage: (
                        (self.progress.stages_ended != seen and stage is not Stage.ENDING)
                        or self.stages.now is not stage
                        or self._trainers.done
                    ),
                )
            if scope.cancelled_caught and stage is Stage.ENDING:
                return self.stages.last_work
            if scope.cancelled_caught:
                self._late(stage)
        return ""

    def _late(self, stage: Stage) -> None:
        """A stage has outlived its deadline. Where the trainer ranks hang, their incarnation ends by that, not the run.

        Raises:
            DeadlineError: it is somebody else that is late, or no rank is there that could start again.
        """
        seconds, what = stage.seconds(self._config), self.stages.waited_for(stage)
        if stage.of_trainers and self.incarnations.present:
            self._trainers.hang(f"the run has waited {seconds:g} s (deadlines.{stage.deadline}) for {what}")
        else:
            raise DeadlineError(what, seconds, stage.look_at)

    def overview(self) -> HubNow:
        """What the whole cluster does now, for people."""
        doing = self.stages.waited_for(self.stages.now)
        return overview(self._parts, self.members, self._nodes, self._trainers, doing)

    async def all_nodes_left(self) -> None:
        """Wait, under the caller's deadline, until every node has taken note of the end and closed its connection."""
        await self.progress.until("run", lambda: self._nodes.deserted)

    # -- requests ----------------------------------------------------------------------------------------------------

    async def handle(self, request: Request[ReplyT]) -> ReplyT:
        """Answer one request of the protocol."""
        return check_reply(request, await self._answer(request))

    async def _answer(self, request: msgspec.Struct) -> msgspec.Struct:
        match request:
            case p.LeaseRequest():
                return await self.work.lease(request)
            case p.ClaimRequest():
                return self.work.claims_of(request)
            case p.DeliverRequest():
                return await self.work.deliver(request)
            case p.CancelRequest():
                return await self._nodes.cancels(request)
            case p.VersionRequest():
                return await self._versions.newer(request)
            case p.LoadFailed():
                return await self._versions.load_failed(request)
            case p.EngineReport():
                return self._versions.engines_changed(request)
            case p.StatusReport():
                self._nodes.told(request)
            case p.RunRequest():
                self.progress.refuse_at_end()
                return self.members.about(request, self.progress.version, ending=self.progress.ending)
            case p.JoinRequest():
                return self._nodes.join(request)
            case p.DrainRequest():
                self.members.may_leave(request.node)
                self._nodes.send_off(request.node)
            case p.Leave():
                self._nodes.leaves(request)
            case p.RanksRequest():
                return await self._trainers.ranks_of(request)
            case p.Interrupt():
                self._observer.note(f"{request.reason}: {self.interrupt() or 'the run is over'}")
            case p.Fatal():
                await self._trainers.failed(request, lambda: self.stages.waited_for(self.stages.now))
                # The peer hears of the end of this connection once we have said why; it waits no longer than this.
                await anyio.sleep(self._config.deadlines.request)
            case _:
                return await self._trainers.while_it_lasts(partial(self._answer_rank, request))
        return p.Ack()

    async def _answer_rank(self, request: msgspec.Struct) -> msgspec.Struct:
        match request:
            case p.IncarnationRequest():
                return await self._trainers.begins(request)
            case p.IncarnationWatch():
                await self._trainers.watched(request)
            case p.BatchRequest():
                return await self._steps.batch(request)
            case p.Commit():
                return await self._steps.commit(request)
            case p.PublishRequest():
                return await self._steps.publish(request.published)
            case p.SnapshotRequest():
                return await self._steps.snapshot()
            case p.Goodbye():
                await self._steps.goodbye(request)
            case _:
                raise ContractError(f"the hub does not serve a {type(request).__name__}")
        return p.Ack()

    def peer_lost(self, name: str) -> None:
        """A connection ended. A node's leases go back; of a trainer rank, one of the newest incarnation, it is the end.

        Not if it has said goodbye.
        """
        kind, _, number = name.partition("-")
        if kind == "trainer":
            self._trainers.lost(int(number))
        if kind == "node":
            self._nodes.left(int(number))
            self.members.left(int(number))


class InProcessCaller:
    """A peer's calls to the hub of the same process. `watch` sees every request with its reply."""

    def __init__(self, hub: Hub, watch: Callable[[msgspec.Struct, msgspec.Struct], None] | None = None) -> None:
        self._hub = hub
        self._watch = watch

    async def call(self, request: Request[ReplyT], timeout: float) -> ReplyT:
        """Ask the hub. Raises DeadlineError after `timeout` seconds."""
        with deadline(timeout, f"the reply to {type(request).__name__}", "the hub of this process"):
            reply = await self._hub.handle(request)
        if self._watch is not None:
            self._watch(request, reply)
        return reply
