"""Bookkeeper: keeps accounts of a simulated run from its messages and files alone, and checks the laws of a run.

The cluster reports each message as its receiver sees it, each fault, and each end of a process. The bookkeeper never
reads counters of the code that it checks. At the first law that is broken it raises `BrokenLaw`, which ends the
simulation. The *history* of a run is the steps that count: a run that goes back to an earlier version does the later
steps again. It may go back only for a reason in the drawn scenario (`_may_forget`).
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
from flash.simulate.faults.scenario import Fault, Kind, Scenario
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
"""Kinds of faults that end connections or processes, or delay their messages."""
ENGINE_FAULTS: frozenset[Kind] = frozenset(
    {"engines refuse to start", "engine dies", "engine hangs", "engines are slow"}
)
"""Kinds of faults that kill engines."""
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
"""Faults by which a node stops for a while. One that stops for longer than a deadline has missed it when it goes on."""
EXPLAINED: dict[str, frozenset[Kind]] = {
    "RunDirectoryError": frozenset({"full disk", "lose machine of hub"}),
    "CheckpointError": frozenset({"full disk", "lose machine of hub"}),
    "EngineError": ENGINE_FAULTS,
    "EngineDeadError": ENGINE_FAULTS,
    "PeerLostError": CONNECTION_FAULTS | RANK_FAULTS,
    "DeadlineError": CONNECTION_FAULTS | RANK_FAULTS | ENGINE_FAULTS | HANGS_OF_NODES,
    "CollectiveError": CONNECTION_FAULTS | RANK_FAULTS,
}
"""Errors that may end the hub's process or a launch, and the kinds of faults that explain each of them."""
STALLED_S = 75.0
"""Seconds without a step after which a run counts as stalled while one of its nodes hangs. A node that hangs loses its
leases after 20 s, and no drawn step takes as long as the rest."""
SLOWER, MARGIN_S = 2.0, 40.0
"""Factor and seconds by which a run may take longer after its last fault than a whole run without faults."""


class BrokenLaw(Exception):
    """A law of a run that a simulation has broken."""


class Delivered(NamedTuple):
    """A finished sample that a node has sent."""

    tokens: bytes
    versions: tuple[tuple[int, int], ...]


