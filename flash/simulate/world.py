"""World: a complete run on a virtual clock, with the real hub, nodes, schedulers, episodes and proxies.

`flash simulate` calls `simulate`; tests and benchmarks also make a `World` and look into it while it runs. Engines,
trainer and environments are simulated. There are no weights and no checkpoints, and an evaluation has one sample at the
start and one at the end of the run. Deadlines of rollouts and steps are lifted (LIFTED_S), so that a slow workload does
not fail. Only `env_step` keeps its deadline, and only if environments may stop forever.

A report covers the time from the first lease of a training sample to the last commit. A lease is the assignment of one
sample to a node, which delivers its result to the hub. A commit is the trainer's report of a finished step.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import anyio
import msgspec

from flash.config.simulate import SimulateConfig
from flash.config.tree import ClusterConfig, Config, ParallelConfig
from flash.environment.interface import Environment
from flash.errors import ConfigError
from flash.hub import protocol as p
from flash.hub.context import RunEnd
from flash.hub.hub import Hub, InProcessCaller
from flash.observe.observer import MemoryObserver
from flash.rollout.engine_state import StateTimes
from flash.rollout.episode.episode import response_key
from flash.rollout.node import NodeEnvironment, RolloutNode
from flash.rollout.scheduler import HubLink
from flash.rollout.supervisor import same_engine
from flash.simulate.clock import VirtualLoop
from flash.simulate.engine import SimEngine
from flash.simulate.environment import SimEnvironment, SimTokenizer
from flash.simulate.report import SimReport
from flash.simulate.trainer import SimTrainer
from flash.simulate.workload import Workload
from flash.types import Activity, Batch, Task
from flash.waiting import first_error

LIFTED_S = 1e6
"""Seconds of a lifted deadline: longer than any reasonable step, but finite, so that a step that never ends fails."""
LAG_BUCKET_S = 1e-4
"""Resolution of the measured times of passes of the event loop, in real seconds."""
BUSY = "busy"
"""State of an engine that decodes: it has a running sequence and does not swap weights."""


def simulate(config: Config) -> SimReport:
    """Run a configuration with a `[simulate]` table on a new virtual clock, and return the report. Blocks until then.

    Raises:
        FlashError: an error that would also stop the real run, such as BreakerError; ContractError if the tasks of the
            simulation wait for each other, or for something outside the process; ConfigError if nothing takes time.
    """

    async def run() -> SimReport:
        """Run the simulation on the new clock."""
        started = time.perf_counter()
        world = World(config)
        end = await world.run()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, _TimedLoop)
        return world.report(end, time.perf_counter() - started, loop.lag(0.99))

    try:
        return anyio.run(run, backend="asyncio", backend_options={"loop_factory": _TimedLoop})
    except BaseExceptionGroup as group:
        raise first_error(group) from None


def lifted(config: Config, settings: SimulateConfig) -> Config:
    """Return the configuration that hub, nodes and trainer of a `World` get, instead of the user's.

    All keys of its tables `cluster` and `parallel` have their defaults, apart from the GPUs: one trainer rank and no
    GPU, since `settings` has the number of GPUs and their speed. `World` takes `cluster.nodes` from the user's
    configuration. The deadlines below are LIFTED_S, and the others are the user's. `deadlines.env_step` is the user's,
    too, if `settings.fail_stop` is above 0: without it, samples would wait forever for environments that have stopped.
    """
    deadlines = msgspec.structs.replace(
        config.deadlines,
        rendezvous=LIFTED_S,
        request=LIFTED_S,
        generate=LIFTED_S,
        env_step=config.deadlines.env_step if settings.fail_stop else LIFTED_S,
        episode=LIFTED_S,
        swap=LIFTED_S,
        step=LIFTED_S,
    )
    return msgspec.structs.replace(
        config,
        cluster=ClusterConfig(gpus_per_node=0),
        parallel=ParallelConfig(),
        # There are no weights to evaluate. The hub evaluates at the start and the end in any case (`every=0`), so this
        # takes as little of the engines' time as possible.
        eval=msgspec.structs.replace(config.eval, every=0, problems=1, samples=1),
        deadlines=deadlines,
    )


class MeterReading(NamedTuple):
    """Sums of a `Meter` from its start until it was read."""

    state_s: list[dict[str, float]]
    """Seconds of each engine by state (`World._state`), in the order of the engines."""
    place_s: float
    """Seconds in which a sequence had a place in an engine, added over all sequences, also during swaps."""


class Meter:
    """Adds up the time of engines by state: busy, swapping, or a cause of idleness.

    The world reports each change at once: with `note_engine` if the sequences or swaps of an engine have changed, and
    with `note_idle_causes` if the cause of idleness may have changed. Conservation: from `start` on, the seconds of an
    engine's states add up to the time that has passed.

    Args:
        count: number of engines.
        state: returns the present state of the engine with a number; called after each change.
        running: returns the number of sequences that the engine with a number runs; called after each change.
        now: the clock, in virtual seconds.
    """

    def __init__(
        self, count: int, state: Callable[[int], str], running: Callable[[int], int], now: Callable[[], float]
    ) -> None:
        self._state_of = state
        self._running_of = running
        self._now = now
        self._times = [StateTimes() for _ in range(count)]
        """Time by state of each engine, up to its last change."""
        self._running = [0] * count
        """Number of sequences that each engine runs since its last change."""
        self._idle: set[int] = set(range(count))
        """Numbers of the engines that are not busy: they are idle or swap weights."""
        self._place_s = 0.0
        """`MeterReading.place_s` up to the last change of each engine."""

    def start(self) -> None:
        """Begin to measure now, and discard all earlier time. Called at the first lease of a training sample."""
        self._count_until_now()
        for times in self._times:
            times.forget()
        self._place_s = 0.0

    def note_engine(self, index: int) -> None:
        """Count the time since this engine's last change, and take its present state and number of sequences."""
        state = self._state_of(index)
        # The seconds that have passed belong to the state and to the number of sequences before this change.
        passed_s = self._times[index].enter(state, self._now())
        self._place_s += passed_s * self._running[index]
        self._running[index] = self._running_of(index)
        if state == BUSY:
            self._idle.discard(index)
        else:
            self._idle.add(index)

    def note_idle_causes(self) -> None:
        """Record that the cause of the idleness of idle engines may have changed."""
        for index in tuple(self._idle):
            self.note_engine(index)

    def read(self) -> MeterReading:
        """Return the sums up to now. The world calls this at each commit."""
        self._count_until_now()
        now = self._now()
        return MeterReading([times.seconds(now) for times in self._times], self._place_s)

    def _count_until_now(self) -> None:
        """Count the time of all engines up to now."""
        for index in range(len(self._times)):
            self.note_engine(index)


