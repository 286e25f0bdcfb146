"""The hub keeps the state of a run's samples and progress. It answers nodes and trainer ranks through its parts.

Parts: `NodeWork` (leases, results), `Nodes` and `WeightVersions` (nodes and their engines), `TrainerRanks` (ranks and
their restarts), `TrainingSteps` (batches, commits, versions) and `RunStages` (the stage that the run waits for).

The path of a request: `flash.transport.server` gives it to `flash.hub.gate.Gate.handle`. The gate checks that the peer
may send the request and calls `Hub.handle`. The hub passes requests for leases and results to `NodeWork`, and requests
for batches and commits to `TrainingSteps`.

Lifecycle: the trainer ranks publish the first version of the weights. The hub gives out leases (a lease assigns one
task to one node) and batches until the last step is committed or the run is interrupted. The untrained policy is
evaluated before the first lease of a training task, and the trained policy after the last step. After an interrupt
there is no last evaluation. The trainer ranks leave after the last evaluation, because engines may need the weights
until then. Last, the nodes are notified that the run is over.

The methods of the hub and of its parts run in the tasks of their callers. `Hub.run` watches the deadline of each stage
of the run, and does the work that no request waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import anyio
import msgspec

from flash.config.tree import Config
from flash.errors import ContractError, DeadlineError
from flash.hub import protocol as p
from flash.hub.context import DEFAULT_LIMITS, HubContext, RunEnd, RunProgress, SliceLimits
from flash.hub.fleet import NO_ORIGIN, Fleet, NodeRegistry, RunOrigin
from flash.hub.metrics import StepMetrics, sample_flow
from flash.hub.nodes import Nodes, WeightVersions
from flash.hub.recovery import NEW_RUN, NO_PERSISTENCE, Persistence, RecoveredState, TrainerStart
from flash.hub.stages import RunStages, Stage
from flash.hub.steps import TrainingSteps
from flash.hub.trainers import TrainerRanks
from flash.hub.work import NodeWork
from flash.observe.cluster import MOST_LEASES, HubNow, LeaseNow
from flash.observe.observer import Observer
from flash.samples.buffer import SampleBuffer
from flash.samples.evaluation import Evaluations
from flash.samples.rules import ONE_KIND, AgeContract, BufferRules, ProblemKinds
from flash.samples.tasks import TaskSource
from flash.transport.frames import ReplyT, Request, check_reply
from flash.waiting import deadline, unwrapped_group

LEASE_BITS = 40
"""Bits of a lease's number that count the leases of one hub process; enough for 10¹² leases. The higher bits are the
number of the hub, so that no two leases of a run have the same number."""
INCARNATION_BITS = 20
"""Bits of an incarnation's number that count the incarnations of the trainer ranks under one hub process; enough for a
million restarts. The higher bits are the number of the hub, so that no two incarnations have the same number."""


class Hub:
    """Answers the nodes and the trainer ranks of a run.

    Some attributes are public for the owner of the run, for tests and for benchmarks: `progress`, `buffer` and
    `samples` (the training samples), `registry` (the nodes), `work`, `incarnations` (of the trainer ranks) and
    `stages`.

    Args:
        config: the configuration of the run.
        observer: receives every row of metrics, every note and every failure of the run.
        now: returns Unix seconds, on the loop's clock.
        problems: the kind of each problem of the environment, and the settings of its domains (kinds with limits of
            their own).
        recovered: the state that the previous hub processes have left.
        persistence: the functions and files that save the state which must survive a restart.
        origin: the place where the run was started, for nodes that join.
        limits: limits on the work that the hub does at once, before it serves other tasks.
    """

    def __init__(
        self,
        config: Config,
        observer: Observer,
        *,
        now: Callable[[], float],
        problems: ProblemKinds = ONE_KIND,
        recovered: RecoveredState = NEW_RUN,
        persistence: Persistence = NO_PERSISTENCE,
        origin: RunOrigin = NO_ORIGIN,
        limits: SliceLimits = DEFAULT_LIMITS,
    ) -> None:
        self._config = config
        self._observer = observer
        self._now = now
        state = recovered.state  # None in a new run
        version = state.version if state is not None else 0
        # The contract bounds how far sampling may be ahead of training. The rules have all other settings of samples.
        contract, rules = AgeContract.of(config), BufferRules.of(config, problems.domains)
        samplings = rules.samplings()  # the sampling settings of each kind of problem
        lease_ids = count(recovered.hub_number << LEASE_BITS)
        self.buffer = SampleBuffer(
            contract,
            TaskSource(
                run_seed=config.run.seed,
                members=rules.sizes(config.rollout.group_size),
                kind_of=problems.kind_of,
                cursor=state.buffer.cursor if state is not None else None,
                samplings=samplings,
            ),
            rules,
            step=version,
            state=state.buffer if state is not None else None,
            lease_ids=lease_ids,
            members_per_slice=limits.members,
            journal=persistence.journal,
        )
        self.samples = self.buffer.samples
        self._evaluations = Evaluations(
            config.eval,
            retries=config.rollout.retries,
            first_version=version,
            steps=config.run.steps,
            kind_of=problems.kind_of,
            samplings=samplings,
            lease_ids=lease_ids,
            evaluated=recovered.evaluated,
        )
        # The engines of nodes that have outlived an earlier hub have a version also if that hub has left no state.
        has_begun = state is not None or recovered.hub_number > 1
        # Under the previous hub, engines had a version for each batch that was formed, at most.
        newest_before = self.samples.admission.next_step if has_begun else -1
        self.progress = RunProgress(version, newest=version if has_begun else -1, newest_before=newest_before)
        self._metrics = StepMetrics(self.samples)
        context = HubContext(
            config,
            observer,
            now,
            progress=self.progress,
            contract=contract,
            buffer=self.buffer,
            evaluations=self._evaluations,
            persistence=persistence,
            metrics=self._metrics,
            fleet=Fleet(),
        )
        self.registry = NodeRegistry(config, origin)
        self.work = NodeWork(context)
        self._nodes = Nodes(context, self.registry, self.work)
        self._versions = WeightVersions(context, self.work)
        start = recovered.start or TrainerStart(version, "")
        self._trainers = TrainerRanks(context, start, (recovered.hub_number << INCARNATION_BITS) + 1)
        self.incarnations = self._trainers.incarnations
        self._steps = TrainingSteps(context, self.work, self._versions, self._trainers, limits.part_bytes)
        self.stages = RunStages(context, self.registry, self.incarnations, self._steps)

    @property
    def late_restarts(self) -> dict[str, int]:
        """Numbers of restarts of engines and of trainer ranks since the last step, by their names in the metrics.

        When the run ends, no further row of a step will have these restarts. So the summary of the run adds them.
        """
        return self._metrics.restarts

    def interrupt(self) -> str:
        """Interrupt the run. If the trainer ranks have a batch, or a batch is being formed, the ranks still train this
        step.

        No other step begins. The run does not wait for a running evaluation, and no last evaluation begins. The ranks
        write a checkpoint of the run's version, unless they have written this checkpoint already. The run may end
        without a new checkpoint in three cases: the ranks are only starting, they train earlier steps again after a
        restart, or they have made an update in a step that is given up. Work that is not done within
        `deadlines.shutdown` is given up.

        Returns a phrase for the work that the run still has to do before it ends, such as `writing a checkpoint of
        version 7`. The phrase is empty if the run was already over. A second call changes nothing and returns the
        phrase for the work that is left then.
        """
        over = self.progress.done or self.progress.error is not None
        self.progress.interrupt()
        return "" if over else self.stages.last_work

    # -- the run -----------------------------------------------------------------------------------------------------

    async def run(self) -> RunEnd:
        """Watch the run from its first version until the last trainer rank has left. Raises the error that ended it.

        Waits until each stage of the run has ended, under the deadline of the stage. `RunProgress.send("run")` wakes
        it. If a stage exceeds its deadline, it ends the *incarnation* or the run. An incarnation is the set of trainer
        ranks that run from one restart of the ranks to the next. This method also runs the tasks that watch nodes and
        ranks, and that do postponed work. A further task ends the time in which nodes may claim leases of the previous
        hub process. At the end this method lets all peers leave, and checks that every sample is accounted for.
        """
        progress = self.progress
        async with unwrapped_group() as tasks:
            tasks.start_soon(self._nodes.watch)
            tasks.start_soon(self._trainers.watch)
            tasks.start_soon(self.work.work_off_backlog)
            tasks.start_soon(self.work.expire_claims)
            unfinished = await self._watch_stages()
            tasks.cancel_scope.cancel()
        progress.end()
        self.samples.check()
        return RunEnd(progress.stopping or "finished", progress.version, self.samples.totals(), unfinished)

    async def _watch_stages(self) -> str:
        """Wait until the run needs no trainer rank any more. Each stage of the run must end before its deadline.

        Returns a phrase for the work that did not end in time after an interrupt; empty if all work ended. Raises
        DeadlineError if a stage has exceeded its deadline, and a restart of the ranks cannot help.
        """
        while not self._trainers.done:
            ended, stage = self.progress.stages_ended, self.stages.now
            seconds = stage.seconds(self._config)
            with anyio.move_on_after(seconds) as scope:
                # A stage may follow one of the same kind, so the counter of ended stages is compared, too. All the time
                # after an interrupt is one stage, even if a step and a publication end in it.
                await self.progress.until(
                    "run",
                    lambda ended=ended, stage=stage: (
                        (self.progress.stages_ended != ended and stage is not Stage.ENDING)
                        or self.stages.now is not stage
                        or self._trainers.done
                    ),
                )
            if not scope.cancelled_caught:  # the stage has ended in time
                continue
            if stage is Stage.ENDING:
                # No error is raised: after an interrupt the run has to end, even if some work is left.
                return self.stages.last_work
            waited_for = self.stages.describe(stage)
            if stage.of_trainers and self.incarnations.present:
                # This ends the incarnation of the ranks. The run ends only if the ranks cannot start again.
                self._trainers.deadline_exceeded(
                    f"the run has waited {seconds:g} s (deadlines.{stage.deadline}) for {waited_for}"
                )
            else:
                raise DeadlineError(waited_for, seconds, stage.look_at)
        return ""

    async def all_nodes_left(self) -> None:
        """Wait until every node was notified that the run is over and has closed its connection. Sets no deadline.

        The owner calls this after `run`, before it closes the hub's port.
        """
        await self.progress.until("run", lambda: self._nodes.all_left)

    def overview(self) -> HubNow:
        """Describe the whole cluster at this moment, for people.

        The description grows with the size of the cluster, but not with the number of leases, because it has only the
        `MOST_LEASES` oldest leases.
        """
        node_of = self._config.cluster.node_of
        oldest = ((node, lease.task, since) for node, lease, since in self.work.holders.oldest(MOST_LEASES))
        return HubNow(
            at=self._now(),
            doing=self.stages.describe(self.stages.now),
            version=self.progress.version,
            published=self.progress.published_version,
            nodes=self._nodes.overview({node_of(rank) for rank in self.incarnations.present}),
            ranks=self._trainers.overview(),
            trainer_restarts=self.incarnations.restarts,
            flow=sample_flow(self._config, self.samples, self._evaluations),
            leases=[
                LeaseNow(node, task.group_id, task.sample_index, task.split, task.attempt, since)
                for node, task, since in oldest
            ],
        )

    # -- requests ----------------------------------------------------------------------------------------------------

    async def handle(self, request: Request[ReplyT]) -> ReplyT:
        """Answer one request of the protocol.

        Raises the error of the part of the hub that refuses the request. A request that waits when the run fails raises
        the error of the run.

        `Gate.handle` calls this for peers with a connection, and `InProcessCaller` for peers in the hub's process.
        """
        return check_reply(request, await self._answer(request))

    async def _answer(self, request: Request[Any]) -> msgspec.Struct:
        """Call the part of the hub that answers a request.

        A request for which no part returns a reply is answered with an `Ack`.

        Raises:
            IncarnationOverError: the incarnation of the trainer rank that sent the request has ended meanwhile.
            ContractError: the hub serves no such request.
            FlashError: the part refuses the request, or the run has failed meanwhile.
        """
        match request:
            case p.LeaseRequest():
                return await self.work.lease(request)
            case p.DeliverRequest():
                return await self.work.deliver(request)
            case p.ClaimRequest():
                return self.work.claim(request)
            case p.CancelRequest():
                return await self._nodes.cancels(request)
            case p.VersionRequest():
                return await self._versions.newer(request)
            case p.LoadFailed():
                return await self._versions.load_failed(request)
            case p.EngineReport():
                return self._versions.report_engines(request)
            case p.StatusReport():
                self._nodes.report_status(request)
            case p.RunRequest():
                self.progress.refuse_if_failed()
                return self.registry.describe_run(request, self.progress.version, ending=self.progress.ending)
            case p.JoinRequest():
                return self._nodes.join(request)
            case p.DrainRequest():
                self._nodes.ask_to_leave(request.node)
            case p.Leave():
                self._nodes.leave(request)
            case p.RanksRequest():
                return await self._trainers.processes_of_node(request)
            case p.Interrupt():
                self._observer.note(f"{request.reason}: {self.interrupt() or 'the run is over'}")
            case p.Fatal():
                await self._trainers.fatal(request, lambda: self.stages.describe(self.stages.now))
                # The peer must not get a reply: the end of its connection shows it that the error was reported. So
                # wait until its call has timed out; the Ack below then reaches nobody.
                await anyio.sleep(self._config.deadlines.request)
            case p.RankRequest() | p.FirstRankRequest():
                # The work for a rank must not go on after its incarnation: the next incarnation begins with a clean
                # state.
                with self._trainers.within_incarnation():
                    return await self._answer_rank(request)
            case _:
                raise ContractError(f"the hub does not serve a {type(request).__name__}")
        return p.Ack()

    async def _answer_rank(self, request: Request[Any]) -> msgspec.Struct:
        """Call the part of the hub that answers a request of a trainer rank. If it returns no reply, return an `Ack`.

        Raises the errors that `_answer` names.
        """
        match request:
            case p.IncarnationRequest():
                return await self._trainers.start(request)
            case p.RankHeartbeat():
                await self._trainers.heartbeat(request)
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
        """Handle the end of a peer's connection. `name` is the kind and the number of the peer, such as `node-3`.

        `Gate.left` calls this, but not for ranks of an incarnation that is over. The tasks that a lost node had leased
        are queued again. The loss of a trainer rank ends its incarnation, or the run if the ranks cannot start again.
        After the first rank has left normally, the loss of a rank ends neither. The hub keeps no state for the other
        kinds, guests (processes that have not joined yet) and messengers (launchers), so their ends change nothing.
        """
        kind, _, number = name.partition("-")
        if kind == "trainer":
            self._trainers.disconnected(int(number))
        if kind == "node":
            self._nodes.disconnected(int(number))


class InProcessCaller:
    """Connection of a peer in the hub's own process. This connection uses no network, but sets the same deadlines.

    Simulations and commands that only sample use it. In a training run all peers, also the hub's own node, use TCP.

    Args:
        hub: the hub that answers the requests.
        watch: called with each request and its reply; None if nobody watches.
    """

    def __init__(self, hub: Hub, watch: Callable[[msgspec.Struct, msgspec.Struct], None] | None = None) -> None:
        self._hub = hub
        self._watch = watch

    async def call(self, request: Request[ReplyT], timeout: float) -> ReplyT:
        """Send one request and wait for its reply.

        Raises DeadlineError after `timeout` seconds, and the error with which the hub refuses the request.
        """
        with deadline(timeout, f"the reply to {type(request).__name__}", "the hub of this process"):
            reply = await self._hub.handle(request)
        if self._watch is not None:
            self._watch(request, reply)
        return reply
