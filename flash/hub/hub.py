"""The Hub: the only stateful place of a run. It wires its parts, speaks the protocol, and watches the run's stages.

Lifecycle: trainers publish the first version → first evaluation → leases and batches until the last step or an
interrupt → trainer ranks say goodbye → last evaluation → nodes are told that there is no more work.
Its methods run in the tasks of whoever calls them; `run` watches deadlines, and does what nobody waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count

import anyio
import msgspec

from flash.config import waits
from flash.config.tree import Config
from flash.errors import ContractError, DeadlineError, FlashError
from flash.hub import protocol as p
from flash.hub.metrics import StepMetrics
from flash.hub.nodes.fleet import Fleet
from flash.hub.nodes.members import Members, Origin
from flash.hub.nodes.nodes import Nodes
from flash.hub.nodes.versions import Versions
from flash.hub.overview import overview
from flash.hub.parts import Inheritance, Parts, Pieces, Records
from flash.hub.progress import RunEnd, RunProgress
from flash.hub.ranks.recovery import Start
from flash.hub.ranks.steps import Steps
from flash.hub.ranks.trainers import Trainers
from flash.hub.stages import LOOK_AT, OF_TRAINERS, STARTING_ENGINES, Beginning, Stage, last_work, stage_s, waited_for
from flash.observe.cluster import HubNow
from flash.observe.observer import Observer
from flash.samples.buffer import SampleBuffer
from flash.samples.evaluation import Evaluations
from flash.samples.rules import ALIKE, Problems, age_contract, buffer_rules
from flash.samples.tasks import TaskSource
from flash.transport.request import ReplyT, Request, answered
from flash.waiting import deadline, unwrapped_group

LEASES = 40
"""Bits of a lease's number that count the leases of one incarnation of the hub: none is given twice in a run."""
INCARNATIONS = 20
"""The same of the trainer ranks' incarnations."""

NOWHERE = Origin()
"""Of a hub that nobody joins from another process."""
NOTHING = Inheritance()
"""Of the first hub of a run."""
PIECES = Pieces()
NO_RECORDS = Records()
"""Of a run that starts from the beginning when its hub or a trainer rank is lost."""


