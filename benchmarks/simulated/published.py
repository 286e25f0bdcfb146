"""Predictions of tables that others have published: at most one constant of a table is fitted, on one of its rows.

The other constants are published inputs, some of them times of the same runs, or assumptions that this module names. A
row has the figure of the simulator and the published one; the next row has the error of the prediction in %. The case
of a row ends in *fitted* if the constant was fitted on it, and in *if …* if an assumption is changed. The sources of
the tables are:

- staleness: Applied Compute, "Predicting and Controlling Staleness in Fully Asynchronous RL Training" (July 2026): the
  closed form, and the mean ages of six measured runs;
- verl: docs/advance/fully_async.md in verl-project/verl, at 1dda039b;
- nemo: docs/about/performance-summary.md (0.6) and examples/configs/recipes/llm/performance in NVIDIA-NeMo/RL;
- areal: arXiv 2505.24298, the ablations of staleness and of interruptible generation;
- rollart: arXiv 2512.22560v2, section 7.3, requirement R2;
- laminar: arXiv 2510.12633, sections 2 and 8;
- marin: issues 8936 and 8955 of marin-community/marin, and its launcher experiments/post_training/async_rl.py.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Any

from benchmarks.form import Args, Row, main
from benchmarks.simulated.figures import change, ours, workload
from benchmarks.simulated.peers.asynchronous import (
    Areal,
    ArealRules,
    Discard,
    DiscardRules,
    Laminar,
    LaminarRules,
    QueueDrop,
    QueueRules,
    VerlAsync,
    VerlRules,
)
from benchmarks.simulated.peers.roll_flash import AgenticRules, BaselineRules, RollAgentic, Synchronous
from benchmarks.simulated.peers.world import PeerReport
from flash.config.simulate import Lognormal, SimulateConfig
from flash.config.tree import Config

TRIES = 4
"""Most calls of the function in `solve`. More would take long, and a prediction is off by far more than the fit."""


def solve(function: Callable[[float], float], target: float, first: float, second: float) -> float:
    """Return an argument at which a function is about `target`, by the secant method from two first guesses.

    Convergence is not checked. The fitted constants are positive, so no try is less than a quarter of the last one.
    """
    before, value = function(first), function(second)
    for _ in range(TRIES - 2):
        if value == before:
            break
        first, second = second, max(second + (target - value) * (second - first) / (value - before), second / 4)
        before, value = value, function(second)
    return second


def prediction(case: str, metric: str, unit: str, predicted: float, published: float) -> list[Row]:
    """Return the row of a prediction beside the published figure, both in `unit`, and the row of its error in %."""
    error = 100 * (predicted / published - 1)
    return [Row(case, metric, unit, predicted, published), Row(case, f"{metric}_error", "%", error)]


def decoding(scale: float) -> dict[str, float]:
    """Return the simulator's default times of engines, all of them multiplied by `scale`."""
    default = SimulateConfig()
    return {name: scale * getattr(default, name) for name in ("step_s", "sequence_s", "context_s", "prefill_s")}


def lognormal(mean: float, deviation: float, high: float) -> dict[str, Any]:
    """Return a lognormal distribution of lengths from 1 to `high` tokens, as `simulate.response_tokens` takes it."""
    return {"kind": "lognormal", "mean": mean, "deviation": deviation, "low": 1, "high": high}


AGES = (
    *((120, 240, 2, 0.63, 1.42, 1.26), (240, 120, 2, 0.92, 1.43, 3.59), (128, 128, 2, 1.07, 1.44, 3.09)),
    *((240, 120, 1, 0.86, 1.42, 3.40), (120, 120, 1, 0.67, 1.42, 1.92), (128, 128, 1, 1.14, 1.45, 2.01)),
)
"""Published runs: samples at once, samples of a batch, capacity of the queue in batches, speed of the engines over that
of the trainer, mean of the longest sample of a group over the mean of all, and measured mean age in versions."""
GROUP = 8
"""Assumption: samples of a group, of which only the effect on the longest sample is published."""
LENGTH = 1000
"""Mean tokens of a sample. Ages do not depend on it."""


