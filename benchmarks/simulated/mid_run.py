"""Throughput in the middle of a run, against the bound on capacity, and where the rest of the engines' time went.

Long-tailed answers (mean 11k tokens, cut at 32k), three of four GPUs with engines of 400k tokens of KV cache each;
batches of 32 samples per GPU. A run has as many steps before and after those that are measured as its buffer holds, and
one more: beginning and drain do not count. `engines` has a trainer four times as fast: the engines alone set the pace,
and what counts is how full their caches are.

The shares of the engines' time: `trained` decodes what is trained, at the speed of a full engine, `stale` what was too
old or withdrawn, `slowed` is what decoding took beyond full engines' speed, `idle` had nothing to decode, `paused` was
for new weights, `recomputed` made their KV cache again, `prefilled` that of prompts and of what had been put back or
moved. What was in the buffer at the beginning or at the end makes them differ from 1.

Each case and seed is a process of its own: 25 minutes of one core in all, of which 17 are for 128 GPUs.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from statistics import fmean

import anyio
import msgspec

from benchmarks.form import Args, Row, main
from benchmarks.simulated.configure import capacity_s, workload
from flash.config.simulate import SimulateConfig
from flash.config.tree import Config
from flash.hub import protocol as p
from flash.simulate.bounds import draw_episodes, quantities
from flash.simulate.clock import VirtualLoop
from flash.simulate.engine import SimEngine
from flash.simulate.meter import BUSY
from flash.simulate.report import SimReport
from flash.simulate.steps import SimSequence
from flash.simulate.world import World

GOALS = {(4, 1): 0.69, (4, 2): 0.95, (128, 2): 0.92}
"""Efficiency, by GPUs and async ratio."""
FAST_TRAINER = {"train_token_s": 5e-5}
MEASURED = {4: 16, 16: 10, 32: 8, 128: 5}
"""Steps that count, by GPUs."""
SEEDS = {4: 4, 16: 2, 32: 1, 128: 1}
"""Runs, from seed 0 on: batches of few groups differ in length."""


class Case(msgspec.Struct, frozen=True):
    """One run."""

    gpus: int
    ratio: int
    seed: int = 0
    engines: bool = False

    @property
    def name(self) -> str:
        """Without its seed."""
        return f"{self.gpus} GPUs, async ratio {self.ratio}, {'engines' if self.engines else 'balanced'}"

    @property
    def first(self) -> int:
        """The commit after which steps count."""
        return self.ratio + 2

    @property
    def last(self) -> int:
        """The last one that counts."""
        return self.first + MEASURED[self.gpus]

    def config(self) -> Config:
        """The run."""
        return workload(
            "rlvr_long",
            run={"steps": self.last + self.ratio + 2, "seed": self.seed},
            engine={"stream_interval": 512},
            train={"batch_size": 32 * self.gpus, "async_ratio": self.ratio},
            simulate={"gpus": self.gpus, "rollout_gpus": self.gpus * 3 // 4} | (FAST_TRAINER if self.engines else {}),
        )


class CountingEngine(SimEngine):
    """An engine that knows what it spent its time on."""

    decode_s = 0.0
    decoded = 0
    """Tokens."""
    prefilled = 0
    recomputed = 0
    """Tokens of context that were computed for requests that came, and for all after a swap."""
    moved = 0
    """Requests that had begun elsewhere."""

    def _join(self, sequence: SimSequence, context: int) -> None:
        before = self._cold
        super()._join(sequence, context)
        self.prefilled += self._cold - before
        self.moved += bool(sequence.request.generated and not sequence.sampled)

    def _swapped(self, now: float) -> None:
        before, keeps = self._cold, self._swap is not None and self._swap.keep_cache
        super()._swapped(now)
        self.recomputed += 0 if keeps else self._context - before

    def _stepped(self) -> None:
        stretch, steps = self._stretch, self._steps
        assert stretch is not None
        self.decode_s += stretch.after(steps) - stretch.start - stretch.first
        self.decoded += steps * len(self._running)
        super()._stepped()


class CountingWorld(World):
    """A run that remembers what its engines had done at each commit."""

    def __init__(self, config: Config) -> None:
        self.counted: list[dict[str, float]] = []
        super().__init__(config)

    def make_engine(self, index: int, settings: SimulateConfig | None = None) -> CountingEngine:
        """See `World`."""
        return CountingEngine(
            settings or self.settings,
            self.config.engine.max_sequences,
            self.workload.response_tokens,
            self.config.engine.stream_interval,
            on_change=lambda: self._changed(index),
        )

    def _saw_trainer(self, request: msgspec.Struct, reply: msgspec.Struct) -> None:
        super()._saw_trainer(request, reply)
        if not isinstance(request, p.Commit):
            return
        counted = defaultdict[str, float](float)
        for engine in self.engines:
            assert isinstance(engine, CountingEngine)
            for name in ("decode_s", "decoded", "prefilled", "recomputed", "moved"):
                counted[name] += getattr(engine, name)
            counted["preemptions"] += engine.pressure.preemptions
        for states in self.meter.read()[0]:
            counted["paused"] += states.get("swap", 0.0)
            counted["idle"] += sum(seconds for name, seconds in states.items() if name not in (BUSY, "swap"))
        ledger = self.hub.samples.ledger
        counted["trained"], counted["stale"] = ledger.trained_tokens, sum(ledger.discarded_tokens.values())
        counted["time"] = self._now()
        self.counted.append(counted)


def shares(case: Case) -> dict[str, float]:
    """What the steps of one run that count come to: see the module's docstring."""

    async def run() -> tuple[CountingWorld, SimReport]:
        world = CountingWorld(config)
        return world, world.report(await world.run())

    config = case.config()
    world, report = anyio.run(run, backend="asyncio", backend_options={"loop_factory": VirtualLoop})
    simulate, samples = world.settings, config.train.batch_size * MEASURED[case.gpus]
    begun, over = (world.counted[step - 1] for step in (case.first, case.last))
    done = {name: over[name] - begun[name] for name in over}
    known, drawn = quantities(config, report.ledger), draw_episodes(simulate, config.rollout.max_new_tokens, 1)
    token_s = simulate.sequence_s + simulate.context_s * drawn.context + simulate.step_s / known.per_engine
    engine_s = done["time"] * simulate.rollout_gpus
    return {
        "efficiency": MEASURED[case.gpus] * capacity_s(config, report) / done["time"],
        "trained": done["trained"] * token_s / engine_s,
        "stale": done["stale"] * token_s / engine_s,
        "slowed": (done["decode_s"] - done["decoded"] * token_s) / engine_s,
        "idle": done["idle"] / engine_s,
        "paused": done["paused"] / engine_s,
        "recomputed": done["recomputed"] * simulate.prefill_s / engine_s,
        "prefilled": done["prefilled"] * simulate.prefill_s / engine_s,
        "preemptions": done["preemptions"] / samples,
        "moves": done["moved"] / samples,
    }


def measure(args: Args) -> list[Row]:
    """Rows of each case, means over its seeds."""
    cases = [Case(4, 2)] if args.quick else [Case(gpus, ratio) for gpus in MEASURED for ratio in (1, 2, 4)]
    cases.append(Case(4, 4, engines=True))
    jobs = [msgspec.structs.replace(case, seed=seed) for case in cases for seed in range(SEEDS[case.gpus])]
    if args.quick:
        jobs = cases
    jobs.sort(key=lambda job: -job.gpus * job.last)
    workers = min(len(jobs), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        results = list(zip(jobs, pool.map(shares, jobs), strict=True))
    rows: list[Row] = []
    for case in cases:
        found = [result for job, result in results if job.name == case.name]
        goal = 0.95 if case.engines else GOALS.get((case.gpus, case.ratio))
        for name in found[0]:
            unit = "per sample" if name in ("preemptions", "moves") else "share"
            value = fmean(result[name] for result in found)
            rows.append(Row(case.name, name, unit, value, goal=goal if name == "efficiency" else None))
    return rows


if __name__ == "__main__":
    main("mid_run", __doc__ or "", measure)
