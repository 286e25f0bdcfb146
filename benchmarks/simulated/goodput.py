"""Goodput under failures, at 128 GPUs: trained tokens per second over those of the same run without failures.

Simulated: 12 nodes of 8 GPUs with engines and 4 with trainers. Each of the 16 nodes has a failure every 3 hours on
average, one in 11 minutes over all; of rollout nodes half end the whole node and half one engine. *Spot*: the rollout
nodes are preempted after 20 minutes on average, without warning, and are away for 5 minutes; trainers fail as before.
Either all processes restart from the last checkpoint (every 20 steps, and every step, which is its best case), or each
death costs its own work (`benchmarks.simulated.failures`). Three hours, mean and 95 % interval over eight draws of the
failures; steps since the last checkpoint count at the end.

The workload is rlvr_long with a model eight times as large: engines of eight GPUs at the same speed, eight times the
training per token, a sixteenth of the batch at α = 4. Assumed, not measured: a death is noticed after 10 s, an engine
starts in 180 s, trainers with the checkpoint in 120 s, a checkpoint holds the trainers for 20 s. The hub's own process
does not die.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import anyio
import msgspec

from benchmarks.form import Args, Row, main
from benchmarks.simulated.configure import workload
from benchmarks.simulated.failures import Costs, FailingWorld, Failure, RestartedWorld, draw_failures, spans_alive
from benchmarks.simulated.figure import bars
from flash.config.tree import Config
from flash.observe.stats import Interval, mean_interval
from flash.simulate.clock import run_virtual

HOUR_S = 3600.0
MEAN_S, SPOT_S = 3 * HOUR_S, HOUR_S / 3
"""Mean life of a node, and of one that is preempted."""
END_S, SEEDS = 3 * HOUR_S, 8
ROLLOUT_NODES, TRAINER_NODES = 12, 4
COSTS = Costs(every=20, save_s=20.0, noticed_s=10.0, engine_start_s=180.0, trainer_start_s=120.0, away_s=300.0)
NEVER = 1_000_000
"""Steps of a run that is cut off before."""


class Case(msgspec.Struct, frozen=True):
    """What is simulated. `together`: all restart; else each death costs its own work."""

    spot: bool
    together: bool
    every: int

    @property
    def name(self) -> str:
        """For the rows."""
        nodes = "spot nodes" if self.spot else "nodes"
        return f"{nodes}, {'all restart' if self.together else 'own work'}, every {self.every}"


CASES = [
    Case(spot, together, every) for spot in (False, True) for together, every in ((True, 20), (True, 1), (False, 20))
]


def configuration() -> Config:
    """See the module's docstring."""
    return workload(
        "rlvr_long",
        run={"steps": NEVER},
        engine={"stream_interval": 512},
        train={"batch_size": 256, "async_ratio": 4},
        simulate={"gpus_per_engine": 8, "train_token_s": 0.0016},
    )


def trained_tokens(case: Case, seed: int | None, end: float) -> int:
    """Tokens of the steps that stand at the end; without a seed nothing fails."""
    costs = msgspec.structs.replace(COSTS, every=case.every)
    failures: list[Failure] = []
    if seed is not None:
        spot_s = SPOT_S if case.spot else None
        failures = draw_failures(seed, ROLLOUT_NODES, TRAINER_NODES, MEAN_S, spot_s, COSTS.away_s, end)
    try:
        return run_virtual(all_restart if case.together else own_work, configuration(), failures, costs, end)
    finally:
        gc.collect()  # a world is large, and refers to itself


async def all_restart(config: Config, failures: Sequence[Failure], costs: Costs, end: float) -> int:
    """Life after life, each from the checkpoint that the ones before have left."""
    kept: bytes | None = None
    stands = last = 0
    for start, stop in spans_alive(failures, costs, end):
        await anyio.sleep(start - anyio.current_time())
        world = RestartedWorld(config, costs, kept)
        with anyio.move_on_after(stop - start):
            await world.run()
        tokens = [each.tokens for each in world.trainer.trained]
        stands += sum(tokens[: world.saving.saved])
        last = sum(tokens[world.saving.saved :]) if stop == end else 0
        kept = world.kept
    return stands + last


async def own_work(config: Config, failures: Sequence[Failure], costs: Costs, end: float) -> int:
    """One run; what was trained stays trained."""
    world = FailingWorld(config, costs)
    with anyio.move_on_after(end):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(world.strike, failures)
            await world.run()
    return sum(each.tokens for each in world.trainer.trained)


def measure(args: Args) -> list[Row]:
    """Goodput of each case."""
    end, seeds = (HOUR_S, 2) if args.quick else (END_S, SEEDS)
    undisturbed = Case(spot=False, together=False, every=COSTS.every)
    jobs = [(undisturbed, None, end), *((case, seed, end) for case in CASES for seed in range(seeds))]
    workers = min(len(jobs), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        whole, *tokens = pool.map(trained_tokens, *zip(*jobs, strict=True))
    rows: list[Row] = []
    for number, case in enumerate(CASES):
        shares = [count / whole for count in tokens[number * seeds : (number + 1) * seeds]]
        rows += as_rows(case.name, shares)
    return rows


def as_rows(name: str, shares: Sequence[float]) -> list[Row]:
    """The mean over the draws, with its interval."""
    same = len(set(shares)) == 1
    interval = Interval(shares[0], shares[0], shares[0]) if same else mean_interval(shares)
    return [
        Row(name, "goodput", "share", interval.mean),
        Row(name, "goodput_low", "share", max(0.0, interval.low)),
        Row(name, "goodput_high", "share", min(1.0, interval.high)),
    ]


if __name__ == "__main__":
    main(
        "goodput",
        __doc__ or "",
        measure,
        plot=bars("Goodput under failures", "share of the run without failures", "goodput"),
    )
