"""What one event loop carries, on the real clock.

Episodes: the real hub, scheduler, episodes and proxy with 10,000 episodes alive on one node, around simulated engines
whose timers run in real time: 40 engines of 200 places, each at a speed of its own; responses of about 600 tokens, of
which every 64th step delivers a piece; one to three turns, with environments that take 5 s on average. A trainer takes
a batch of 512 samples whenever one is there. Measured after a minute, when episodes end and begin all the time: how
late a timer of 5 ms fires, and, since other work on the machine delays it too, how much CPU time the loop took from its
start to its end.

Hub: trajectories of 4,000 tokens (3,500 sampled) in result messages of 16, from their frame's bytes through codec,
buffer and ledger to the encoded batch for the trainer and its commit. CPU time of one core; the node's encoding and the
trainer's decoding, which happen in other processes, are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import anyio
import msgspec
import numpy as np

from benchmarks.form import Args, Row, main
from benchmarks.simulated.configure import configure
from flash.config.simulate import SimulateConfig
from flash.config.tree import Config
from flash.hub import protocol as p
from flash.hub.hub import Hub
from flash.observe.observer import MemoryObserver
from flash.simulate.engine import SimEngine
from flash.simulate.world import World
from flash.transport.frames import FrameDecoder, FrameKind, append_frame
from flash.types import Canary, Lease, Outcome, Published, Span, Trajectory, Turn, VersionRun

EPISODES = 10_000
ENGINES = 40
TICK_S = 0.005
"""Sleep whose lateness is the loop's lag."""
WARM_UP_S = 60.0
BATCH = 512
LAG_GOAL_MS = 20
TOKENS, PROMPT = 4000, 500
PER_MESSAGE = 16
RATE_GOAL = 2000


# -- episodes --------------------------------------------------------------------------------------------------------


class Uneven(World):
    """Engines of different speeds: equal ones would deliver at the same instants, as no real ones do."""

    def make_engine(self, index: int, settings: SimulateConfig | None = None) -> SimEngine:
        step_s = self.settings.step_s * (0.8 + 0.4 * index / ENGINES)
        return super().make_engine(index, msgspec.structs.replace(self.settings, step_s=step_s))


def crowd() -> Config:
    """10,000 episodes on one node."""
    return configure(
        run={"name": "loop_load", "steps": 1000},
        rollout={"group_size": 8, "max_concurrent": EPISODES},
        train={"batch_size": BATCH, "async_ratio": 40},
        engine={"max_sequences": 200, "stream_interval": 64},
        simulate={
            "gpus": ENGINES + 1,
            "rollout_gpus": ENGINES,
            "nodes": 1,
            "step_s": 0.02,
            "sequence_s": 0.0,
            "context_s": 0.0,
            "prefill_s": 0.0,
            "swap_s": 0.5,
            "train_step_s": 1.0,
            "train_token_s": 0.0,
            "response_tokens": {"kind": "lognormal", "mean": 600, "deviation": 300, "low": 1},
            "turns": {"kind": "uniform", "low": 0.5, "high": 3.5},
            "env_s": {"kind": "exponential", "mean": 5},
        },
    )


async def ticks(seconds: float) -> tuple[list[float], list[float]]:
    """How late each tick is, and how much CPU time the loop took meanwhile; seconds."""
    late: list[float] = []
    cpu: list[float] = []
    end = anyio.current_time() + seconds
    while (now := anyio.current_time()) < end:
        begun = time.thread_time()
        await anyio.sleep(TICK_S)
        late.append(anyio.current_time() - now - TICK_S)
        cpu.append(time.thread_time() - begun)
    return late, cpu


async def load(seconds: float) -> list[Row]:
    """Rows of a loop with all episodes alive."""
    world = Uneven(crowd())
    rows: list[Row] = []
    async with anyio.create_task_group() as group:
        group.start_soon(world.run)
        await anyio.sleep(WARM_UP_S)
        rows += await steady(world, seconds)
        group.cancel_scope.cancel()
    return rows


async def steady(world: World, seconds: float) -> list[Row]:
    """Rows of a time in which episodes end and begin."""
    steps, start = len(world.trainer.commits), anyio.current_time()
    late, cpu = await ticks(seconds)
    passed = anyio.current_time() - start
    late_ms, cpu_ms = np.array(late) * 1e3, np.array(cpu) * 1e3
    case = f"{EPISODES:,} episodes"
    return [
        Row(case, "alive_at_the_end", "episodes", world.nodes[0].alive),
        Row(case, "loop_lag_p50_ms", "ms", float(np.percentile(late_ms, 50))),
        Row(case, "loop_lag_p99_ms", "ms", float(np.percentile(late_ms, 99)), goal=LAG_GOAL_MS),
        Row(case, "loop_lag_max_ms", "ms", float(late_ms.max())),
        Row(case, "cpu_per_tick_p99_ms", "ms", float(np.percentile(cpu_ms, 99))),
        Row(case, "cpu_per_tick_max_ms", "ms", float(cpu_ms.max())),
        Row(case, "core_used", "share", float(np.sum(cpu)) / passed),
        Row(case, "trained_samples_per_s", "1/s", (len(world.trainer.commits) - steps) * BATCH / passed),
    ]


