"""What the hub of a large run costs: 125 nodes of 8 engines, 100,000 samples in flight.

The real hub behind its real server, on the real clock and TCP over loopback. The peers are bare: they run no engine and
no episode, and live in a process of their own (`hub_peers`), so that what is measured is the hub's process alone. 1,250
requests wait in the hub all the time, as they do in a run: each engine for its next version, each node for cancels and
for leases. A call is one uninterrupted turn of the loop's thread, in CPU time: for so long nobody else is served.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import secrets
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain
from typing import Any

import anyio
import msgspec
import numpy as np
from anyio.abc import ByteSendStream
from anyio.lowlevel import checkpoint
from anyio.streams.text import TextReceiveStream

from benchmarks.form import ROOT, Args, Row, main
from benchmarks.simulated.configure import configure
from benchmarks.simulated.hub_peers import Order
from flash.config.tree import Config
from flash.hub import protocol as p
from flash.hub.hub import Hub
from flash.hub.recovery import Persistence
from flash.observe.observer import MemoryObserver
from flash.samples.batches import split_into_shards
from flash.samples.journal import NO_JOURNAL, Journal
from flash.samples.rules import ONE_KIND
from flash.transport.frames import Request
from flash.transport.server import Peer, serve
from flash.types import Batch, Outcome, Span, Task, Trajectory, Turn, VersionRun
from flash.waiting import rare_garbage_collection

CALL_GOAL_MS = 20
RATE_GOAL = 2000
GROUP = 8
RANKS = 8
WAITING_PER_NODE = 2
"""Beside those of its engines: for cancels and for leases."""


class Size(msgspec.Struct, frozen=True):
    """How large the run is."""

    nodes: int = 125
    engines: int = 8
    samples: int = 100_000
    """In flight."""
    singles: int = 5_000
    """Results handed in one by one."""
    held_back: int = 16_000
    """Results while a step is held back."""

    @property
    def case(self) -> str:
        return f"{self.samples:,} in flight, {self.nodes} x {self.engines} engines"


SMALL = Size(nodes=25, samples=10_000, singles=1_000, held_back=1_600)


# -- the loop and its clock ------------------------------------------------------------------------------------------


class TimedLoop(asyncio.SelectorEventLoop):
    """Measures each turn of a task in CPU time of the loop's thread."""

    def __init__(self) -> None:
        super().__init__()
        self.longest_s = 0.0
        self.turns_s = 0.0

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.Handle:
        return super().call_soon(self._timed, callback, *args, context=context)

    def _timed(self, callback: Callable[..., Any], *args: Any) -> None:
        begun = time.thread_time()
        callback(*args)
        taken = time.thread_time() - begun
        self.turns_s += taken
        self.longest_s = max(self.longest_s, taken)


class Taken(msgspec.Struct):
    """What a part of a scene took."""

    longest_ms: float
    cpu_s: float
    """Of the hub's whole process."""