class SimNode:
    """The engines of a node, and the number of its leases, from which the world finds the cause of idleness.

    The node itself is the real `RolloutNode`, which `World.run` makes and runs.
    """

    def __init__(self, number: int, first_engine: int, engines: list[SimEngine]) -> None:
        self.number = number
        """Number of the node, counted from 0."""
        self.first_engine = first_engine
        """Number of its first engine among all engines of the run; the others follow."""
        self.engines = engines
        self.leases = 0
        """Number of leases whose result is not delivered yet. `World` counts them."""

    @property
    def all_in_environments(self) -> bool:
        """True if the node has leases, but no engine has a request: all its episodes are in their environments."""
        return self.leases > 0 and not any(engine.occupied for engine in self.engines)


class World:
    """A simulated run. Make it in a task on the virtual clock on which it will run: the constructor reads that clock.

    Call `run` once, and then `report`. Attributes without an underscore are public for tests and benchmarks that
    inspect the run while it goes on.

    Args:
        config: the run's configuration, with its `[simulate]` table.
        observer: receives the observations of the hub; None: a new one.
    """

    def __init__(self, config: Config, observer: SimObserver | None = None) -> None:
        assert config.simulate is not None, "the configuration has a [simulate] table"
        self.settings = config.simulate
        self.config = lifted(config, self.settings)
        """Configuration of the simulation, which is not quite the user's."""
        tasks_per_group = config.rollout.group_size + config.rollout.extra_per_group
        self.workload = Workload(self.settings, config.run.seed, config.rollout.max_new_tokens, tasks_per_group)
        self._now = anyio.current_time
        """Returns the time of the run, in virtual seconds."""
        self._observer = observer or SimObserver()
        # The trainer needs the hub, the nodes need the engines, and the reading of the meter needs all of them.
        self.hub = Hub(self.config, self._observer, now=self._now)
        count = self.settings.rollout_gpus // config.engine.tensor_parallel
        self.engines = [self._make_engine(index) for index in range(count)]
        self.meter = Meter(count, self._state, lambda index: self.engines[index].running, self._now)
        self.nodes = self._make_nodes(config.cluster.nodes)
        self._node_of = [node for node in self.nodes for _ in node.engines]
        """Node of each engine, by the engine's number."""
        caller = InProcessCaller(self.hub, self._after_trainer_call)
        self.trainer = SimTrainer(self.config, self.settings, caller, self._now)
        self._occupied: set[int] = set()
        """Numbers of the engines that had a request at their last change."""
        self._leased: dict[int, Task] = {}
        """Training tasks that were leased, by task id. A task that was leased again is here once."""
        self._first_lease_at: float | None = None
        """Time of the first lease of a training sample; None before it."""
        self._measured = self.meter.read()
        """Reading of the meter at the last commit."""

    def _make_engine(self, index: int) -> SimEngine:
        """Return the engine of number `index`, counted from 0. It calls `_engine_changed` after each change."""
        return SimEngine(
            self.settings,
            self.config.engine.max_sequences,
            self.workload.response_tokens,
            self.config.engine.stream_interval,
            on_change=lambda: self._engine_changed(index),
        )

    def _make_nodes(self, nodes: int) -> list[SimNode]:
        """Divide the engines evenly among this many nodes, in order, and return the nodes."""
        count = len(self.engines)
        cuts = [count * number // nodes for number in range(nodes + 1)]
        return [SimNode(number, start, self.engines[start:stop]) for number, (start, stop) in enumerate(pairwise(cuts))]

    # -- the run -----------------------------------------------------------------------------------------------------

    async def run(self) -> RunEnd:
        """Train all steps on the virtual clock. Returns the end of the run.

        Raises the error that ended it, in a group of exceptions.
        """
        # Number of environments that were reset for each problem, on all nodes together, by the problem's seed.
        env_counts: Counter[int] = Counter()
        async with anyio.create_task_group() as group:
            for node in self.nodes:
                group.start_soon(self._rollout_node(node, env_counts).run, name=f"node {node.number}")
            group.start_soon(self.trainer.run, name="trainer")
            return await self.hub.run()
        # The task group swallows only its own cancellation, and nothing cancels it before the hub's end.
        raise AssertionError("the task group ended without the end of the run")

    def _rollout_node(self, node: SimNode, env_counts: Counter[int]) -> RolloutNode:
        """Return a real node with simulated engines and environments. Its calls to the hub update the meter.

        All environments of all nodes share `env_counts`. Each reset adds 1 under the seed of its problem.
        """

        def make_env(kind: str) -> Environment:
            """Return the environment of an episode. `kind`, its domain, changes nothing."""
            return SimEnvironment(self.workload, env_counts)

        def watch(request: msgspec.Struct, reply: msgspec.Struct) -> None:
            """Report a call of this node to the world."""
            self._after_node_call(node, request, reply)

        link = HubLink(node.number, node.first_engine, InProcessCaller(self.hub, watch))
        env = NodeEnvironment(make_env)
        # Simulated engines do not die, so the node's supervisor always gets the same ones.
        factories = [same_engine(engine) for engine in node.engines]
        return RolloutNode(self.config, link, factories, SimTokenizer(), env, now=self._now)

    def _engine_changed(self, index: int) -> None:
        """Report to the meter that an engine's sequences or its swap may have changed. The engine calls this."""
        self.meter.note_engine(index)
        # The cause of idleness of the node's other engines depends on whether any engine of the node has a request.
        occupied = self.engines[index].occupied
        if occupied != (index in self._occupied):
            (self._occupied.add if occupied else self._occupied.discard)(index)
            self.meter.note_idle_causes()

    def _after_node_call(self, node: SimNode, request: msgspec.Struct, reply: msgspec.Struct) -> None:
        """Count the leases of a node after a call to the hub. The first lease of a training sample starts the meter.

        The node's `InProcessCaller` calls this after each call. Other calls than those for leases change nothing.
        """
        if isinstance(reply, p.LeaseReply) and reply.leases:
            node.leases += len(reply.leases)
            training = {lease.task.task_id: lease.task for lease in reply.leases if lease.task.split == "train"}
            if training and self._first_lease_at is None:
                self._first_lease_at = self._now()
                self.meter.start()
            self._leased |= training
        elif isinstance(request, p.DeliverRequest):
            node.leases -= len(request.ended)
        else:
            return
        self.meter.note_idle_causes()

    def _after_trainer_call(self, request: msgspec.Struct, reply: msgspec.Struct) -> None:
        """Read the meter at each commit, so that a report ends there. Each call may change the causes of idleness.

        The trainer's `InProcessCaller` calls this after each call of the trainer to the hub.
        """
        if isinstance(request, p.Commit):
            self._measured = self.meter.read()
        self.meter.note_idle_causes()

    def _state(self, index: int) -> str:
        """Return the state of an engine: `busy`, or the cause of its idleness (`SimReport.engine_idle`)."""
        engine, node = self.engines[index], self._node_of[index]
        if engine.swapping:
            return "swap"
        if engine.running:
            return BUSY
        if node.all_in_environments:
            return "environments"
        # The engine has no work: the run needs no more samples, or they may not begin yet, as they would get too old.
        return "end" if self._all_issued() else "admission"

    def _all_issued(self) -> bool:
        """Return True if the hub has issued all groups that the run needs: the next group would have no place.

        Each group takes a place, counted from 0, in the batches of the whole run, which have `place_count` places. A
        group that leaves untrained, filtered out or too old, gives its place back.
        """
        samples = self.hub.samples
        return samples.admission.places.of(samples.source.cursor.next_group) >= samples.contract.place_count

    # -- the report --------------------------------------------------------------------------------------------------

    def report(self, end: RunEnd, real_s: float = 0.0, lag_s: float = 0.0) -> SimReport:
        """Return the report of the run, after `run` has returned `end`.

        `real_s` are the real seconds that the simulation took. `lag_s` are the real seconds that 99 % of the passes of
        its event loop did not exceed. Both are 0 if they were not measured. The run must have made a step.

        Raises ConfigError if the run took no virtual time, so that it has no rates.
        """
        begun, commits = self._first_lease_at or 0.0, self.trainer.commits
        seconds = commits[-1] - begun
        if seconds == 0:
            raise ConfigError("the simulated run takes no time: set one of the times in [simulate] above 0")
        # The first step waits for the first samples, so rates leave it out, unless all steps end at once.
        skipped = 1 if len(commits) > 2 and commits[-1] > commits[0] else 0
        steady_s = commits[-1] - commits[0] if skipped else seconds
        steady = self.trainer.trained[skipped:]
        state_s, place_s = self._measured
        places = len(self.engines) * self.config.engine.max_sequences
        names = {name for engine in state_s for name in engine}
        engine_s = {name: sum(engine.get(name, 0.0) for engine in state_s) for name in sorted(names)}
        engines = _shares(engine_s, seconds * len(self.engines))
        trainer = self._trainer_shares(begun, commits[-1])
        return SimReport(
            seconds=seconds,
            steps=end.version,
            samples=end.ledger["trained"],
            trained_tokens=end.ledger["trained_tokens"],
            generated_tokens=end.ledger["generated_tokens"],
            step_s=steady_s / len(steady),
            samples_per_s=sum(each.samples for each in steady) / steady_s,
            tokens_per_s=sum(each.tokens for each in steady) / steady_s,
            stale_share=end.ledger.get("discarded_tokens_stale", 0) / max(end.ledger["generated_tokens"], 1),
            stale_samples=end.ledger.get("given_up_stale", 0),
            trainer_busy=trainer.pop("train", 0.0),
            trainer_idle=trainer,
            engine_busy=engines.pop(BUSY, 0.0),
            engine_idle=engines,
            slot_use=place_s / (seconds * places),
            ages=dict(sorted(self.trainer.ages.items())),
            ledger=end.ledger,
            mean_trained_length=_mean(self.trainer.lengths),
            mean_issued_length=_mean(Counter(self._length(task) for task in self._leased.values())),
            rows=self._observer.steps,
            real_s=real_s,
            loop_lag_p99_ms=lag_s * 1e3,
        )

    def _trainer_shares(self, begun: float, ended: float) -> dict[str, float]:
        """Return the trainer's shares of the time between `begun` and `ended` by activity (`SimTrainer.activities`)."""
        seconds = {"train": 0.0, "batch": 0.0, "publish": 0.0}
        for activity in self.trainer.activities:
            # Only the part of the activity between `begun` and `ended`, if there is one.
            seconds[activity.name] += max(0.0, min(activity.stop, ended) - max(activity.start, begun))
        return _shares(seconds, ended - begun)

    def _length(self, task: Task) -> int:
        """Return the response tokens that the sample of a task has at its end, also if it was cancelled before."""
        turns = min(self.workload.turns(task.seed), self.config.rollout.max_turns)
        return sum(self.workload.response_tokens(response_key(task, turn)) for turn in range(turns))


class SimObserver(MemoryObserver):
    """An observer that keeps the metrics and messages of a run, but no data that grows with the number of samples."""

    def activities(self, rows: Sequence[Activity]) -> None:
        """Discard activities, since `Meter` and `SimTrainer` measure them."""

    def batch(self, batch: Batch) -> None:
        """Discard the batch, since `SimTrainer` counts its samples and tokens."""


class _TimedLoop(VirtualLoop):
    """A virtual clock that also measures the real time of each pass of the event loop.

    A long pass would block a real event loop, so `SimReport.loop_lag_p99_ms` shows if the hub's code is too slow.
    """

    def __init__(self) -> None:
        self._pass_start = time.perf_counter()
        """Real time at which the present pass began, in seconds of `time.perf_counter`."""
        self._passes: Counter[int] = Counter()
        """Number of passes by their real time, in units of LAG_BUCKET_S, rounded down."""
        super().__init__()

    def jump(self, seconds: float | None) -> None:
        """Record the real time of the pass that is over, and advance the virtual clock. Called once in each pass."""
        now = time.perf_counter()
        self._passes[int((now - self._pass_start) / LAG_BUCKET_S)] += 1
        self._pass_start = now
        super().jump(seconds)

    def lag(self, share: float) -> float:
        """Return the real seconds that this share of the passes did not exceed, rounded up to LAG_BUCKET_S.

        `share` is from 0 to 1. Returns 0 if no pass was recorded.
        """
        uncounted = share * self._passes.total()
        for bucket, count in sorted(self._passes.items()):
            uncounted -= count
            if uncounted <= 0:
                return (bucket + 1) * LAG_BUCKET_S
        return 0.0  # no pass was recorded


def _shares(seconds: Mapping[str, float], total: float) -> dict[str, float]:
    """Return the shares of `total` that the seconds of each name have. Names without time are left out.

    `total` is above 0. It may be more than the sum of the seconds.
    """
    return {name: part / total for name, part in seconds.items() if part > 0}


def _mean(counts: Counter[int]) -> float:
    """Return the mean of values that are given with their counts, by value; 0 if there are none."""
    return sum(value * count for value, count in counts.items()) / max(1, counts.total())