# -- the hub ---------------------------------------------------------------------------------------------------------


class Crossing:
    """Sends trajectories through a hub, and counts what that takes."""

    def __init__(self, batch: int, steps: int) -> None:
        config = configure(
            run={"name": "hub", "steps": steps},
            rollout={"group_size": 8},
            train={"batch_size": batch, "async_ratio": 1},
            cluster={"gpus_per_node": 0},
            eval={"every": 0, "problems": 1},
        )
        self._hub = Hub(config, _Forgetful(), now=anyio.current_time)
        self._batch, self._steps = batch, steps
        self._decode: Callable[[memoryview], Any] = msgspec.msgpack.Decoder(p.HubRequest).decode
        rng = np.random.default_rng(0)
        self._ids = rng.integers(0, 150_000, TOKENS).astype("<i4").tobytes()
        self._logprobs = rng.normal(-1, 0.5, TOKENS - PROMPT).astype("<f4").tobytes()
        self.cpu_s = 0.0
        self.samples = 0

    async def run(self) -> None:
        """Hand the hub every step's results and take its batches, as a node and a trainer would."""
        await self._publish(0)
        engine = p.EngineStatus(index=0, version=0, idle_s=0.0, lifetime_s=1.0, canary_error=0.0)
        for step in range(self._steps):
            await self._hub.handle(p.EngineReport(0, step + 1, [msgspec.structs.replace(engine, version=step)], []))
            while self.samples < (step + 1) * self._batch:
                await self._round_trip(step)
            await self._timed(self._train, step)
            await self._publish(step + 1)

    async def _publish(self, version: int) -> None:
        await self._hub.handle(p.PublishRequest(Published(version, "tcp", b"", Canary([0, 0], [-1.0]))))

    async def _round_trip(self, step: int) -> None:
        """Lease, make up results, hand them in."""
        replies: list[p.LeaseReply] = []

        async def lease() -> None:
            reply = await self._hub.handle(p.LeaseRequest(0, PER_MESSAGE))
            replies.append(reply)

        await self._timed(lease)
        leases = replies[0].leases
        frame = bytearray()
        ended = [p.EndedLease(lease.lease_id, self._trajectory(lease, step)) for lease in leases]
        append_frame(frame, FrameKind.REQUEST, 1, p.DeliverRequest(0, ended, PER_MESSAGE))
        await self._timed(self._deliver, bytes(frame))
        self.samples += sum(lease.task.split == "train" for lease in leases)

    async def _deliver(self, data: bytes) -> None:
        (frame,) = FrameDecoder().feed(data)
        reply = await self._hub.handle(self._decode(frame.body))
        append_frame(bytearray(), FrameKind.REPLY, 1, reply)

    async def _train(self, step: int) -> None:
        reply = await self._hub.handle(p.BatchRequest(0, step, []))
        append_frame(bytearray(), FrameKind.REPLY, 2, reply)
        await self._hub.handle(p.Commit(step, {}))

    async def _timed(self, call: Callable[..., Any], *args: Any) -> None:
        start = time.process_time()
        await call(*args)
        self.cpu_s += time.process_time() - start

    def _trajectory(self, lease: Lease, step: int) -> Trajectory:
        sampled = TOKENS - PROMPT
        return Trajectory(
            task=lease.task,
            outcome=Outcome.OK,
            reward=float(lease.task.sample_index % 2),
            token_ids=self._ids,
            action_spans=[Span(PROMPT, TOKENS)],
            logprobs=self._logprobs,
            versions=[VersionRun(step, sampled)],
            turns=[Turn("x" * 2 * PROMPT, "y" * 4 * sampled, 1.0, 0.0, 1.0, 0.0)],
        )


class _Forgetful(MemoryObserver):
    """Keeps no samples: they would fill the memory."""

    def batch(self, batch: Any) -> None: ...


async def hub_rows(steps: int) -> list[Row]:
    """Rows of the hub."""
    crossing = Crossing(batch=BATCH, steps=steps)
    await crossing.run()
    case = f"hub, {TOKENS:,} tokens each"
    rate = crossing.samples / crossing.cpu_s
    return [Row(case, "trajectories_per_s", "1/s", rate, goal=RATE_GOAL), Row(case, "cpu_ms", "ms", 1e3 / rate)]


def measure(args: Args) -> list[Row]:
    """The hub alone, then a node full of episodes."""
    return [*anyio.run(hub_rows, 4 if args.quick else 20), *anyio.run(load, 15.0 if args.quick else 60.0)]


if __name__ == "__main__":
    main("loop_load", __doc__ or "", measure)
