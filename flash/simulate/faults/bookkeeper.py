"""Bookkeeper: keeps accounts of a simulated run from its messages and files alone, and checks the laws of a run.

The cluster reports each message as its receiver sees it, each fault, and each end of a process. The bookkeeper never
reads counters of the code that it checks. At the first law that is broken it raises `BrokenLaw`, which ends the
simulation. All methods are called on the simulation's event loop, and none of them waits.

- A *law* is a sentence that holds in every run, for example that no sample is trained twice.
- A *lease* gives a task, which asks for one sample, to a node. The *result* of a lease is a sample or a failure.
- Step n trains *version* n of the weights, and makes version n + 1. Its batch may reach the ranks in several *rounds*.
  A sample is *dealt* once a rank has received it. The *commit* of a step reports that it was trained.
- The *history* of a run is the steps that count: a run that goes back to an earlier version does the later steps again.
  It may go back only for a reason in the drawn scenario (`_may_forget`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from flash.config.tree import Config
from flash.errors import FlashError
from flash.hub import protocol as p
from flash.observe.rundir.rundir import RunDirectory
from flash.simulate.faults.scenario import Fault, Kind
from flash.transport.frames import Request
from flash.types import Failure, Lease, Trajectory

RECOVERY_S: dict[Kind, float] = {
    "crash hub": 60.0,
    "lose machine of hub": 120.0,
    "crash node": 60.0,
    "lose machine of node": 120.0,
    "crash rank": 60.0,
    "hang hub": 130.0,
    "hang node": 100.0,
    "hang rank": 100.0,
    "slow network": 40.0,
    "full disk": 60.0,
    "slow disk": 40.0,
    "engine dies": 90.0,
    "engines refuse to start": 150.0,
    "engine hangs": 120.0,
    "engines are slow": 60.0,
    "environments raise": 60.0,
    "environments hang": 60.0,
    "lose connection": 100.0,
    "cut one way": 130.0,
    "cut both ways": 130.0,
    "join": 30.0,
    "drain": 60.0,
    "drain slowly": 100.0,
    "interrupt": 60.0,
}
"""Seconds after the end of a fault in which the run may still be disturbed by it. They follow from the deadlines of
`scenario.BASE`: a hub that hangs is restarted after 60 s, a dead connection is noticed after 60 s."""
PROCESS_FAULTS: frozenset[Kind] = frozenset(
    kind for kind in RECOVERY_S if kind not in ("join", "slow disk", "environments raise", "environments hang")
)
"""Kinds of faults that may end a connection or process, or delay a message. They explain a request that fails."""
ENGINE_FAULTS: frozenset[Kind] = frozenset(
    {"engines refuse to start", "engine dies", "engine hangs", "engines are slow"}
)
"""Kinds of faults of engines. Each of them ends with the death of an engine, also `engines are slow`: only an engine
that starts is slow or refuses to start."""
CONNECTION_FAULTS: frozenset[Kind] = frozenset(
    {
        *("lose connection", "cut one way", "cut both ways", "slow network", "drain slowly"),
        *("hang hub", "crash hub", "lose machine of hub"),
    }
)
"""Kinds of faults by which a process loses its hub, or node 0 its connection to it."""
RANK_FAULTS: frozenset[Kind] = frozenset({"crash rank", "hang rank"})
"""Kinds of faults that end an incarnation of the ranks. No fault of a node may end a hub."""
HANGS_OF_NODES: frozenset[Kind] = frozenset({"hang node"})
"""Kinds of faults by which a node stops for a while. When it goes on after a longer stop, it has missed deadlines."""
EXPLAINED: dict[str, frozenset[Kind]] = {
    "RunDirectoryError": frozenset({"full disk", "lose machine of hub"}),
    "CheckpointError": frozenset({"full disk", "lose machine of hub"}),
    "EngineError": ENGINE_FAULTS,
    "EngineDeadError": ENGINE_FAULTS,
    "PeerLostError": CONNECTION_FAULTS | RANK_FAULTS,
    "DeadlineError": CONNECTION_FAULTS | RANK_FAULTS | ENGINE_FAULTS | HANGS_OF_NODES,
    "CollectiveError": CONNECTION_FAULTS | RANK_FAULTS,
}
"""Kinds of faults that explain each error with which a process may end, by the name of the error's class. No fault
explains any other error."""
STALLED_S = 75.0
"""Seconds without a step after which a run counts as stalled while one of its nodes hangs. A node that hangs loses its
leases after 20 s, and no drawn step takes as long as the rest."""
SLOWER, MARGIN_S = 2.0, 40.0
"""Factor and seconds by which a run may take longer after its last fault than a whole run without faults."""


class BrokenLaw(Exception):
    """A law of a run that a simulation has broken. The text is the law, with the numbers that break it after a colon.

    If it ends a process, the launcher of the process reports that end, and the bookkeeper raises the same law there. So
    the simulation ends in any case.
    """


class Delivered(NamedTuple):
    """Contents of a finished sample. A sample is the same at every place of its road if its contents are equal."""

    tokens: bytes
    """Token ids, as int32."""
    versions: tuple[tuple[int, int], ...]
    """Policy version and number of tokens of each run of consecutive tokens that one version sampled."""


class Bookkeeper:
    """Accounts of one simulated run, over all of its hubs and launches.

    Args:
        now: the virtual clock, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.events: list[dict[str, Any]] = []
        """Trace of the run: everything that has happened, in order (`event`). It has no times or addresses of the real
        machine, so that a seed gives the same trace everywhere."""
        self.broken: str | None = None
        """First law that was broken; None if all hold."""
        self.befallen: list[tuple[Fault, float]] = []
        """Faults that have happened, each with the time at which it ends, in seconds of the virtual clock."""
        self._config: Config | None = None
        """Configuration of the newest hub; None before the first hub."""
        self._life = 0
        """Number of hubs that have begun, which is also the number of the newest one."""
        self._forgot = 0
        """Number of the newest hub that may have lost results of the hubs before it; 0 before the first hub."""
        self._kept_by: dict[int, int] = {}
        """Number of the newest hub that has acknowledged a result, by number of the result's lease."""
        self._machine_lost = False
        """True if the machine of the hub has failed since the last hub began."""
        self._delivered: dict[int, set[Delivered]] = {}
        """Contents of all samples that nodes have sent, by training task. A task may be sampled several times."""
        self._acknowledged: dict[int, Trajectory] = {}
        """Finished samples whose delivery the hub has acknowledged, by training task, in this history."""
        self._sent_tokens: dict[int, int] = {}
        """Number of tokens that were sampled for each training lease whose result a node has sent, by the lease."""
        self._acknowledged_tokens: dict[int, int] = {}
        """Number of tokens of each training lease whose result the hub has acknowledged, by the lease."""
        self._leased: dict[int, tuple[str, Lease]] = {}
        """Process and lease of each training task that is leased, by task. The process is empty until it has received
        the lease."""
        self._tasks: set[int] = set()
        """Training tasks that were ever leased."""
        self._incarnations: dict[str, int] = {}
        """Number of the newest incarnation of each rank, by the name of its process. An incarnation is all ranks
        between two of their restarts."""
        self._shards: dict[tuple[int, int], dict[int, tuple[Trajectory, int]]] = {}
        """Samples that the ranks have received, with the oldest version of their step, by incarnation and step, then by
        task. A hub that is lost before a batch is whole leaves its groups to the next hub."""
        self._dealt: dict[int, dict[int, Delivered]] = {}
        """Samples that ranks have received of each step whose batch was whole then, by step and task. Every later hub
        has to keep them."""
        self.committed: dict[int, dict[int, tuple[Trajectory, int]]] = {}
        """Samples of each step of the history whose commit was acknowledged, with the oldest version that the step
        trains, by step and task."""
        self._stepped_at = -math.inf
        """Time at which the last commit was acknowledged; -inf if there was none."""
        self._newest = -1
        """Newest step that was ever in the history, also if its row was lost, so that it is trained again."""
        self._published = -1
        """Newest version that rank 0 has announced to a hub in this history; -1 if there is none."""
        self._engines: dict[str, dict[int, int]] = {}
        """Version of each engine, by node process and number of the engine, from the last report that it has sent."""
        self._left: dict[int, float] = {}
        """Time at which the hub has answered the `Leave` of a node, by the node's number at this hub."""

    # -- events --------------------------------------------------------------------------------------------------------

    def event(self, what: str, **facts: Any) -> None:
        """Add an event to the trace: its kind `what` and its `facts`, which must be the same on every machine."""
        self.events.append({"at": round(self._now(), 6), "what": what, **facts})

    def require(self, holds: bool, law: str) -> None:
        """Raise BrokenLaw unless a law holds. `law` is its text, with the numbers that may break it after a colon.

        The error always names the first law that was broken, since later ones may only follow from it.
        """
        if not holds:
            if self.broken is None:
                self.broken = law
                self.event("broken", law=law)
            raise BrokenLaw(self.broken)

    def befalls(self, fault: Fault, until: float, whom: str) -> None:
        """Record a fault that happens now.

        `until` is the time at which it ends. `whom` names the process or machine that it befalls.
        """
        self.befallen.append((fault, until))
        self.event("fault", kind=fault.kind, whom=whom, until=round(until, 3))

    def prolong(self, fault: Fault, until: float) -> None:
        """Record that a fault that was reported to `befalls` lasts until `until`, unless it lasts longer already."""
        self.befallen = [(each, max(end, until) if each is fault else end) for each, end in self.befallen]

    def _disturbed(self, kinds: frozenset[Kind] | None = None) -> bool:
        """Return True if a fault of these kinds may still disturb the run. None: of any kind.

        A fault disturbs the run until RECOVERY_S after its end.
        """
        return any(
            self._now() <= until + RECOVERY_S[fault.kind]
            for fault, until in self.befallen
            if kinds is None or fault.kind in kinds
        )

    @property
    def disturbed_until(self) -> float:
        """Time from which on no fault of those that have happened disturbs the run any more; 0 if none has happened."""
        return max((until + RECOVERY_S[fault.kind] for fault, until in self.befallen), default=0.0)

    @property
    def kinds(self) -> dict[str, int]:
        """Number of faults that have happened, by kind."""
        return dict(Counter(fault.kind for fault, _ in self.befallen))

    @property
    def _undisturbed(self) -> bool:
        """True if no fault at all has happened. Some laws hold only then."""
        return not self.befallen

    # -- hubs and launches ---------------------------------------------------------------------------------------------

    def machine_failed(self) -> None:
        """Record that the hub's machine has failed, so that writes may be lost that were not forced to its disk."""
        self._machine_lost = True

    def _may_forget(self, config: Config, *, changed: bool) -> bool:
        """Return True if a hub that starts may have lost results and batches which an earlier hub has acknowledged.

        `config` is the configuration of the hub that starts, and `changed` is True if the hub before it had another
        one. Then recorded batches are not trained again. After a full disk the journal may have gaps. Without a journal
        or without recorded batches, a hub has only the checkpoint.
        """
        disk = any(fault.kind == "full disk" for fault, _ in self.befallen)
        return (
            changed
            or disk
            or (self._machine_lost and config.checkpoint.journal != "fsync")
            or config.checkpoint.journal == "off"
            or config.checkpoint.batches == "none"
        )

    def hub_begins(self, config: Config, version: int, notes: list[str]) -> None:
        """Check the version from which a hub starts to serve, and forget the steps that this hub does again.

        Args:
            config: configuration of the hub.
            version: version from which the run goes on.
            notes: messages of the hub's recovery for people. Only their number is recorded.
        """
        changed = self._config is not None and _rules(config) != _rules(self._config)
        self._life += 1
        self.event("hub", life=self._life, version=version, notes=len(notes))
        reached = max(self.committed, default=-1) + 1
        forgets = self._may_forget(config, changed=changed)
        # Rows of metrics are not forced to the disk before the next checkpoint. A step without a row is trained again,
        # but on the same batch: with `fsync` the journal has it.
        self.require(
            version >= reached or forgets or self._machine_lost,
            f"nothing acknowledged is lost: the hub starts at version {version}, and step {reached - 1} was committed",
        )
        for step in [each for each in self.committed if each >= version]:
            # The step is trained again, on the same samples unless the hub may have lost them (below).
            samples = self.committed.pop(step)
            self._dealt[step] = {number: _contents(trajectory) for number, (trajectory, _) in samples.items()}
        if version < reached:
            self._published = min(self._published, version)
        if forgets or self._life == 1:
            self._forgot = self._life
            # Samples may be sampled again, and the steps from `version` on may get other batches.
            self._dealt = {step: dealt for step, dealt in self._dealt.items() if step < version}
            self._acknowledged.clear()
            self._acknowledged_tokens.clear()
            self._published = min(self._published, version)
            self._newest = min(self._newest, version - 1)
        self._config = config
        self._machine_lost = False
        self._left.clear()  # the next hub numbers its nodes anew
        # A joined node may take its leases to the next hub. Node 0 has ended with the hub, whose process it shares.
        self._leased = {task: held for task, held in self._leased.items() if held[0] not in ("", "hub")}

    def hub_ended(self, error: BaseException | None, *, killed: bool) -> None:
        """Check that the end of the hub's process is explained by a fault.

        `error` is the error with which it has ended; None if it has ended in order or was `killed`. A kill needs no
        explanation: only faults and the launcher kill.
        """
        name = "killed" if killed else type(error).__name__ if error is not None else ""
        self.event("hub ended", error=name)
        if error is not None:
            self._check_explained(error)

    def _check_explained(self, error: BaseException) -> None:
        """Check that an error is one of Flash's own, and that a fault explains it which may still disturb the run."""
        name = type(error).__name__
        self.require(isinstance(error, FlashError), f"no error but our own ends a process: {name}: {error}")
        self.require(
            self._disturbed(EXPLAINED.get(name, frozenset())),
            f"every error has a cause: {name}: {_plain(str(error))}",
        )

    def process_failed(self, name: str, error: BaseException) -> None:
        """Check that a fault explains the error with which a node or a rank has ended. `name` names its process."""
        self.event("process failed", name=name, error=type(error).__name__)
        self._check_explained(error)

    # -- messages ------------------------------------------------------------------------------------------------------

    def sent(self, process: str, request: Request[Any]) -> None:
        """Record a request that the process with the name `process` is about to send. It may never arrive."""
        match request:
            case p.DeliverRequest():
                for ended in request.ended:
                    self._note_result(ended)
            case p.PublishRequest():
                self._published = max(self._published, request.published.version)
            case p.EngineReport():
                self._engines[process] = {engine.index: engine.version for engine in request.engines}
            case _:
                pass

    def _note_result(self, ended: p.EndedLease) -> None:
        """Record the result of a training lease that a node is about to send, and check the versions of its tokens.

        A node sends a result again if the hub was lost before it has acknowledged the result.
        """
        result = ended.result
        if result.task.split == "train":
            self._sent_tokens[ended.lease_id] = result.sampled_tokens
            held = self._leased.get(result.task.task_id)
            # From here on the hub may lease a task again that has failed. A lease with another number is a newer one.
            if held is not None and held[1].lease_id == ended.lease_id:
                del self._leased[result.task.task_id]
                self._check_versions(result, held[1])
            if isinstance(result, Trajectory):
                self._delivered.setdefault(result.task.task_id, set()).add(_contents(result))

    def _check_versions(self, result: Trajectory | Failure, lease: Lease) -> None:
        """Check that no token of a sample is of an older version than its lease allows. Failures have no tokens."""
        if isinstance(result, Trajectory):
            oldest = min(run.version for run in result.versions)
            self.require(
                oldest >= lease.min_version, f"no token is older than its lease allows: {oldest} < {lease.min_version}"
            )

    def failed(self, process: str, request: Request[Any], error: Exception, *, over: bool) -> None:
        """Check that a fault explains the failure of a request, and record it.

        `error` is the error that the process with the name `process` got instead of a reply. `over` is True while the
        launch ends; then connections end without a fault.
        """
        self.event("failed", process=process, request=type(request).__name__, error=type(error).__name__)
        if not over:
            self.require(
                self._disturbed(PROCESS_FAULTS),
                f"the hub answers every request: {process}, {type(request).__name__}: {_plain(str(error))}",
            )

    def answered(self, process: str, request: Request[Any], reply: msgspec.Struct) -> None:
        """Record the reply that a process has received to its request, and check samples, commits and versions.

        `process` is the name of the process. Empty replies of long polls, and replies that come at regular intervals,
        are left out of the trace.
        """
        facts: dict[str, Any] = {}
        match request, reply:
            case p.LeaseRequest(), p.LeaseReply():
                facts["leases"] = [lease.lease_id for lease in reply.leases]
                for lease in reply.leases:
                    # If the reply arrives late, the hub may have leased the task to another node meanwhile.
                    if (held := self._leased.get(lease.task.task_id)) is not None and held[1] == lease:
                        self._leased[lease.task.task_id] = process, lease
            case p.DeliverRequest(), _:
                facts["ended"] = [[each.lease_id, str(each.result.outcome)] for each in request.ended]
                for ended in request.ended:
                    self._acknowledge(ended)
            case p.BatchRequest(), p.BatchReply():
                facts |= {"step": request.step, "round": request.round, "end": reply.shard is None}
                if reply.shard is not None:
                    self._check_shard(self._incarnations.get(process, 0), request, reply)
            case p.Commit(), _:
                facts["step"] = request.step
                self._check_commit(self._incarnations.get(process, 0), request.step)
            case p.IncarnationRequest(), p.IncarnationReply():
                self._incarnations[process] = reply.number
            case p.VersionRequest(), p.VersionReply():
                if reply.published is not None:
                    facts["version"] = reply.published.version
                elif not reply.done:
                    return  # an empty long poll
            case p.PublishRequest(), _:
                facts["version"] = request.published.version
                self._check_publication(request.published.version)
            case p.EngineReport(), _:
                facts["versions"] = [engine.version for engine in request.engines]
            case p.CancelRequest(), p.CancelReply():
                if not (reply.lease_ids or reply.done or reply.leave):
                    return  # an empty long poll
            case p.RankHeartbeat() | p.RanksRequest(), _:
                return
            case _:
                pass
        self.event("answered", process=process, request=type(request).__name__, **facts)

    def replied(self, request: Request[Any], reply: msgspec.Struct) -> None:
        """Check a reply that the hub is about to send: announced versions, and leases. It may never arrive."""
        match request, reply:
            case p.DeliverRequest(), _:
                self._kept_by |= {ended.lease_id: self._life for ended in request.ended}
            case p.VersionRequest(), p.VersionReply(published=published) if published is not None:
                # A process may receive a reply when its hub is dead and the next one has begun with fewer versions.
                self.require(
                    published.version <= self._published,
                    f"no version is announced before it is published: {published.version}",
                )
            case p.Leave(), _:
                self._left[request.node] = self._now()
            case p.JoinRequest(), p.JoinReply(node=int() as node):
                self._left.pop(node, None)
            case p.LeaseRequest(), p.LeaseReply():
                # At the moment of `Leave` the hub may have granted leases that it has not sent yet.
                in_time = self._now() <= self._left.get(request.node, math.inf)
                self.require(in_time or not reply.leases, f"a node that leaves gets no lease: {request.node}")
                # A process that hangs may receive a lease long after the hub has taken it back.
                for lease in reply.leases:
                    self._check_lease(lease)
            case _:
                pass

    def process_ended(self, name: str) -> None:
        """Forget the engines and leases of a process that has ended, so that its tasks may be leased again."""
        self._engines.pop(name, None)
        self._leased = {task: held for task, held in self._leased.items() if held[0] != name}

    def _check_lease(self, lease: Lease) -> None:
        """Check that the task of a lease may be leased, and record the lease, which the hub is about to send.

        Leases of evaluations are not checked.
        """
        task = lease.task
        if task.split != "train":
            return
        assert self._config is not None
        number = task.task_id
        done = next((step for step, samples in self.committed.items() if number in samples), None)
        self.require(done is None, f"no sample is trained twice: task {number} of step {done} is leased again")
        if (before := self._acknowledged.pop(number, None)) is not None:
            # With `requeue` a sample whose tokens have become too old starts again. `oldest` is the oldest version that
            # the next step trains; a token of that version becomes too old with the step after it.
            oldest = self._newest + 1 - _max_age(self._config)
            stale = self._config.rollout.on_expire == "requeue" and before.oldest_version <= oldest
            self.require(stale, f"nothing acknowledged is lost: task {number} was delivered, and is leased again")
        # With `requeue` a sample that has become too old starts again before its node has reported its end.
        if number in self._leased and self._config.rollout.on_expire != "requeue":
            holder = self._leased[number][0]
            # Before a node has reported the end of a lease, the hub may lease the task again only if it has lost the
            # node.
            self.require(
                bool(self._disturbed(PROCESS_FAULTS)),
                f"a task has one lease: {number} is out at {holder or 'a node'}, and leased again",
            )
        self._leased[number] = "", lease
        self._tasks.add(number)
        self._check_admission()

    def _check_admission(self) -> None:
        """Check that no more tasks were leased than the newest version allows: (n + 1 + α)·B at version n.

        α is the asynchronous ratio, by which sampling may be ahead of training, and B the size of a batch. The bound is
        checked only in runs without faults in which every leased task is trained: no filter drops groups, no extra
        samples are made, and no task fails or starts again (`simulate.fail_stop` is the share of environments that
        hang).
        """
        config = self._config
        assert config is not None
        rollout, train = config.rollout, config.train
        plain = not (rollout.drop_equal_rewards or rollout.accuracy_bounds or rollout.extra_groups)
        assert config.simulate is not None
        plain = plain and not config.simulate.fail_stop
        if plain and rollout.on_expire != "requeue" and not rollout.extra_per_group and self._undisturbed:
            most = (max(self._published, 0) + 1 + train.async_ratio) * train.batch_size
            # A group of which no token is young enough for its step leaves untrained, and another one takes its place.
            step = max(self.committed, default=-1) + 1
            for trajectory in self._acknowledged.values():
                most += max(run.version for run in trajectory.versions) < step - _max_age(config)
            for samples in self.committed.values():
                most += sum(not trajectory.trained_tokens(oldest) for trajectory, oldest in samples.values())
            self.require(
                len(self._tasks) <= most + 1e-6,
                f"at version n at most (n + 1 + α)·B samples were issued: {len(self._tasks)} of {most:g}",
            )

    def _acknowledge(self, ended: p.EndedLease) -> None:
        """Record a training result whose delivery the hub has acknowledged to the node. No later hub may lose it."""
        result = ended.result
        # Over a slow network an acknowledgement can arrive after the next hub has begun, which has not got the result.
        late = self._kept_by.get(ended.lease_id, self._life) < self._forgot
        if result.task.split != "train" or late:
            return
        self._acknowledged_tokens[ended.lease_id] = result.sampled_tokens
        if not isinstance(result, Failure):
            self._acknowledged[result.task.task_id] = result

    def _check_shard(self, incarnation: int, request: p.BatchRequest, reply: p.BatchReply) -> None:
        """Check and record the samples that a rank has received, which are a part of the batch of its step.

        `incarnation` is the number of the rank's incarnation; 0 if it is unknown. When the last round of a step is
        dealt, its batch is whole. From then on the step must have the same samples in every incarnation, and under
        every later hub that has them.
        """
        shard, config = reply.shard, self._config
        assert shard is not None
        assert config is not None
        self.require(shard.step == request.step, "a rank gets the step that it asks for")
        if request.step not in self.committed:
            oldest = request.step - _max_age(config)
            # A run that is resumed after an interrupt may have another age, and still train a batch from before.
            self.require(
                shard.min_version == oldest or self._disturbed(frozenset({"interrupt"})),
                f"no token is older than allowed: step {request.step} trains version {shard.min_version}",
            )
        step = self._shards.setdefault((incarnation, request.step), {})
        for sample in shard.samples:
            trajectory = sample.trajectory
            number = trajectory.task.task_id
            self.require(trajectory.task.split == "train", "no sample of an evaluation is trained")
            self.require(
                _contents(trajectory) in self._delivered.get(number, ()),
                f"the trained tokens are the sampled ones: task {number}",
            )
            newest = max(run.version for run in trajectory.versions)
            self.require(newest <= request.step, f"no token is newer than the trainer: {newest} at step {request.step}")
            step[number] = trajectory, shard.min_version
        if shard.round.last:
            dealt = self._dealt.setdefault(request.step, {})
            for number, (trajectory, _) in step.items():
                contents = _contents(trajectory)
                self.require(
                    dealt.setdefault(number, contents) == contents,
                    f"a step has one batch: sample {number} of step {request.step} was dealt with other tokens before",
                )

    def _check_commit(self, incarnation: int, step: int) -> None:
        """Check a step whose commit was acknowledged, and add it to the history.

        Its samples are those that the ranks of this `incarnation` have received. Training a step of the history again
        is permitted after a restart of the ranks, but only on the same samples.
        """
        samples = self._shards.pop((incarnation, step), {})
        tasks = samples.keys()
        self.require(bool(tasks), f"a step trains samples: {step}")
        gone = sorted(self._dealt.pop(step, {}).keys() - tasks)
        self.require(not gone, f"a step has one batch: samples {gone[:5]} of step {step} were dealt, and are gone")
        for other, earlier in self.committed.items():
            both = sorted(tasks & earlier.keys())
            if other == step:
                self.require(tasks == earlier.keys(), f"a step has one batch: step {step} was trained on another one")
            else:
                self.require(not both, f"no sample is trained twice: tasks {both[:5]} in the steps {other} and {step}")
        self._newest = max(self._newest, step)
        self._stepped_at = self._now()
        self.committed[step] = samples

    def _check_publication(self, version: int) -> None:
        """Check that all engines have `version`, which was just announced, or the version before it.

        Holds only in runs without faults, since a restarted engine or node may be further behind for a while.
        """
        if not self._undisturbed:
            return
        for process, engines in sorted(self._engines.items()):
            for index, held in sorted(engines.items()):
                self.require(
                    held >= version - 1,
                    f"engines are at most one version behind: engine {index} of {process} has {held} at {version}",
                )

    def node_continues(self, process: str, hung_s: float) -> None:
        """Check that the run has made steps while a node hung for `hung_s` seconds. The node goes on now.

        The other nodes must have taken over its tasks. With more than one fault, another one may have stopped the run.
        """
        if len(self.befallen) == 1:
            idle = self._now() - max(self._stepped_at, self._now() - hung_s)
            self.require(idle <= STALLED_S, f"the others do the work of a node that hangs: {process}, {idle:.0f} s")

    def too_late(self, process: str, version: int) -> None:
        """Check that a fault explains why an engine fetches a version that the ranks do not hold any more.

        `process` is the node process of the engine. Ranks drop a version only when all engines have this or a newer
        one, so only an engine that was lost or restarted may want it.
        """
        self.event("too late", process=process, version=version)
        self.require(self._disturbed(PROCESS_FAULTS), f"a version is held until all engines have it: {version}")

    # -- the end -------------------------------------------------------------------------------------------------------

    def check_end(self, config: Config) -> None:
        """Check the rows and totals in the files of a run that has finished. `config` is that of its last launch."""
        directory = RunDirectory(config.run_dir)
        rows = directory.read_metrics()
        steps = [int(row["step"]) for row in rows]
        self.require(
            steps == list(range(config.run.steps)), f"each version is trained on once: metrics.jsonl has steps {steps}"
        )
        evaluated = [int(row["step"]) for row in directory.read_evaluations()]
        self.require(
            len({*evaluated}) == len(evaluated) and config.run.steps in evaluated,
            f"each evaluation is made once, and the last version is evaluated: {evaluated}",
        )
        self._check_ledger(directory.ledger)

    def _check_ledger(self, file: Path) -> None:
        """Check the totals that the hub has written to `file`, by themselves and against the messages.

        They count samples and tokens of training, by their fate.
        """
        ledger: dict[str, int] = msgspec.json.decode(file.read_bytes())
        left = ledger["trained"] + ledger["filtered"] + ledger["given_up"] + ledger["in_flight"]
        self.require(ledger["issued"] == left, f"issued = trained + filtered + given up + in flight: {ledger}")
        self.require(ledger["in_flight"] == 0, f"nothing is in flight at the end: {ledger['in_flight']}")
        tokens = ledger["trained_tokens"] + ledger["discarded_tokens"]
        self.require(ledger["generated_tokens"] == tokens, f"generated = trained + discarded tokens: {ledger}")
        samples = [each for step in self.committed.values() for each in step.values()]
        trained = [trajectory.trained_tokens(oldest) for trajectory, oldest in samples]
        # If the acknowledgement of a commit was lost, the samples of its step are unknown here, and the step is
        # missing.
        if len(self.committed) == max(self.committed, default=-1) + 1:
            own = sum(map(bool, trained)), sum(trained)
            theirs = ledger["trained"], ledger["trained_tokens"]
            self.require(own == theirs, f"trained samples and tokens: {own} by the messages, {theirs} by the ledger")
        # A later hub does not know of results and leases that the hub before it has lost.
        if self._life == 1:
            # A result that was sent, but not acknowledged, may have arrived.
            least, most = sum(self._acknowledged_tokens.values()), sum(self._sent_tokens.values())
            self.require(
                least <= ledger["generated_tokens"] <= most,
                f"generated tokens: {ledger['generated_tokens']}, {least} were acknowledged and {most} sent",
            )
            self.require(len(self._tasks) <= ledger["issued"], "every leased task is issued")


def _contents(trajectory: Trajectory) -> Delivered:
    """Return the contents of a sample: its tokens and their versions."""
    return Delivered(trajectory.token_ids, tuple((run.version, run.count) for run in trajectory.versions))


def _max_age(config: Config) -> int:
    """Return the largest age of a trained token, in versions, by the rule of docs/asynchrony.md.

    The run has this rule, too, but the bookkeeper must not trust the code that it checks. The age is the version that a
    step trains minus the version that sampled the token. Without `train.max_token_age`, the largest age is four times
    the asynchronous ratio, rounded up.
    """
    age = config.train.max_token_age
    # A ratio such as 1.0000000001, which a sum of floats may give, must not be rounded up.
    return 4 * math.ceil(config.train.async_ratio - 1e-9) if age is None else age


def _rules(config: Config) -> Config:
    """Return the configuration without the difference between a new and a resumed run, to compare two hubs."""
    return msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, resume=False))


def _plain(text: str) -> str:
    """Return the first 200 characters of an error message, on one line, for the text of a broken law."""
    return " ".join(text.split())[:200]