def closed_form(places: int, batch: int, queue_factor: float, rho: float, tailness: float) -> float:
    """Return the published mean age of a steady state, in versions; the arguments are those of `AGES`.

    The first term is the age at which a group enters the queue, and the second one its time there, in steps.
    """
    if rho < 1:
        return places * tailness / batch + rho
    return places * tailness / (rho * batch) + (2 * queue_factor + rho - 1) / (2 * rho)


def simulated_age(
    places: int, batch: int, queue_factor: float, rho: float, lengths: Any, group: int, steps: int, stagger_s: float = 0
) -> float:
    """Return the simulated mean age of trained samples, on an engine with a second per step at any load.

    `lengths` is the distribution of lengths, with a mean of `LENGTH`. The other arguments are those of `AGES`, the size
    of a group, the number of steps, and `stagger_s` of `queue_drop`.
    """
    # The engine samples a batch in batch · LENGTH / places seconds, and the trainer takes `rho` times as long.
    config = workload(
        "published",
        run={"steps": steps},
        rollout={"group_size": group},
        train={"batch_size": batch},
        engine={"max_sequences": places},
        simulate=decoding(0)
        | {"gpus": 2, "rollout_gpus": 1, "step_s": 1, "train_token_s": 0, "response_tokens": lengths}
        | {"train_step_s": rho * batch * LENGTH / places},
    )
    return QueueDrop.simulate(config, QueueRules(factor=queue_factor, stagger_s=stagger_s)).mean_age


def tailed(tailness: float, size: int) -> dict[str, Any]:
    """Return lognormal lengths whose longest of `size` has `tailness` times their mean."""
    # Of `size` uniform numbers the largest one is below u with the probability u ** size; `grid` has its quantiles.
    grid = [((i + 0.5) / 4000) ** (1 / size) for i in range(4000)]

    def longest(deviation: float) -> float:
        """Return the mean of the longest over the mean of all. `deviation` is that of a length, in tokens."""
        return fmean(Lognormal(mean=LENGTH, deviation=deviation).draw(u) for u in grid) / LENGTH

    return lognormal(LENGTH, solve(longest, tailness, 0.3 * LENGTH, 0.4 * LENGTH), 100 * LENGTH)


def staleness(args: Args) -> list[Row]:
    """Predict the mean ages of the article's runs; nothing is fitted."""
    rows: list[Row] = []
    for places, batch, factor, rho, tail, measured in AGES[:2] if args.quick else AGES:
        given, steps = (places, batch, factor, rho), 12 if args.quick else 24
        case = f"staleness, C {places}, B {batch}, q {factor}, rho {rho}"
        age = simulated_age(*given, tailed(tail, GROUP), GROUP, steps)
        rows += prediction(case, "mean_age", "versions", age, measured)
        rows += prediction(f"{case}, closed form", "mean_age", "versions", age, closed_form(*given, tail))
    age = simulated_age(*AGES[0][:4], tailed(AGES[0][4], 2 * GROUP), 2 * GROUP, 20)
    return [*rows, Row("staleness, first run, if groups have 16", "mean_age", "versions", age, AGES[0][5])]


VERL_SYNC = {128: (356.30, 177.85, 113.81), 64: (365.28, 150.72, 133.41), 32: (790.10, 357.41, 269.80)}
"""Published seconds of a synchronous step, of its generation and of its update, by the number of GPUs."""
VERL_ASYNC = {0.0: 231.34, 0.1: 171.30, 0.3: 146.11, 0.5: 150.63}
"""Published seconds of a step on 64 + 64 GPUs, by threshold. The constant is fitted on the first one."""
VERL_SPEEDUPS = {128: 2.67, 64: 2.09, 32: 1.72}
"""Published speed-ups over the first 100 steps at threshold 0.5, by the number of GPUs."""
VERL_MEAN = 3000.0
"""Assumption: mean and deviation of the lengths in tokens. Only the limit of 28 K is published."""
PART = 16
"""The published machine and batch are this many times the simulated ones."""


