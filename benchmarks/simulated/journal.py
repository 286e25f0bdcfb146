"""What the hub's journal costs: 10,000 episodes in flight, each of which brings home 4,000 tokens.

The hub and its peers are those of `hub_scale`: the real hub behind its real server, bare peers in a process of their
own. Results come as fast as they are acknowledged. The rate is by the CPU time of the hub's process, its writing thread
included. The lag is how much later than it was to a task of the loop wakes up that sleeps for 5 ms, on the wall clock:
other work on the machine counts too. The longest pass of the loop, for which every timer waits, is in CPU time.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter, thread_time

import anyio
import numpy as np

from benchmarks.form import Args, Row, main
from benchmarks.simulated.hub_peers import Order
from benchmarks.simulated.hub_scale import Size, Taken, TimedLoop, scene, settings
from flash.run.restart.journal import FileJournal, JournalPlace, replay_journal
from flash.samples.journal import NO_JOURNAL, Journal
from flash.samples.replay import Replay

RATE_GOAL = 5000
LAG_GOAL_MS = 20
TOKENS = 4000
PER_MESSAGE = 16
"""Results in a message: half a megabyte, as nodes send it."""
NAP_S = 0.005
POLICIES = ("off", "write", "fsync")


@asynccontextmanager
async def journal_in(run_dir: Path, policy: str) -> AsyncGenerator[Journal]:
    """A journal, written for the length of the block."""
    if policy == "off":
        yield NO_JOURNAL
        return
    journal = FileJournal(run_dir, 0, JournalPlace(0, 0), to_disk=policy == "fsync", tell=print)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(journal.run)
        yield journal
        await journal.written()
        tasks.cancel_scope.cancel()


class PassLoop(TimedLoop):
    """Measures each pass, from the waiting timers and sockets to the next look at them."""

    def __init__(self) -> None:
        super().__init__()
        self.passes_s: list[float] = []

    def _run_once(self) -> None:
        begun = thread_time()
        super()._run_once()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        self.passes_s.append(thread_time() - begun)


async def watch_lag(lags_s: list[float]) -> None:
    """Note how late a task wakes up, again and again."""
    while True:
        due = anyio.current_time() + NAP_S
        await anyio.sleep(NAP_S)
        lags_s.append(anyio.current_time() - due)


async def deliver(policy: str, size: Size, results: int, run_dir: Path) -> list[Row]:
    """Results from all nodes at once, as fast as the hub acknowledges them."""
    taken, lags_s, seconds, longest_pass_s, generated = Taken(0.0, 0.0), list[float](), 0.0, 0.0, 0
    async with (
        journal_in(run_dir, policy) as journal,
        scene(size, settings(size.samples // 2, 1.0), journal=journal) as run,
        anyio.create_task_group() as tasks,
    ):
        await run.fill(size.samples)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, PassLoop)
        tasks.start_soon(watch_lag, lags_s)
        loop.passes_s.clear()
        begun = perf_counter()
        taken = await run.do(Order("deliver", count=results, per_message=PER_MESSAGE, tokens=TOKENS))
        seconds = perf_counter() - begun
        longest_pass_s = max(loop.passes_s)
        tasks.cancel_scope.cancel()
        generated = run.hub.samples.ledger.generated_tokens
    case = f"journal: {policy}"
    rows = [
        Row(case, "trajectories_per_s", "1/s", results / taken.cpu_s, goal=RATE_GOAL),
        Row(case, "wall_trajectories_per_s", "1/s", results / seconds),
        Row(case, "loop_lag_p50_ms", "ms", 1e3 * float(np.quantile(lags_s, 0.5))),
        Row(case, "loop_lag_p99_ms", "ms", 1e3 * float(np.quantile(lags_s, 0.99)), goal=LAG_GOAL_MS),
        Row(case, "longest_pass_ms", "ms", 1e3 * longest_pass_s, goal=LAG_GOAL_MS),
    ]
    if policy != "off":
        begun = perf_counter()
        replay = Replay(None, 0)
        replay_journal(run_dir, 0, 0, replay)
        state = replay.state(until=0)
        assert state is not None
        assert state.ledger.generated_tokens == generated
        rows.append(Row(case, "restored_trajectories_per_s", "1/s", results / (perf_counter() - begun)))
    return rows


def measure(args: Args) -> list[Row]:
    """Each policy with a hub and a folder of its own."""
    size = Size(nodes=25, engines=4, samples=2_000 if args.quick else 10_000)
    results = size.samples * 4 // 5
    rows: list[Row] = []
    for policy in POLICIES:
        with tempfile.TemporaryDirectory() as folder:
            options = {"loop_factory": PassLoop}
            rows += anyio.run(deliver, policy, size, results, Path(folder), backend="asyncio", backend_options=options)
    return rows


if __name__ == "__main__":
    main("journal", __doc__ or "", measure)