class Bookkeeper:
    """Accounts of one simulated run.

    Args:
        scenario: the scenario that is played.
        now: the virtual clock, in seconds.
    """

    def __init__(self, scenario: Scenario, now: Callable[[], float]) -> None:
        self._scenario = scenario
        self._now = now
        self.events: list[dict[str, Any]] = []
        """Everything that has happened, in order, without anything that differs between machines."""
        self.broken: str | None = None
        """First law that was broken."""
        self.befallen: list[tuple[Fault, float]] = []
        """Faults that have happened, each with the time at which it ends."""
        self._config: Config | None = None
        """Configuration of the newest hub."""
        self._life = 0
        """Number of hubs that have begun."""
        self._forgot = 0
        """Number of the newest hub that may have lost results of the hubs before it."""
        self._kept_by: dict[int, int] = {}
        """Number of the newest hub that has acknowledged a result, by lease."""
        self._machine_lost = False
        """True if the machine of the hub has failed since the last hub began."""
        self._delivered: dict[int, set[Delivered]] = {}
        """Samples that nodes have sent, by training task."""
        self._acknowledged: dict[int, Trajectory] = {}
        """Finished samples whose delivery the hub has acknowledged, by training task, in this history."""
        self._sent_tokens: dict[int, int] = {}
        """Tokens of each training lease whose result a node has sent, by number of the lease."""
        self._acknowledged_tokens: dict[int, int] = {}
        self._leased: dict[int, tuple[str, Lease]] = {}
        """Process and lease of each training task that is out. The process is empty until it has received the lease."""
        self._tasks: set[int] = set()
        """Training tasks that were ever leased."""
        self._incarnations: dict[str, int] = {}
        """Incarnation of each rank process."""
        self._shards: dict[tuple[int, int], dict[int, tuple[Trajectory, int]]] = {}
        """Samples that the ranks have received, with the oldest version of their step, by incarnation and step, then by
        task. A hub that is lost before a batch is whole leaves its groups to the next hub."""
        self._dealt: dict[int, dict[int, Delivered]] = {}
        """Samples that ranks have received of each step whose batch was whole then, by step and task. Every later hub
        has to keep them."""
        self.committed: dict[int, dict[int, tuple[Trajectory, int]]] = {}
        """Samples of each step of the history whose commit was acknowledged."""
        self._counted: dict[int, frozenset[int]] = {}
        """Tasks of each step of the history, also if the acknowledgement of its commit was lost."""
        self._stepped_at = -math.inf
        """Time at which the last commit was acknowledged; -inf if there was none."""
        self._newest = -1
        """Newest step that was ever in the history, also if its row was lost, so that it is trained again."""
        self._published = -1
        """Newest version that rank 0 has sent to a hub in this history."""
        self._engines: dict[str, dict[int, int]] = {}
        """Versions of the engines of each node process, from its last acknowledged report."""
        self._left: dict[int, float] = {}
        """Time at which the hub has answered the `Leave` of a node, by the node's number at this hub."""

    # -- events --------------------------------------------------------------------------------------------------------

    def event(self, what: str, **facts: Any) -> None:
        """Add an event to the trace."""
        self.events.append({"at": round(self._now(), 6), "what": what, **facts})

    def require(self, holds: bool, law: str) -> None:
        """Raise BrokenLaw with a law that does not hold. Only the first one counts."""
        if not holds:
            if self.broken is None:
                self.broken = law
                self.event("broken", law=law)
            raise BrokenLaw(self.broken)

    def befalls(self, fault: Fault, until: float, whom: str) -> None:
        """Note a fault that happens now."""
        self.befallen.append((fault, until))
        self.event("fault", kind=fault.kind, whom=whom, until=round(until, 3))

    def prolong(self, fault: Fault, until: float) -> None:
        """Note that a fault lasts longer than it seemed at first."""
        self.befallen = [(each, max(end, until) if each is fault else end) for each, end in self.befallen]

    def _disturbed(self, kinds: frozenset[Kind] | None = None) -> bool:
        """Return True if a fault of these kinds, or of any kind, may still disturb the run."""
        return any(
            self._now() <= until + RECOVERY_S[fault.kind]
            for fault, until in self.befallen
            if kinds is None or fault.kind in kinds
        )

    @property
    def disturbed_until(self) -> float:
        """Time from which on no fault disturbs the run any more."""
        return max((until + RECOVERY_S[fault.kind] for fault, until in self.befallen), default=0.0)

    @property
    def kinds(self) -> dict[str, int]:
        """Number of faults that have happened, by kind."""
        return dict(Counter(fault.kind for fault, _ in self.befallen))

    @property
    def _undisturbed(self) -> bool:
        """True if no fault at all has happened, so that everything has to go by the book."""
        return not self.befallen

    # -- hubs and launches ---------------------------------------------------------------------------------------------

    def machine_failed(self) -> None:
        """Note that the machine of the hub has failed, so that what was not forced to its disk may be lost."""
        self._machine_lost = True

    def _may_forget(self, config: Config, *, changed: bool) -> bool:
        """Return True if a hub may have lost results and batches that were acknowledged."""
        disk = any(fault.kind == "full disk" for fault, _ in self.befallen)
        return (
            changed
            or disk
            or (self._machine_lost and config.checkpoint.journal != "fsync")
            or config.checkpoint.journal == "off"
            or config.checkpoint.batches == "none"
        )

    def hub_begins(self, config: Config, version: int, notes: list[str]) -> None:
        """Note that a hub starts to serve a run from a version."""
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
        for step in [each for each in self._counted if each >= version]:
            if samples := self.committed.pop(step, None):
                self._dealt[step] = {number: _contents(trajectory) for number, (trajectory, _) in samples.items()}
            del self._counted[step]
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
        self._left.clear()
        self._leased = {task: held for task, held in self._leased.items() if held[0] not in ("", "hub")}

    def hub_ended(self, error: BaseException | None, *, killed: bool) -> None:
        """Check that the error of a hub's process has a cause among the faults."""
        name = "killed" if killed else type(error).__name__ if error is not None else ""
        self.event("hub ended", error=name)
        if error is not None and not killed:
            self._check_explained(error)

    def _check_explained(self, error: BaseException) -> None:
        """Check that an error has a cause among the faults."""
        name = type(error).__name__
        self.require(isinstance(error, FlashError), f"no error but our own ends a process: {name}: {error}")
        self.require(
            self._disturbed(EXPLAINED.get(name, frozenset())),
            f"every error has a cause: {name}: {_plain(str(error))}",
        )

    def process_failed(self, name: str, error: BaseException) -> None:
        """Check that the error with which a node or a rank has ended has a cause among the faults."""
        self.event("process failed", name=name, error=type(error).__name__)
        self._check_explained(error)

    # -- messages ------------------------------------------------------------------------------------------------------

    def sent(self, process: str, request: Request[Any]) -> None:
        """Note a request that a process sends."""
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
        """Note the result of a lease that a node sends."""
        result = ended.result
        if result.task.split == "train":
            self._sent_tokens[ended.lease_id] = result.sampled_tokens
            held = self._leased.get(result.task.task_id)
            # From here on the hub may lease a task again that has failed.
            if held is not None and held[1].lease_id == ended.lease_id:
                del self._leased[result.task.task_id]
                self._check_versions(result, held[1])
            if isinstance(result, Trajectory):
                self._delivered.setdefault(result.task.task_id, set()).add(_contents(result))

    def _check_versions(self, result: Trajectory | Failure, lease: Lease) -> None:
        """Check that no token of a result is older than its lease allows."""
        if isinstance(result, Trajectory):
            oldest = min(run.version for run in result.versions)
            self.require(
                oldest >= lease.min_version, f"no token is older than its lease allows: {oldest} < {lease.min_version}"
            )

    def failed(self, process: str, request: Request[Any], error: Exception, *, over: bool) -> None:
        """Note a request that has failed. Without a fault the hub answers every request."""
        self.event("failed", process=process, request=type(request).__name__, error=type(error).__name__)
        if not over:
            self.require(
                self._disturbed(PROCESS_FAULTS),
                f"the hub answers every request: {process}, {type(request).__name__}: {_plain(str(error))}",
            )

    def answered(self, process: str, request: Request[Any], reply: msgspec.Struct) -> None:
        """Note a reply that a process has received."""
        facts: dict[str, Any] = {}
        match request, reply:
            case p.LeaseRequest(), p.LeaseReply():
                facts["leases"] = [lease.lease_id for lease in reply.leases]
                for lease in reply.leases:
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
        if type(reply) is p.VersionReply and reply.published is None and not reply.done:
            return
        self.event("answered", process=process, request=type(request).__name__, **facts)

    def replied(self, request: Request[Any], reply: msgspec.Struct) -> None:
        """Check a reply that the hub is about to send. The process may not receive it."""
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
        """Forget the engines and leases of a process that has ended."""
        self._engines.pop(name, None)
        self._leased = {task: held for task, held in self._leased.items() if held[0] != name}

    def _check_lease(self, lease: Lease) -> None:
        """Check a lease that the hub is about to send."""
        task = lease.task
        if task.split != "train":
            return
        assert self._config is not None
        number = task.task_id
        done = next((step for step, tasks in self._counted.items() if number in tasks), None)
        self.require(done is None, f"no sample is trained twice: task {number} of step {done} is leased again")
        if (before := self._acknowledged.pop(number, None)) is not None:
            # With `requeue` a sample whose tokens have become too old starts again.
            oldest = self._newest + 1 - _max_age(self._config)
            stale = self._config.rollout.on_expire == "requeue" and before.oldest_version <= oldest
            self.require(stale, f"nothing acknowledged is lost: task {number} was delivered, and is leased again")
        # With `requeue` a sample that has become too old starts again before its node has reported its end.
        if number in self._leased and self._config.rollout.on_expire != "requeue":
            holder = self._leased[number][0]
            self.require(
                bool(self._disturbed(PROCESS_FAULTS)),
                f"a task has one lease: {number} is out at {holder or 'a node'}, and leased again",
            )
        self._leased[number] = "", lease
        self._tasks.add(number)
        self._check_admission()

    def _check_admission(self) -> None:
        """Check the bound of samples in flight, in runs in which every leased task is trained."""
        config = self._config
        assert config is not None
        rollout, train = config.rollout, config.train
        plain = not (rollout.drop_equal_rewards or rollout.accuracy_bounds or rollout.extra_groups)
        assert config.simulate is not None
        plain = plain and not config.simulate.fail_stop
        if plain and rollout.on_expire != "requeue" and not rollout.extra_per_group and self._undisturbed:
            most = (max(self._published, 0) + 1 + train.async_ratio) * train.batch_size
            # A group of which no token is young enough for its step leaves untrained, and another one takes its place.
            step = max(self._counted, default=-1) + 1
            for trajectory in self._acknowledged.values():
                most += max(run.version for run in trajectory.versions) < step - _max_age(config)
            for samples in self.committed.values():
                most += sum(not trajectory.trained_tokens(oldest) for trajectory, oldest in samples.values())
            self.require(
                len(self._tasks) <= most + 1e-6,
                f"at version n at most (n + 1 + α)·B samples were issued: {len(self._tasks)} of {most:g}",
            )

    def _acknowledge(self, ended: p.EndedLease) -> None:
        """Note a result whose delivery was acknowledged."""
        result = ended.result
        # Over a slow network an acknowledgement can arrive after the next hub has begun, which has not got the result.
        late = self._kept_by.get(ended.lease_id, self._life) < self._forgot
        if result.task.split != "train" or late:
            return
        self._acknowledged_tokens[ended.lease_id] = result.sampled_tokens
        if not isinstance(result, Failure):
            self._acknowledged[result.task.task_id] = result

    def _check_shard(self, incarnation: int, request: p.BatchRequest, reply: p.BatchReply) -> None:
        """Check the samples that a rank has received."""
        shard, config = reply.shard, self._config
        assert shard is not None
        assert config is not None
        self.require(shard.step == request.step, "a rank gets the step that it asks for")
        is_new = request.step not in self._counted
        if is_new:
            oldest = request.step - _max_age(config)
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
        """Check a step whose commit was acknowledged."""
        samples = self._shards.pop((incarnation, step), {})
        tasks = frozenset(samples)
        self.require(bool(tasks), f"a step trains samples: {step}")
        gone = sorted(self._dealt.pop(step, {}).keys() - tasks)
        self.require(not gone, f"a step has one batch: samples {gone[:5]} of step {step} were dealt, and are gone")
        known = self._counted.get(step)
        self.require(known is None or known == tasks, f"a step has one batch: step {step} was trained on another one")
        for other, earlier in self._counted.items():
            if other != step:
                both = sorted(tasks & earlier)
                self.require(not both, f"no sample is trained twice: tasks {both[:5]} in the steps {other} and {step}")
        self._counted[step] = tasks
        self._newest = max(self._newest, step)
        self._stepped_at = self._now()
        self.committed[step] = samples

    def _check_publication(self, version: int) -> None:
        """Check that all engines have the version before a version that was announced."""
        if not self._undisturbed:
            return
        for process, engines in sorted(self._engines.items()):
            for index, held in sorted(engines.items()):
                self.require(
                    held >= version - 1,
                    f"engines are at most one version behind: engine {index} of {process} has {held} at {version}",
                )

    def node_continues(self, process: str, hung_s: float) -> None:
        """Check that the others have done the work of a node that has hung for some seconds, and now goes on."""
        if len(self.befallen) == 1:
            idle = self._now() - max(self._stepped_at, self._now() - hung_s)
            self.require(idle <= STALLED_S, f"the others do the work of a node that hangs: {process}, {idle:.0f} s")

    def too_late(self, process: str, version: int) -> None:
        """Check that a fault explains why an engine fetches a version that the ranks do not hold any more."""
        self.event("too late", process=process, version=version)
        self.require(self._disturbed(PROCESS_FAULTS), f"a version is held until all engines have it: {version}")

    # -- the end -------------------------------------------------------------------------------------------------------

    def check_end(self, config: Config) -> None:
        """Check the files of a run that has finished."""
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
        """Check the totals of the run against the messages."""
        ledger: dict[str, int] = msgspec.json.decode(file.read_bytes())
        left = ledger["trained"] + ledger["filtered"] + ledger["given_up"] + ledger["in_flight"]
        self.require(ledger["issued"] == left, f"issued = trained + filtered + given up + in flight: {ledger}")
        self.require(ledger["in_flight"] == 0, f"nothing is in flight at the end: {ledger['in_flight']}")
        tokens = ledger["trained_tokens"] + ledger["discarded_tokens"]
        self.require(ledger["generated_tokens"] == tokens, f"generated = trained + discarded tokens: {ledger}")
        samples = [each for step in self.committed.values() for each in step.values()]
        trained = [trajectory.trained_tokens(oldest) for trajectory, oldest in samples]
        if len(self.committed) == len(self._counted) == max(self.committed, default=-1) + 1:
            own = sum(map(bool, trained)), sum(trained)
            theirs = ledger["trained"], ledger["trained_tokens"]
            self.require(own == theirs, f"trained samples and tokens: {own} by the messages, {theirs} by the ledger")
        if self._life == 1:
            least, most = sum(self._acknowledged_tokens.values()), sum(self._sent_tokens.values())
            self.require(
                least <= ledger["generated_tokens"] <= most,
                f"generated tokens: {ledger['generated_tokens']}, {least} were acknowledged and {most} sent",
            )
            self.require(len(self._tasks) <= ledger["issued"], "every leased task is issued")


def _contents(trajectory: Trajectory) -> Delivered:
    """Return the tokens of a sample with their versions."""
    return Delivered(trajectory.token_ids, tuple((run.version, run.count) for run in trajectory.versions))


def _max_age(config: Config) -> int:
    """Return the largest age of a trained token, by the rule of docs/asynchrony.md."""
    age = config.train.max_token_age
    return 4 * math.ceil(config.train.async_ratio - 1e-9) if age is None else age


def _rules(config: Config) -> Config:
    """Return the settings on which a step depends."""
    return msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, resume=False))


def _plain(text: str) -> str:
    """Return an error message on one line, of limited length."""
    return " ".join(text.split())[:200]
