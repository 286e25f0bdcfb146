"""The scheduler under load: thousands of sandboxes over simulated hosts, on the virtual clock.

The real pool with its queue, placement, leases and journal; only engines and sandboxes are simulated. Eight owners want
more than there is: one asks for half of everything at once, sandboxes are small and large, short and long, with
priorities. Times are of this process: what the decisions cost, and how many sandboxes are placed, served and closed in
a second of it. `worst_share`: at every simulated second after a warm-up, what the worst-off owner that still waits has,
over an equal share.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Sequence

import anyio
import msgspec
import numpy as np

from benchmarks.form import Row
from envs.sandbox.api import MAX_TIMEOUT_S, Spec
from envs.sandbox.pool.admission import NOTHING, Demand
from envs.sandbox.pool.host import HostSettings
from envs.sandbox.pool.local_host import LocalHost
from envs.sandbox.pool.ownership import Identity, Labels, OwnerAlive
from envs.sandbox.pool.pool import SandboxPool, open_pool
from envs.sandbox.pool.simulated import SimulatedMaker
from envs.sandbox.pool.state import PoolSettings, PoolState
from flash.errors import SandboxError
from flash.simulate.clock import run_virtual

OWNERS = 8
CPUS = 50
"""Of each host."""
GREEDY = 1.0
"""Sandboxes that the first owner wants at a time, over all that there are; the others want `MODEST`."""
MODEST = 0.25
LARGE = 0.1
"""Share of the sandboxes that have two CPUs; the others have one."""
HOLD_S = (20.0, 40.0)
"""Mean time for which a sandbox is used: of the first owner and of the last."""
WARM_UP = 1 / 3
"""Share of the time that passes before shares are looked at: at first, who asks first has everything."""
SHARE_GOAL = 0.9


class Scale(msgspec.Struct, frozen=True):
    """How much is simulated."""

    sandboxes: int
    """At a time."""
    seconds: float

    @property
    def hosts(self) -> int:
        """As many as hold them."""
        return math.ceil(self.sandboxes * (1 + LARGE) / CPUS)


FULL, QUICK = Scale(2000, 180.0), Scale(400, 90.0)


class Seen(msgspec.Struct):
    """What a run showed."""

    real_s: float = 0.0
    placed: int = 0
    most: int = 0
    """Sandboxes at a time."""
    left: int = 0
    """Sandboxes in the end."""
    decisions_s: list[float] = []
    shares: list[float] = []
    over: bool = False


def scheduler(quick: bool) -> list[Row]:
    """The rows of one run."""
    scale = QUICK if quick else FULL
    return rows(scale, simulate(scale))


def simulate(scale: Scale) -> Seen:
    """Run the simulated load once; what was seen of it."""
    return run_virtual(_compete, scale)


def rows(scale: Scale, seen: Seen) -> list[Row]:
    """What a run comes to."""
    case = f"{scale.sandboxes:,} sandboxes on {scale.hosts} simulated hosts"
    decisions_ms = np.array(seen.decisions_s) * 1e3
    return [
        Row(case, "at_once", "sandboxes", seen.most),
        Row(case, "placements", "sandboxes", seen.placed),
        Row(case, "placements_per_s", "1/s", seen.placed / seen.real_s),
        Row(case, "decision_ms_median", "ms", statistics.median(decisions_ms.tolist())),
        Row(case, "decision_ms_p99", "ms", float(np.percentile(decisions_ms, 99))),
        Row(case, "worst_share", "of an equal one", min(seen.shares), goal=SHARE_GOAL),
        Row(case, "leaked", "sandboxes", seen.left, goal=0),
    ]


async def _compete(scale: Scale) -> Seen:
    """Let the owners compete for a while."""
    makers = [SimulatedMaker(Demand(1000 * CPUS, 1 << 20), start_s=0.3, spread=0.3, seed=i) for i in range(scale.hosts)]
    seen = Seen()
    async with open_pool(
        [_host(f"host-{number:03}", maker) for number, maker in enumerate(makers)],
        settings=PoolSettings(max_waiting=10 * scale.sandboxes),
        wall=_wall,
    ) as pool:
        seen.decisions_s = timed_decisions(pool.state)
        begin = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for owner in range(OWNERS):
                for number in range(round(scale.sandboxes * (MODEST if owner else GREEDY))):
                    tasks.start_soon(_client, pool, owner, random.Random(f"{owner}.{number}"), seen)
            await _watch(pool, scale, seen, makers)
            # Without the end: that thousands are closed in one instant is no part of what is measured.
            seen.real_s = time.perf_counter() - begin
            seen.over = True
            for lease in pool.state.leases.all():
                lease.end("the run is over")
        # A start that was cut off may leave its sandbox to its host's next look.
        await anyio.sleep(2 * HostSettings().look_s)
    seen.left = sum(len(maker.sandboxes) for maker in makers)
    return seen


async def _client(pool: SandboxPool, owner: int, draw: random.Random, seen: Seen) -> None:
    """One rollout after another, each in a sandbox of its own."""
    first, last = HOLD_S
    mean = first + (last - first) * owner / (OWNERS - 1)
    while not seen.over:
        spec = Spec(image="simulated", cpus=2.0 if draw.random() < LARGE else 1.0)
        try:
            async with pool.acquire(
                spec, owner=f"owner-{owner}", priority=draw.randrange(3), deadline=math.inf
            ) as sandbox:
                seen.placed += 1
                await sandbox.run(["sleep", str(draw.expovariate(1 / mean))], timeout=MAX_TIMEOUT_S)
        except SandboxError:
            if not seen.over:
                raise


async def _watch(pool: SandboxPool, scale: Scale, seen: Seen, makers: Sequence[SimulatedMaker]) -> None:
    """Look at the shares once a second, until the time is over."""
    whole = Demand(1000 * CPUS * scale.hosts, scale.hosts << 20)
    await anyio.sleep(WARM_UP * scale.seconds)
    while anyio.current_time() < scale.seconds:
        usage, waiting = pool.state.admission.usage(), pool.state.admission.waiting()
        seen.shares += [usage.get(owner, NOTHING).share_of(whole) * OWNERS for owner in waiting]
        seen.most = max(seen.most, sum(len(maker.sandboxes) for maker in makers))
        await anyio.sleep(1)


def timed_decisions(state: PoolState) -> list[float]:
    """Have every decision of a pool timed; the seconds that each took."""
    seconds: list[float] = []
    decide = state.decide

    def timed() -> None:
        begin = time.perf_counter()
        decide()
        seconds.append(time.perf_counter() - begin)

    state.decide = timed
    return seconds


def _host(name: str, maker: SimulatedMaker) -> LocalHost:
    def unknown(labels: Labels, machine: str) -> OwnerAlive:
        return OwnerAlive.UNKNOWN

    # Promised is what there is, and nothing is kept ready: every placement is a decision on a full house.
    settings = HostSettings(cpu_factor=1.0, memory_factor=1.0, warm_max=0, starts_at_once=CPUS)
    identity = Identity("benchmark", "/nowhere", "machine", "run")
    return LocalHost(name, maker, identity, settings=settings, alive=unknown, wall=_wall)


def _wall() -> float:
    return 1e9 + anyio.current_time()