def verl_step_s(gpus: int, threshold: float, ratio: float, mean: float = VERL_MEAN) -> float:
    """Return the simulated seconds of an asynchronous step on half the GPUs for each side.

    `gpus` is a key of VERL_SYNC, `threshold` that of VerlRules, and `mean` the mean and deviation of the lengths.
    `ratio`: seconds of all updates of a step on half the GPUs over those of the synchronous update on all of them.
    """
    _, generation_s, update_s = VERL_SYNC[gpus]
    steps, batch = 6, 8192 // PART
    config = workload(
        "published",
        run={"steps": steps},
        train={"batch_size": batch},
        simulate={"gpus": gpus // PART, "rollout_gpus": gpus // PART, "train_token_s": 0}
        | {"response_tokens": lognormal(mean, mean, 28672)},
    )
    # The engines are as fast as the published synchronous generation. An asynchronous step trains four batches.
    scale = generation_s / Synchronous.simulate(config, BaselineRules(env_async=True, replicate=True)).step_s
    config = change(
        config,
        run={"steps": 4 * steps},
        train={"batch_size": batch // 4},
        simulate={"rollout_gpus": gpus // PART // 2, "train_step_s": ratio * update_s / 4} | decoding(scale),
    )
    ends = VerlAsync.simulate(config, VerlRules(threshold=threshold)).ends
    # The first step (four batches) waits for the first samples, and is left out.
    return (ends[-1] - ends[3]) / (steps - 1)


def verl(args: Args) -> list[Row]:
    """Predict steps by threshold, and speed-ups by size; the seconds of an update on half the GPUs are fitted."""
    ratio = solve(lambda ratio: verl_step_s(128, 0, ratio), VERL_ASYNC[0], 0.8, 0.9)
    rows: list[Row] = []
    for threshold, published in VERL_ASYNC.items():
        case = f"verl, threshold {threshold}" + (", fitted" if threshold == 0 else "")
        rows += prediction(case, "step_s", "s", verl_step_s(128, threshold, ratio), published)
    for gpus, published in VERL_SPEEDUPS.items():
        speedup = VERL_SYNC[gpus][0] / verl_step_s(gpus, 0.5, ratio)
        rows += prediction(f"verl, {gpus} GPUs", "speedup", "x", speedup, published)
    for name, step_s in (
        ("updates take the 98.77 s of threshold 0", verl_step_s(128, 0.5, 98.77 / VERL_SYNC[128][2])),
        ("answers have 4,500 tokens", verl_step_s(128, 0.5, ratio, 4500)),
    ):
        rows.append(Row(f"verl, threshold 0.5, if {name}", "step_s", "s", step_s, VERL_ASYNC[0.5]))
    return rows


NEMO = {
    "DeepSeek-V3, 512 H100": (512, 32, 512, 32, 701, 1536, 134 / 111, 111, 64.1),
    "235B, 256 H100": (256, 16, 512, 32, 5713, 8192, 395 / 312, 312, 231),
    "30B-A3B, 32 H100": (8, 2, 512, 32, 3203, 4096, 2, 192, 152),
    "30B-A3B, 16 GB200": (4, 1, 512, 32, 3199, 4096, 2, 221, 301),
}
"""Published runs: GPUs, GPUs of an engine, samples of a batch, samples of a group, mean and most tokens of a sample,
seconds of a step on policy on half the GPUs over those on all of them, and seconds of a step on policy and one step off
policy. Off policy, half of the GPUs train. The last two have a quarter of the GPUs and of the samples, and their steps
on half the GPUs are not published; they are assumed to take twice as long."""


def nemo_speedup(run: tuple[int, int, int, int, int, int, float, float, float], share: float) -> float:
    """Return the simulated speed-up of training one step off policy. `run` is a value of NEMO.

    `share`: training, as a share of a step on policy; generation, the rest, gives the speed of the engines.
    """
    gpus, engine, batch, group, mean, most, slower, sync_s, _ = run
    lengths = {"kind": "normal", "mean": mean, "deviation": 0.4 * mean, "low": 1, "high": most}
    config = workload(
        "published",
        run={"steps": 5},
        rollout={"group_size": group},
        train={"batch_size": batch},
        engine={"tensor_parallel": engine},
        simulate={"gpus": gpus, "rollout_gpus": gpus, "response_tokens": lengths, "train_token_s": 0},
    )
    generation_s = Synchronous.simulate(config, BaselineRules(env_async=True, replicate=True)).step_s
    half = decoding((1 - share) * sync_s / generation_s) | {
        "rollout_gpus": gpus // 2,
        "train_step_s": slower * share * sync_s,
    }
    return sync_s / Areal.simulate(change(config, simulate=half), ArealRules(eta=1)).step_s


def nemo(args: Args) -> list[Row]:
    """Predict speed-ups of one step off policy; the share of training in a step on policy is fitted on the first."""
    published = {name: on_policy_s / off_policy_s for name, (*_, on_policy_s, off_policy_s) in NEMO.items()}
    first, *_, last = NEMO
    share = solve(lambda share: nemo_speedup(NEMO[first], share), published[first], 0.5, 0.48)
    rows: list[Row] = []
    for name, run in NEMO.items():
        case = f"nemo, {name}" + (", fitted" if name == first else "")
        rows += prediction(case, "speedup", "x", nemo_speedup(run, share), published[name])
    name = f"nemo, {last}, if 0.68 of a step on policy is training"
    return [*rows, Row(name, "speedup", "x", nemo_speedup(NEMO[last], 0.68), published[last])]


AREAL = {1: 269.3, 2: 356.6, 4: 356.6, 8: 371.7, 16: 382.4, 1000: 396.8}
"""Published thousands of tokens a second by η; 1000 stands for ∞. The constant is fitted on η = 4."""
AREAL_SYNC = 128.7
"""Published thousands of tokens a second at η = 0."""
AREAL_MEAN = 8000.0
"""Assumption: mean tokens of an answer. Only the limit of 27,648 is published."""


def areal_config(gpus: int, batch: int, token_s: float, mean: float = AREAL_MEAN) -> Config:
    """Return the configuration of a run with three quarters of the GPUs for engines, as published.

    `batch` is in samples, `token_s` the trainer's seconds per token on one GPU, and `mean` the mean length in tokens.
    """
    return workload(
        "published",
        run={"steps": 6},
        train={"batch_size": batch},
        engine={"max_sequences": 256},
        simulate={"gpus": gpus, "rollout_gpus": 3 * gpus // 4, "train_token_s": token_s}
        | {"response_tokens": lognormal(mean, 0.9 * mean, 27648)},
    )


def areal_gain(config: Config, eta: int) -> float:
    """Return the throughput at η over that at η = 0. Each engine has 256 samples at once, as in `areal_config`."""
    places = 256 * (config.simulate or SimulateConfig()).rollout_gpus // config.rollout.group_size
    rules = ArealRules(eta=eta, max_concurrent=places)
    return Areal.simulate(config, ArealRules(eta=0)).step_s / Areal.simulate(config, rules).step_s


def areal_table(args: Args) -> list[Row]:
    """Predict the throughput by η, and the gain of interruptible generation; the trainer's speed is fitted."""
    # 16 nodes with a batch of 512 × 16, of which the simulation has one part in 32.
    token_s = solve(lambda token_s: areal_gain(areal_config(4, 256, token_s), 4), AREAL[4] / AREAL_SYNC, 1e-4, 1.3e-4)
    config = areal_config(4, 256, token_s)
    rows: list[Row] = []
    for eta, published in AREAL.items():
        case = f"areal, eta {'inf' if eta == 1000 else eta}" + (", fitted" if eta == 4 else "")
        rows += prediction(case, "throughput", "x", areal_gain(config, eta), published / AREAL_SYNC)
    changed = areal_gain(areal_config(4, 256, token_s, AREAL_MEAN / 2), 1)
    rows.append(Row("areal, eta 1, if answers have 4,000 tokens", "throughput", "x", changed, AREAL[1] / AREAL_SYNC))
    for case, mean in (
        ("areal, 4 nodes", AREAL_MEAN),
        ("areal, 4 nodes, if answers have 4,000 tokens", AREAL_MEAN / 2),
    ):
        # 4 nodes with the same batch, one part in 8. 48 groups of 16 fill the places of the three engines.
        small = areal_config(4, 1024, token_s, mean)
        without, normal = (
            Areal.simulate(small, ArealRules(eta=4, max_concurrent=48, interruptible=on)).step_s for on in (False, True)
        )
        rows += prediction(f"{case}, interruptible", "throughput", "x", without / normal, 1.12)  # 1.12 is published
    return rows


ROLLART = {10: 2.27, 1: 1.23}
"""Published speed-ups over lock-step by σ of the environment, in seconds. The constant is fitted on the first one."""


def rollart_times(sigma: float, turns: int) -> tuple[float, float]:
    """Return the simulated seconds of a step's rollout in lock-step, and with environments on their own.

    A step of the environment takes 10 s in the mean, with a deviation of `sigma`. Each episode has `turns` of them.
    """
    config = workload(
        "env_async",
        run={"steps": 1},
        train={"batch_size": 512},
        simulate={"turns": turns, "env_s": {"kind": "normal", "mean": 10, "deviation": sigma}},
    )
    locked = Synchronous.simulate(config, BaselineRules(colocated=False, replicate=True)).step_s
    return locked, RollAgentic.simulate(config, AgenticRules()).step_s


def rollart(args: Args) -> list[Row]:
    """Predict the speed-up by σ; the other seconds of a step are fitted."""
    rows: list[Row] = []
    for turns in (20,) if args.quick else (20, 40):
        locked_s, own_s = rollart_times(10, turns)
        # The seconds with which the speed-up at σ = 10 is the published one.
        other_s = (locked_s - ROLLART[10] * own_s) / (ROLLART[10] - 1)
        for sigma, published in ROLLART.items():
            locked_s, own_s = rollart_times(sigma, turns)
            speedup = (locked_s + other_s) / (own_s + other_s)
            case = f"rollart, sigma {sigma}"
            if turns == 20:
                rows += prediction(case + (", fitted" if sigma == 10 else ""), "speedup", "x", speedup, published)
            elif sigma == 1:
                rows.append(Row(f"{case}, if episodes have 40 turns", "speedup", "x", speedup, published))
    return rows


REPACKED, OVER_AREAL = 1.26, 1.39
"""Published gain of repacking, on which the constant is fitted, and mean speed-up over AReaL."""


def laminar_config(weight: float) -> Config:
    """Return the configuration of eight engines: a median of 1,600 tokens, ten times that at the 99th percentile.

    `weight`: the seconds that a running sequence adds to a decoding step, as a multiple of the default 6e-5.
    """
    return workload(
        "published",
        run={"steps": 8},
        train={"batch_size": 512},
        engine={"max_sequences": 128},
        simulate={"gpus": 9, "rollout_gpus": 8, "train_token_s": 0, "sequence_s": 6e-5 * weight}
        | {"response_tokens": lognormal(2611, 3368, 16384)},
    )


def laminar_table(args: Args) -> list[Row]:
    """Predict Laminar's speed-up over AReaL; the weight of a sequence in a decoding step is fitted on repacking."""

    def repacked(weight: float) -> float:
        """Return the throughput with repacking over that without it."""
        config = laminar_config(weight)
        return (
            Laminar.simulate(config, LaminarRules(repack=False)).step_s
            / Laminar.simulate(config, LaminarRules()).step_s
        )

    weight = solve(repacked, REPACKED, 6, 15)
    rows = prediction("laminar, repacking, fitted", "throughput", "x", repacked(weight), REPACKED)
    # A batch has 32 groups, so each engine of both systems has 64 samples at once.
    for name, factor, groups in (
        ("", weight, 32),
        (", if AReaL has twice as many samples at once", weight, 64),
        (", if nothing is fitted", 1, 32),
    ):
        config = laminar_config(factor)
        speedup = (
            Areal.simulate(config, ArealRules(eta=4, max_concurrent=groups)).step_s
            / Laminar.simulate(config, LaminarRules()).step_s
        )
        rows += prediction(f"laminar over AReaL{name}", "throughput", "x", speedup, OVER_AREAL)
    return rows


MARIN = {2048: (914.4 / 25, 0.014), 4096: (1202.4 / 25, 0.329)}
"""Published seconds of a step and share of stale tokens with 32 groups of 4 and a largest age of 1, by the limit of the
lengths. The constant is fitted on the first seconds."""
TRAIN_TOKEN_S = 9.4 * 32 / (32 * 4 * (981 + 300))
"""Seconds of a GPU per token: 9.4 s of training on 32 GPUs, as published for the limit of 2,048. A sample has 981
tokens of answer, and the simulator's default of 300 tokens of prompt."""
SYNC_S = 20.4
"""Published seconds of a transfer of weights in these runs; later runs need 1.6 s."""
LATER_SYNC_S = 1.6
"""Published seconds of a transfer of weights in later runs."""


def marin_config(scale: float, limit: int, groups: int, swap_s: float) -> Config:
    """Return the configuration of 32 trainers and one engine of eight GPUs.

    The lengths are the lognormal ones of which 14.6 % exceed 2,048 tokens and 3.6 % exceed 4,096, as published.
    `scale` multiplies the engine's default times, `limit` is the largest length in tokens, `groups` the groups of a
    batch, and `swap_s` the seconds of a transfer of weights.
    """
    return workload(
        "published",
        run={"steps": 12},
        rollout={"group_size": 4},
        train={"batch_size": 4 * groups},
        engine={"max_sequences": 8192, "tensor_parallel": 8},
        simulate=decoding(scale)
        | {"gpus": 40, "rollout_gpus": 8, "swap_s": swap_s, "train_token_s": TRAIN_TOKEN_S}
        | {"response_tokens": lognormal(1184, 1390, limit)},
    )


def marin_pilot(scale: float, limit: int, workers: int = 64) -> PeerReport:
    """Simulate a run with 32 groups of 4. Assumption: 64 workers, which are as many as the largest age allows."""
    return Discard.simulate(marin_config(scale, limit, 32, SYNC_S), DiscardRules(workers=workers, buffer=32, max_age=1))


def marin(args: Args) -> list[Row]:
    """Predict steps and discarded work of marin's rule, and compare it with Flash; the engine's speed is fitted."""
    scale = solve(lambda scale: marin_pilot(scale, 2048).step_s, MARIN[2048][0], 1, 0.6)
    rows: list[Row] = []
    for limit, (step_s, stale) in MARIN.items():
        run, case = marin_pilot(scale, limit), f"marin, 32 x 4, limit {limit}"
        rows += prediction(case + (", fitted" if limit == 2048 else ""), "step_s", "s", run.step_s, step_s)
        rows += prediction(case, "stale_tokens", "share", run.stale_tokens, stale)
        own = ours(change(marin_config(scale, limit, 32, SYNC_S), train={"async_ratio": 1}))
        rows.append(Row(f"{case}, Flash's rules", "step_s", "s", own.step_s, peer=run.step_s))
        rows.append(Row(f"{case}, Flash's rules", "stale_tokens", "share", own.stale_share, peer=run.stale_tokens))
    changed = marin_pilot(scale, 4096, 32).stale_tokens
    rows.append(Row("marin, 32 x 4, limit 4096, if 32 workers", "stale_tokens", "share", changed, MARIN[4096][1]))
    house = DiscardRules(workers=192, buffer=32, max_age=4)
    for case, swap_s in (("", LATER_SYNC_S), (", if weights take 20.4 s", SYNC_S)):
        run = Discard.simulate(marin_config(scale, 4096, 128, swap_s), house)
        rows += prediction(f"marin, 128 x 4, 192 workers{case}", "stale_groups", "share", run.stale_groups, 0.2)
    return rows


def measure(args: Args) -> list[Row]:
    """Return the rows of all tables; a quick run has the first, the second and RollArt's."""
    tables = (staleness, verl, rollart)
    if not args.quick:
        tables = (staleness, verl, nemo, areal_table, rollart, laminar_table, marin)
    return [row for table in tables for row in table(args)]


if __name__ == "__main__":
    main("published", __doc__ or "", measure)