class Scene:
    """One hub with its peers."""

    def __init__(self, hub: Hub, orders: ByteSendStream, answers: TextReceiveStream) -> None:
        self.hub = hub
        self._orders = orders
        self._answers = answers

    async def do(self, *orders: Order) -> Taken:
        """Let the peers do something, one after the other; what that took of the hub's process."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, TimedLoop)
        loop.longest_s, begun = 0.0, time.process_time()
        for order in orders:
            await self._orders.send(msgspec.json.encode(order) + b"\n")
            await self._answers.receive()
        return Taken(loop.longest_s * 1e3, time.process_time() - begun)

    async def fill(self, samples: int) -> Taken:
        """Begin the run, and let the nodes hold so many leases while everything waits that waits in a run."""
        await self.do(Order("publish"))
        taken = await self.do(Order("lease", count=samples))
        assert self.hub.samples.in_flight >= samples, self.hub.samples.in_flight
        await self.do(Order("listen"))
        return taken


class _Forgetful(MemoryObserver):
    """Keeps no samples: they would fill the memory."""

    def batch(self, batch: Any) -> None: ...


@asynccontextmanager
async def scene(
    size: Size, config: Config, kind_of: Callable[[int], str] = lambda seed: "", journal: Journal = NO_JOURNAL
) -> AsyncGenerator[Scene]:
    """A hub that listens, and a process with all its peers."""
    problems, records = ONE_KIND._replace(kind_of=kind_of), Persistence(journal=journal)
    hub = Hub(config, _Forgetful(), now=time.time, problems=problems, persistence=records)
    token = secrets.token_bytes(32)

    async def handler(peer: Peer, request: Request[Any]) -> msgspec.Struct:
        return await hub.handle(request)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hub.run)
        port = await tasks.start(partial(serve, deadline=60), "127.0.0.1", 0, token, p.HubRequest, handler)
        numbers = (port, token.hex(), size.nodes, size.engines, RANKS)
        command = [sys.executable, "-m", "benchmarks.simulated.hub_peers", *map(str, numbers)]
        with rare_garbage_collection():
            async with await anyio.open_process(command, cwd=ROOT, stderr=None) as process:
                assert process.stdin is not None
                assert process.stdout is not None
                yield Scene(hub, process.stdin, TextReceiveStream(process.stdout))
                await process.stdin.aclose()
        tasks.cancel_scope.cancel()


def settings(batch: int, alpha: float, steps: int = 100, **rollout: Any) -> Config:
    """A run whose admission lets (1 + α) · `batch` samples be on their way."""
    return configure(
        run={"name": "hub_scale", "steps": steps},
        rollout={"group_size": GROUP, "retries": 0, "breaker": 1 << 30} | rollout,
        train={"batch_size": batch, "async_ratio": alpha},
        cluster={"gpus_per_node": RANKS, "trainer_ranks": RANKS},
        eval={"every": 0, "problems": 1},
    )


# -- scenes ----------------------------------------------------------------------------------------------------------


def _call(case: str, name: str, taken: Taken) -> list[Row]:
    return [
        Row(case, f"{name}_longest_call_ms", "ms", taken.longest_ms, goal=CALL_GOAL_MS),
        Row(case, f"{name}_cpu_ms", "ms", 1e3 * taken.cpu_s),
    ]


async def _resident_bytes() -> int:
    gc.collect()
    # A turn of its own: the collection is none of the hub's calls.
    await checkpoint()
    fields = await anyio.Path("/proc/self/statm").read_text()
    return int(fields.split()[1]) * resource.getpagesize()


async def steps(size: Size) -> list[Row]:
    """A step at full size: leases, results, the batch, its commit, and the next version at all engines."""
    batch = size.samples // 2
    async with scene(size, settings(batch, 1.0)) as run:
        await run.do(Order("publish"))
        before = await _resident_bytes()
        leased = await run.do(Order("lease", count=size.samples))
        leased_bytes = (await _resident_bytes() - before) / size.samples
        await run.do(Order("listen"))
        singly = await run.do(Order("deliver", count=size.singles))
        gathered = await run.do(Order("deliver", count=size.samples - GROUP - size.singles, per_message=16))
        done_bytes = (await _resident_bytes() - before) / size.samples
        taken = await run.do(Order("train", version=0))
        committed = await run.do(Order("commit", version=0))
        # The second is announced when the last engine has reported the first.
        stored = await run.do(Order("snapshot"))
        swapped = await run.do(Order("publish", version=1), Order("publish", version=2))
    case = size.case
    return [
        Row(case, "lease_messages_longest_call_ms", "ms", leased.longest_ms, goal=CALL_GOAL_MS),
        Row(case, "leases_per_s", "1/s", size.samples / leased.cpu_s),
        Row(case, "result_messages_longest_call_ms", "ms", max(singly.longest_ms, gathered.longest_ms), goal=20),
        Row(case, "messages_of_one_result_per_s", "1/s", size.singles / singly.cpu_s, goal=RATE_GOAL),
        Row(case, "results_per_s", "1/s", (size.samples - GROUP - size.singles) / gathered.cpu_s, goal=RATE_GOAL),
        *_call(case, "take_and_deal", taken),
        *_call(case, "commit", committed),
        *_call(case, "snapshot", stored),
        *_call(case, "swap_of_all_engines", swapped),
        Row(case, "leased_sample_bytes", "B", leased_bytes),
        Row(case, "finished_sample_bytes", "B", done_bytes),
    ]


async def held_back(size: Size) -> list[Row]:
    """`on_expire = "wait"` at α = 1.5: a trainer waits for a step that stragglers hold back, result by result."""
    batch = size.samples * 2 // 5
    async with scene(size, settings(batch, 1.5, on_expire="wait")) as run:
        await run.fill(batch * 5 // 2)
        await run.do(Order("deliver", count=batch + GROUP, per_message=16))
        await run.do(Order("train", version=0), Order("commit", version=0), Order("publish", version=1))
        # All of the next batch but one sample of each eighth group: whoever is late holds the step back.
        taken = Taken(0.0, 0.0)
        async with anyio.create_task_group() as tasks:
            trainer = anyio.Event()

            async def wait_for_batch() -> None:
                with anyio.move_on_after(600):
                    await run.hub.handle(p.BatchRequest(0, 1, []))
                trainer.set()

            tasks.start_soon(wait_for_batch)
            taken = await run.do(Order("deliver", count=size.held_back, per_message=1, version=0))
            tasks.cancel_scope.cancel()
    case = f"{size.held_back:,} results while `wait` holds a step back"
    return [
        Row(case, "results_per_s", "1/s", size.held_back / taken.cpu_s, goal=RATE_GOAL),
        Row(case, "longest_call_ms", "ms", taken.longest_ms, goal=CALL_GOAL_MS),
    ]


async def quarantine(size: Size) -> list[Row]:
    """One of two kinds keeps failing: half of all that is in flight is given up at once."""
    config = settings(size.samples // 2, 1.0, quarantine=16)
    async with scene(size, config, lambda seed: "bad" if seed % 2 else "good") as run:
        await run.fill(size.samples)
        taken = await run.do(Order("fail", count=16, per_message=16, kind="bad"))
    return _call(f"{size.samples:,} in flight, half of them quarantined", "quarantine", taken)


async def close(size: Size) -> list[Row]:
    """The last step is over, and redundant groups left all but one batch behind."""
    config = settings(64, 1.0, steps=1, extra_groups=size.samples // GROUP)
    async with scene(size, config) as run:
        await run.fill(size.samples)
        await run.do(Order("deliver", count=64, per_message=16))
        await run.do(Order("train", version=0), Order("commit", version=0), Order("publish", version=1))
        taken = await run.do(Order("train", version=1))
    return _call(f"{size.samples:,} left over at the end", "close", taken)


def branches(count: int, length: int = 10_000, own: int = 1000) -> list[Row]:
    """An episode of so many branches, which begin alike, and its group are dealt to two shards."""
    rng, acted = np.random.default_rng(0), count * own
    tokens = np.tile(rng.integers(0, 1000, length, dtype="<i4"), (count, 1))
    tokens[:, -own:] = rng.integers(0, 1000, (count, own))
    episode = Trajectory(
        task=Task(0, 0, 0, seed=0),
        outcome=Outcome.OK,
        reward=1.0,
        token_ids=tokens.tobytes(),
        action_spans=[Span((at + 1) * length - own, (at + 1) * length) for at in range(count)],
        logprobs=bytes(4 * acted),
        versions=[VersionRun(0, acted)],
        turns=[Turn("", "", 0.0, 0.0, 0.0, 0.0, branch=at) for at in range(count)],
        branches=tuple(range(0, count * length, length)),
    )
    slices, begun = list[float](), time.thread_time()
    for _ in chain(split_into_shards(Batch(0, 0, [episode, episode], []), 2), [None]):
        slices.append(1e3 * (time.thread_time() - begun))
        begun = time.thread_time()
    case = f"two episodes of {count:,} branches of {length:,} tokens"
    return [
        Row(case, "deal_longest_call_ms", "ms", max(slices), goal=CALL_GOAL_MS),
        Row(case, "deal_cpu_ms", "ms", sum(slices)),
    ]


def measure(args: Args) -> list[Row]:
    """Each scene with a hub of its own."""
    size = SMALL if args.quick else Size()
    options = {"loop_factory": TimedLoop}
    return [
        *branches(100 if args.quick else 1000),
        *(
            row
            for play in (steps, held_back, quarantine, close)
            for row in anyio.run(play, size, backend="asyncio", backend_options=options)
        ),
    ]


if __name__ == "__main__":
    main("hub_scale", __doc__ or "", measure)