class Hub:
    """Serves nodes and trainer ranks; `incarnations` says which of these are listened to.

    Args:
        config: the run.
        observer: is told of everything.
        now: gives Unix seconds on the loop's clock.
        problems: those of the environment.
        inherited: what the hubs before this one have left.
        records: where the run keeps what is to be known after a restart.
        origin: where the run was started.
        pieces: how much is done in one go.
    """

    def __init__(
        self,
        config: Config,
        observer: Observer,
        *,
        now: Callable[[], float],
        problems: Problems = ALIKE,
        inherited: Inheritance = NOTHING,
        records: Records = NO_RECORDS,
        origin: Origin = NOWHERE,
        pieces: Pieces = PIECES,
    ) -> None:
        self._config = config
        self._observer = observer
        self._now = now
        state, incarnation = inherited.state, inherited.incarnation
        self._first_version = version = state.version if state is not None else 0
        self._progress = RunProgress(version)
        self._contract = age_contract(config)
        lease_ids = count(incarnation << LEASES)
        rules = buffer_rules(config, problems.domains)
        cursor = state.buffer.cursor if state is not None else None
        self.buffer = SampleBuffer(
            self._contract,
            TaskSource(config.run.seed, rules.sizes(config.rollout.group_size), problems.kind_of, cursor),
            rules,
            step=version,
            state=state.buffer if state is not None else None,
            lease_ids=lease_ids,
            members_at_once=pieces.members,
            journal=records.journal,
        )
        self.samples = self.buffer.samples
        of_run = (config.eval, config.rollout.retries, version, config.run.steps)
        self._evaluations = Evaluations(*of_run, problems.kind_of, lease_ids, inherited.evaluated)
        self._members = Members(config, origin)
        self._known = version if state is not None else -1
        """The newest version that engines may have of a former hub."""
        self._fleet = Fleet(self._known)
        parts = Parts(
            config,
            observer,
            now,
            self._progress,
            self._contract,
            self.buffer,
            self._evaluations,
            records,
            StepMetrics(self.samples.ledger),
            self._fleet,
        )
        self._nodes = Nodes(parts, self._members)
        self._work = self._nodes.work
        self._versions = Versions(parts, self._work)
        self._trainers = Trainers(
            parts, inherited.start or Start(version, ""), (incarnation << INCARNATIONS) + 1, pieces.part_bytes
        )
        self.incarnations = self._trainers.incarnations
        self._steps = Steps(parts, self._work, self._versions, self._trainers, pieces.part_bytes)

    @property
    def version(self) -> int:
        """The version that the run has reached."""
        return self._progress.version

    @property
    def published_version(self) -> int:
        """The newest version that engines may have; -1 before the first."""
        return self._progress.published.version if self._progress.published is not None else -1

    @property
    def known_version(self) -> int:
        """The newest version that engines may have, of this hub or of one before it; -1: there is none."""
        return max(self.published_version, self._known)

    def fail(self, error: FlashError) -> None:
        """End the run with this error; the first one wins."""
        self._progress.fail(error)

    @property
    def interrupted(self) -> bool:
        """Whether somebody has asked for an early end."""
        return self._progress.stopping == "interrupted"

    def interrupt(self) -> str:
        """Stop after the running step, leaving a checkpoint; a run that has trained everything ends at once.

        What it still does, in words; empty: nothing.
        """
        over = self._progress.done or self._progress.error is not None
        self._progress.interrupt()
        return "" if over else last_work(self._at_work(), self._progress.version)

    # -- stages ------------------------------------------------------------------------------------------------------

    async def run(self) -> RunEnd:
        """Watch the run from the first version to the last goodbye. Raises the error that ended the run."""
        async with unwrapped_group() as tasks:
            tasks.start_soon(self._nodes.watch)
            tasks.start_soon(self._work.catch_up)
            tasks.start_soon(self.expire_claims)
            unfinished = await self._watch_trainers()
            if self._progress.stopping != "interrupted":
                with deadline(self._config.deadlines.step, "the last evaluation", "the engines and eval.problems"):
                    await self._progress.until(
                        "run", lambda: self._evaluations.done or self._progress.stopping == "interrupted"
                    )
            tasks.cancel_scope.cancel()
        self._progress.end()
        self.samples.check()
        totals = self.samples.totals()
        return RunEnd(self._progress.stopping or "finished", self._progress.version, totals, unfinished)

    async def expire_claims(self) -> None:
        """Wait for nodes that have outlived the hub before this one, and take back what they had."""
        if self._work.claims:
            await anyio.sleep(waits.claim_s(self._config))
            self._work.expire_claims()

    async def _watch_trainers(self) -> str:
        """Wait for each stage of the run to end, under its deadline; what an interrupt has cut short, in words."""
        while not self._trainers.done:
            seen, stage = self._progress.stages_ended, self._stage()
            with anyio.move_on_after(stage_s(stage, self._config)) as scope:
                await self._progress.until(
                    "run",
                    lambda seen=seen, stage=stage: (
                        (self._progress.stages_ended != seen and stage is not Stage.ENDING)
                        or self._stage() is not stage
                        or self._trainers.done
                    ),
                )
            if scope.cancelled_caught and stage is Stage.ENDING:
                return last_work(self._at_work(), self._progress.version)
            if scope.cancelled_caught:
                self._late(stage)
        return ""

    def _late(self, stage: Stage) -> None:
        """A stage has outlived its deadline. Where the trainer ranks hang, their incarnation ends by that, not the run.

        Raises:
            DeadlineError: it is somebody else that is late, or no rank is there that could start again.
        """
        seconds, what = stage_s(stage, self._config), self._waited_for(stage)
        if stage in OF_TRAINERS and self.incarnations.present:
            self._trainers.hang(f"the run has waited {seconds:g} s (deadlines.{OF_TRAINERS[stage]}) for {what}")
        else:
            raise DeadlineError(what, seconds, LOOK_AT[stage])

    def _stage(self) -> Stage:
        """What the run waits for at the moment."""
        return Stage.ENDING if self._progress.stopping == "interrupted" else self._at_work()

    def _at_work(self) -> Stage:
        """The same, interrupted or not."""
        if self.incarnations.away:
            return Stage.AWAY
        if self.incarnations.behind(self._progress.version):
            return Stage.AGAIN
        if self._progress.published is None:
            return Stage.FIRST_VERSION
        if self._steps.training:
            return Stage.STEP
        if not self._fleet.started:
            return Stage.RETURNING if self._fleet.waits_for_engines else Stage.STARTING
        if self._steps.waits_for_engines:
            return Stage.LOADING
        if self._progress.stopping == "finished":
            return Stage.SAVING
        if not self._steps.asked:
            return Stage.BETWEEN
        return Stage.RETURNING if self._fleet.waits_for_engines else Stage.BATCH

    def _waited_for(self, stage: Stage) -> str:
        """The same in words."""
        groups = f"{self.samples.pool.ready_groups} of {self._contract.groups_per_batch}"
        step = self.incarnations.held if stage is Stage.AGAIN else self._progress.version
        words = waited_for(stage, step=step, groups=groups, behind=self._fleet.behind())
        alone = self._members.engines == 0 if stage is Stage.STARTING else not self._fleet
        if stage in (Stage.STARTING, Stage.BATCH) and alone:
            words += ", while no node has an engine: `flash join` brings one"
        return words

    def beginning(self) -> Beginning | None:
        """What the run does before its first step; None from then on, and when it has ended before."""
        progress = self._progress
        if progress.version > self._first_version or progress.error is not None:
            return None
        if progress.stopping == "interrupted" or (progress.stopping == "finished" and self._evaluations.done):
            return None
        if progress.published is None:
            if self.incarnations.behind(progress.version) and not self.incarnations.away:
                return Beginning("training again", f"{progress.version - self.incarnations.held} steps left")
            return Beginning("starting engines and trainers")
        if not self._fleet.started:
            return Beginning(STARTING_ENGINES)
        if answers := self._evaluations.progress:
            return Beginning("first evaluation", answers)
        if self._steps.training:
            return Beginning("first step")
        return Beginning("first batch", f"{self.samples.pool.ready_groups} of {self._contract.groups_per_batch} groups")

    def overview(self) -> HubNow:
        """What the whole cluster does now, for people."""
        doing, progress = self._waited_for(self._stage()), self._progress
        parts = (self._members, self._nodes, self._trainers, self.samples, self._evaluations, progress)
        return overview(self._config, *parts, doing=doing, now=self._now())

    async def past(self, doing: str) -> None:
        """Wait, under the caller's deadline, until the beginning does something else."""
        while (now := self.beginning()) is not None and now.doing == doing:
            await self._progress.wait("run")

    async def all_nodes_left(self) -> None:
        """Wait, under the caller's deadline, until every node has taken note of the end and closed its connection."""
        await self._progress.until("run", lambda: self._nodes.deserted)

    # -- requests ----------------------------------------------------------------------------------------------------

    async def handle(self, request: Request[ReplyT]) -> ReplyT:
        """Answer one request of the protocol."""
        return answered(request, await self._answer(request))

    async def _answer(self, request: msgspec.Struct) -> msgspec.Struct:
        match request:
            case p.LeaseRequest():
                return await self._work.lease(request)
            case p.ClaimRequest():
                return self._work.claims_of(request)
            case p.DeliverRequest():
                return await self._work.deliver(request)
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
                self._progress.refuse_at_end()
                return self._members.about(request, self._progress.version, ending=self._ending)
            case p.JoinRequest():
                return self._join(request)
            case p.DrainRequest():
                self._members.may_leave(request.node)
                self._nodes.send_off(request.node)
            case p.Leave():
                self._nodes.leaves(request)
            case p.RanksRequest():
                return await self._trainers.ranks_of(request)
            case p.Interrupt():
                self._observer.note(f"{request.reason}: {self.interrupt() or 'the run is over'}")
            case p.Fatal():
                await self._trainers.failed(request, lambda: self._waited_for(self._stage()))
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

    @property
    def _ending(self) -> bool:
        """Whether nobody needs another node: the evaluation of the last version may still do."""
        progress = self._progress
        return progress.done or progress.stopping == "interrupted"

    def _join(self, request: p.JoinRequest) -> p.JoinReply:
        if self._ending:
            return p.JoinReply(None, 0)
        self._progress.refuse_at_end()
        reply = self._members.join(request)
        assert reply.node is not None, "None only stands for the end of a run"
        engines = f"{request.engines} engine{'s' if request.engines > 1 else ''}"
        self._observer.note(f"node {reply.node} joins with {engines}")
        return reply

    @property
    def joined(self) -> list[int]:
        """The nodes that have come by themselves, and live."""
        return self._members.joined

    def peer_lost(self, name: str) -> None:
        """A connection ended. A node's leases go back; of a trainer rank, one of the newest incarnation, it is the end.

        Not if it has said goodbye.
        """
        kind, _, number = name.partition("-")
        if kind == "trainer":
            self._trainers.lost(int(number))
        if kind == "node":
            self._nodes.left(int(number))
            self._members.left(int(number))
