"""The rules of SkyRL's fully asynchronous trainer as marin runs it: groups that got too old are discarded.

A fixed number of workers generate one group each, as far as AReaL's capacity allows (`peers/areal.py`). A complete
group goes into a buffer of limited size; a worker waits with its group while the buffer is full. The trainer takes
groups in the order of the buffer, and discards each one whose oldest token is more than `max_age` versions old. New
weights abort the running requests, which go on from their tokens.
"""

from __future__ import annotations

import anyio
import msgspec
from anyio.streams.memory import MemoryObjectSendStream

from benchmarks.simulated.peers.areal import Rules as Capacity
from benchmarks.simulated.peers.areal import capacity
from benchmarks.simulated.peers.world import Finished, PeerReport, World
from flash.config.tree import Config
from flash.simulate.clock import run_virtual


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the trainer."""

    workers: int
    """`num_parallel_generation_workers`: groups that are generated at once."""
    buffer: int
    """`max_buffered_groups`: size of the buffer, in groups."""
    max_age: int
    """`max_staleness_steps`: largest age of a trained group, in versions."""


class Discarded(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a run."""

    report: PeerReport
    groups: float
    """Share of the groups that the trainer has seen that were discarded."""
    tokens: float
    """Share of the tokens that the trainer has seen that were discarded."""


def discard(config: Config, rules: Rules) -> Discarded:
    """Simulate a whole run under these rules on a new virtual clock."""
    return run_virtual(Discard(World(config, colocated=False), rules).run)


class Discard:
    """The rules, and the state of one run under them. An instance simulates one run."""

    def __init__(self, world: World, rules: Rules) -> None:
        self._world = world
        self._rules = rules
        self._running = 0
        """Number of groups that are being generated, or held by a worker that waits for the buffer."""
        self._accepted = 0
        """Number of groups that went into the buffer and were not discarded, in the whole run."""
        self._seen: list[tuple[bool, int]] = []
        """True for a discarded group, and its number of tokens, for each group that the trainer has taken."""
        self._changed = anyio.Event()
        """Set when the capacity may have grown, and then replaced."""

    async def run(self) -> Discarded:
        """Simulate every step of the run, and report it."""
        world, rules = self._world, self._rules
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
                    self._seen.append((stale, sum(sample.tokens for sample in group)))
                    if stale:
                        self._accepted -= 1
                        self._change()
                    else:
                        batch.append(group)
                await world.train(batch)
                await world.update()
                self._change()
            workers.cancel_scope.cancel()
        stale_tokens = sum(tokens for stale, tokens in self._seen if stale)
        return Discarded(
            report=world.report(),
            groups=sum(stale for stale, _ in self._seen) / len(self._seen),
            tokens=stale_tokens / sum(tokens for _, tokens in self._seen),
        )

    def _change(self) -> None:
        """Wake the workers that wait for capacity."""
        self._changed.set()
        self._changed = anyio.Event()

    async def _worker(self, send: MemoryObjectSendStream[list[Finished]]) -> None:
        """Generate one group after the other until cancelled, and put each one into the buffer."""
        world, bounds = self._world, Capacity(eta=self._rules.max_age)
        while True:
            while capacity(bounds, world.version, world.groups_per_batch, self._accepted, self._running) <= 0:
                await self._changed.wait()
            self._running += 1
            group = await world.play_group(world.tasks.issue(world.tasks.next_problem()))
            await send.send(group)
            self._running -= 1
            self._accepted += 1
