"""Rules of asynchronous systems: AReaL, SkyRL as marin runs it, Laminar, verl, and a queue that drops old groups.

Each class has the rules of one system, on the simulated engines and trainer of `benchmarks.simulated.peers.world`. A
group is the samples of one prompt. Dynamic filtering drops a group from whose rewards nothing can be learned, such as
equal ones. A sample's age is the number of versions that were made after the version that sampled its oldest token.
"""

from __future__ import annotations

import math
from collections import deque

import anyio
import msgspec
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectSendStream

from benchmarks.simulated.peers.world import Finished, Peer, PeerReport, World
from flash.config.tree import Config
from flash.types import Canary, Published, Task


class ArealRules(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of AReaL."""

    eta: float = 1.0
    """η: largest age of samples, in versions, that admission aims at."""
    max_concurrent: int | None = None
    """Most groups that are generated at once; None: as many as η allows."""
    interruptible: bool = True
    """True if new weights interrupt the running requests."""


def capacity(rules: ArealRules, version: int, batch: int, accepted: int, running: int) -> int:
    """Return the number of prompt groups that may be started now.

    `accepted` groups are in batches or wait for one; `running` groups are being generated; `batch` is B, the number of
    groups in a batch. The first bound limits the staleness: version v may use (η + v + 1)·B groups in all. The result
    is 0 or negative if no group may be started.
    """
    by_staleness = int((rules.eta + version + 1) * batch) - (accepted + running)
    return by_staleness if rules.max_concurrent is None else min(rules.max_concurrent - running, by_staleness)


class Areal(Peer[ArealRules]):
    """AReaL's rules.

    Groups may be started up to `capacity`. A group that is filtered out gives its place back. A batch takes the results
    that were issued first. New weights interrupt generation. AReaL aborts the running requests and sends them again
    with the tokens that they have. Here the load of the weights prefills these tokens again, which costs the same. With
    `interruptible` off, requests run to their end before the weights are loaded, and no request begins meanwhile. The
    age of a sample is not checked when it is trained.
    """

    def __init__(self, config: Config, rules: ArealRules) -> None:
        super().__init__(World(config, colocated=False), rules)
        self._running = 0
        """Number of groups that are being generated."""
        self._accepted = 0
        """Number of groups that were generated and not filtered out, in the whole run."""
        self._results: dict[int, list[Finished]] = {}
        """Accepted groups that no batch has taken yet, by the group's number."""

    async def run(self) -> PeerReport:
        """Train every step while the groups run beside it, and report the run. `_group` adds results meanwhile."""
        world, wanted = self._world, self._world.groups_per_batch
        await world.publish()
        async with anyio.create_task_group() as groups:
            self._groups: TaskGroup = groups
            self._admit()
            for _ in range(world.config.run.steps):
                while len(self._results) < wanted:
                    await self._changed.wait()
                await world.train([self._results.pop(group_id) for group_id in sorted(self._results)[:wanted]])
                await world.update(drain=not self._rules.interruptible)
                self._admit()
            groups.cancel_scope.cancel()
        return world.report()

    def _admit(self) -> None:
        """Start as many groups as the capacity allows. Called after each event that changes the capacity."""
        world = self._world
        while capacity(self._rules, world.version, world.groups_per_batch, self._accepted, self._running) > 0:
            self._running += 1
            self._groups.start_soon(self._group, world.next_group())

    async def _group(self, tasks: list[Task]) -> None:
        """Play all samples of a group, and keep the group as a result unless dynamic filtering drops it.

        Either way its end may let other groups start.
        """
        group = await self._world.play_group(tasks)
        self._running -= 1
        if not self._world.is_filtered_out(group):
            self._accepted += 1
            self._results[tasks[0].group_id] = group
            self._change()
        self._admit()


class DiscardRules(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of SkyRL's fully asynchronous trainer."""

    workers: int
    """`num_parallel_generation_workers`: groups that are generated at once."""
    buffer: int
    """`max_buffered_groups`: size of the buffer, in groups."""
    max_age: int
    """`max_staleness_steps`: largest age of a trained group, in versions."""


class Discard(Peer[DiscardRules]):
    """The rules of SkyRL's fully asynchronous trainer, as marin runs it: groups that got too old are discarded.

    A fixed number of workers generate one group each, as far as AReaL's `capacity` allows. A complete group goes into a
    buffer of limited size; a worker waits with its group while the buffer is full. The trainer takes groups in the
    order of the buffer, and discards each one whose oldest token is more than `max_age` versions old. New weights abort
    the running requests, which go on from their tokens.
    """

    def __init__(self, config: Config, rules: DiscardRules) -> None:
        super().__init__(World(config, colocated=False), rules)
        self._running = 0
        """Number of groups that are being generated, or held by a worker that waits for the buffer."""
        self._accepted = 0
        """Number of groups that went into the buffer and were not discarded, in the whole run."""

    async def run(self) -> PeerReport:
        """Train every step on groups of the buffer, which the workers fill beside it, and report the run."""
        world, rules = self._world, self._rules
        seen: list[tuple[bool, int]] = []  # for each group that the trainer has taken: True if stale, and its tokens
        await world.publish()
        send, receive = anyio.create_memory_object_stream[list[Finished]](rules.buffer)
        async with anyio.create_task_group() as workers, send, receive:
            for _ in range(rules.workers):
                workers.start_soon(self._worker, send)
            for _ in range(world.config.run.steps):
                batch: list[list[Finished]] = []
                while len(batch) < world.groups_per_batch:
                    group = await receive.receive()
                    stale = world.version - min(sample.oldest_version for sample in group) > rules.max_age
                    seen.append((stale, sum(sample.tokens for sample in group)))
                    if stale:
                        self._accepted -= 1  # another group may be generated in its place
                        self._change()
                    else:
                        batch.append(group)
                await world.train(batch)
                await world.update()
                self._change()
            workers.cancel_scope.cancel()
        return msgspec.structs.replace(
            world.report(),
            stale_groups=sum(stale for stale, _ in seen) / len(seen),
            stale_tokens=sum(tokens for stale, tokens in seen if stale) / sum(tokens for _, tokens in seen),
        )

    async def _worker(self, send: MemoryObjectSendStream[list[Finished]]) -> None:
        """Generate one group after the other until cancelled, and put each one into the buffer.

        While the buffer is full, the group still counts as running. Its place in `capacity` is the same either way.
        """
        world, bounds = self._world, ArealRules(eta=self._rules.max_age)
        while True:
            while capacity(bounds, world.version, world.groups_per_batch, self._accepted, self._running) <= 0:
                await self._changed.wait()
            self._running += 1
            group = await world.play_group(world.next_group())
            await send.send(group)
            self._running -= 1
            self._accepted += 1


CHECK_S = 5.0
"""Seconds between two checks of Laminar's engines, as published."""


class LaminarRules(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of Laminar."""

    repack: bool = True
    """True if long answers are packed together."""


class Laminar(Peer[LaminarRules]):
    """Laminar's rules (arXiv 2510.12633): each engine has its own pace, and long answers are packed together.

    Each engine loads the newest weights, generates its share of a batch under them, and begins again when all of its
    samples have ended. With `repack`, engines are checked every few seconds. If an engine has room for the samples of
    another one of the same version, and both are at most half full, these samples move there, and the other engine
    begins again at once. No sample is generated under two versions. The trainer takes complete groups in the order of
    their end, and never waits for the engines.
    """

    def __init__(self, config: Config, rules: LaminarRules) -> None:
        super().__init__(World(config, colocated=False), rules)
        world = self._world
        self._share = world.groups_per_batch // len(world.engines)
        """Groups that an engine generates before it loads weights again."""
        self._engine_of: dict[int, int] = {}
        """Number of the engine that generates a sample, by task id, for each sample that has not ended."""
        self._load = [0] * len(world.engines)
        """Number of samples that each engine generates."""
        self._send, self._complete = anyio.create_memory_object_stream[list[Finished]](math.inf)
        """Complete groups that the trainer has not taken yet, in the order of their end."""

    async def run(self) -> PeerReport:
        """Train every step on complete groups, while each engine generates on its own, and report the run."""
        world = self._world
        world.version = 0  # not by `publish`: each engine loads a version when it begins a share
        async with self._send, self._complete, anyio.create_task_group() as tasks:
            for engine in range(len(world.engines)):
                tasks.start_soon(self._rollout, engine)
            if self._rules.repack:
                tasks.start_soon(self._repack)
            for _ in range(world.config.run.steps):
                await world.train([await self._complete.receive() for _ in range(world.groups_per_batch)])
                world.version += 1
            tasks.cancel_scope.cancel()
        return world.report()

    async def _rollout(self, number: int) -> None:
        """Generate shares of batches on the engine `number`, each under the newest weights, until cancelled.

        `_repack` may move the engine's samples elsewhere during the wait. Then its load is 0, and it begins again.
        """
        world, engine = self._world, self._world.engines[number]
        async with anyio.create_task_group() as samples:
            while True:
                if engine.version < world.version:
                    await engine.load(Published(world.version, "tcp", b"", Canary([], [])), keep_cache=False)
                for _ in range(self._share):
                    tasks, group = world.next_group(), list[Finished]()
                    for task in tasks:
                        self._engine_of[task.task_id] = number
                        self._load[number] += 1
                        samples.start_soon(self._sample, task, number, group, len(tasks))
                while self._load[number]:
                    await self._changed.wait()

    async def _sample(self, task: Task, number: int, group: list[Finished], size: int) -> None:
        """Generate a sample, at first on the engine `number`, and append it to `group`, which ends with `size` samples.

        The sample counts for the engine on which it ends, because `_repack` may have moved it.
        """
        group.append(await self._world.play(task, number))
        self._load[self._engine_of.pop(task.task_id)] -= 1
        if len(group) == size:
            self._send.send_nowait(group)
        self._change()

    async def _repack(self) -> None:
        """Move samples from nearly empty engines to others of the same version, until cancelled.

        The emptiest engine comes first. Its samples move only to an engine with as many or more, if both together have
        at most half of an engine's share of samples.
        """
        world, load = self._world, self._load
        half = self._share * world.config.rollout.group_size // 2
        while True:
            await anyio.sleep(CHECK_S)
            for source in sorted(range(len(load)), key=load.__getitem__):
                version = world.engines[source].version
                # The fullest engine that has room, so that most engines become empty.
                fitting = [
                    (load[target], target)
                    for target in range(len(load))
                    if target != source and world.engines[target].version == version
                    if 0 < load[source] <= load[target] <= half - load[source]
                ]
                if fitting:
                    target = max(fitting)[1]
                    world.router.move(source, target)
                    self._engine_of |= {task: target for task, at in self._engine_of.items() if at == source}
                    load[target], load[source] = load[target] + load[source], 0
            self._change()


class VerlRules(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of verl."""

    threshold: float = 0.0
    """`staleness_threshold`: groups that may be started ahead, as a share of the groups of an update."""
    sync_every: int = 4
    """`trigger_parameter_sync_step`: batches between two updates of the engines."""


class VerlAsync(Peer[VerlRules]):
    """verl's fully asynchronous rules (`verl/experimental/fully_async_policy`).

    A sample of verl is a prompt with all of its answers, here a group. Groups are started one by one. Between two
    updates of the engines, as many groups count as (1 + threshold) times the groups that an update needs; groups that
    run or wait for the trainer at an update count for the next one. The trainer takes complete groups in the order of
    their end, trains whenever it has a batch, and updates the engines after `sync_every` batches. With a threshold
    above 0 running requests are aborted at an update, and go on afterwards from the tokens that they have.
    """

    def __init__(self, config: Config, rules: VerlRules) -> None:
        super().__init__(World(config, colocated=False), rules)
        self._counted = 0
        """Groups that were started since the last update, and those that ran or waited at it."""
        self._running = 0
        """Number of groups that are being generated."""
        self._send, self._complete = anyio.create_memory_object_stream[list[Finished]](math.inf)
        """Complete groups that the trainer has not taken yet, in the order of their end."""

    async def run(self) -> PeerReport:
        """Train every step on complete groups, which run beside it, and report the run."""
        world = self._world
        await world.publish()
        async with self._send, self._complete, anyio.create_task_group() as groups:
            self._start(groups)
            for step in range(1, world.config.run.steps + 1):
                await world.train([await self._complete.receive() for _ in range(world.groups_per_batch)])
                if step % self._rules.sync_every == 0:
                    await world.update()
                    self._counted = self._running + self._complete.statistics().current_buffer_used
                    self._start(groups)
            groups.cancel_scope.cancel()
        return world.report()

    def _start(self, groups: TaskGroup) -> None:
        """Start as many groups as may count until the next update."""
        most = int(self._world.groups_per_batch * (1 + self._rules.threshold) * self._rules.sync_every)
        while self._counted < most:
            self._counted += 1
            self._running += 1
            groups.start_soon(self._group, self._world.next_group())

    async def _group(self, tasks: list[Task]) -> None:
        """Generate a group, and hand it to the trainer: the stream has no limit, so this never waits."""
        group = await self._world.play_group(tasks)
        self._running -= 1
        self._send.send_nowait(group)


class QueueRules(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a bounded queue between engines and trainer."""

    factor: float = 1.0
    """Capacity of the queue, in batches."""
    stagger_s: float = 0.0
    """Seconds between the starts of the first groups. Samples of constant length then end one by one, not at once."""


class QueueDrop(Peer[QueueRules]):
    """A bounded queue between engines and trainer that drops its oldest groups, as in Applied Compute's article.

    The engines always have as many samples as they have places. A group enters the queue when all of its samples have
    ended. If the queue is then longer than its capacity, its oldest group is dropped. The trainer waits for a whole
    batch, takes the oldest groups, and publishes new weights after each step; running samples go on under them.
    """

    def __init__(self, config: Config, rules: QueueRules) -> None:
        super().__init__(World(config, colocated=False, limit=config.engine.max_sequences), rules)
        self._places = len(self._world.engines) * config.engine.max_sequences
        """Number of samples that run at once."""
        self._active = 0
        """Number of samples that run or wait for a place."""
        self._queue: deque[list[Finished]] = deque()
        """Complete groups, in the order in which they were completed."""

    async def run(self) -> PeerReport:
        """Train every step on the oldest queued groups, while samples run beside it, and report the run."""
        world = self._world
        await world.publish()
        async with anyio.create_task_group() as samples:
            self._samples: TaskGroup = samples
            samples.start_soon(self._start)
            for _ in range(world.config.run.steps):
                while len(self._queue) < world.groups_per_batch:
                    await self._changed.wait()
                await world.train([self._queue.popleft() for _ in range(world.groups_per_batch)])
                await world.publish()
            samples.cancel_scope.cancel()
        return world.report()

    async def _start(self) -> None:
        """Start groups, `stagger_s` apart, until all places are taken. From then on, `_sample` starts them."""
        while self._active < self._places:
            self._start_group()
            await anyio.sleep(self._rules.stagger_s)

    def _start_group(self) -> None:
        """Start the samples of a new group. Those without a place wait for one in the router."""
        tasks, group = self._world.next_group(), list[Finished]()
        self._active += len(tasks)
        for task in tasks:
            self._samples.start_soon(self._sample, task, group, len(tasks))

    async def _sample(self, task: Task, group: list[Finished], size: int) -> None:
        """Play one sample, start a new group if places are free, and queue the group if it has all `size` samples.

        If the queue is then longer than its capacity, its oldest group is dropped.
        """
        group.append(await self._world.play(task))
        self._active -= 1
        if self._active < self._places:
            self._start_group()
        if len(group) == size:
            self._queue.append(group)
            if len(self._queue) > self._rules.factor * self._world.groups_per_batch:
                self._queue.popleft()
            self._change()
