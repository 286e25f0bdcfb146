"""From a measured run to the `[simulate]` table that stands for its machine and workload.

The engine's constants come from every response's duration. While it runs, each decoding step takes
step_s + sequence_s · (sequences running) + prefill_s · (prompt tokens that join), so that

    duration − pauses = step_s · steps + sequence_s · Σ over steps of running + prefill_s · Σ over steps of joining

is linear in the constants; least squares, none of them negative. How many run at a time is known from all responses'
intervals. Steps are not seen one by one: they are dense where few sequences run, which needs the constants, so that
weights and constants are found in turns. Context costs are not told apart from `sequence_s`.

Everything else is read off: pauses and announcements from the timeline, training from the steps' tokens and times,
lengths, latencies and success as they were. Seconds and tokens throughout.
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import tomli_w

from flash.config.load import load
from flash.config.tree import Config
from flash.errors import ConfigError
from flash.observe.plots.timeline import Floats, covered_until
from flash.observe.rundir.rundir import RunDirectory, SampleTimes, TurnTimes
from flash.observe.rundir.summary import Row, by_step, number
from flash.simulate.fitting import nonnegative_fit, relative, slope_error, spread_of
from flash.types import Activity

ROUNDS = 12
"""Turns of fitting constants and weighting steps; they settle within a few."""
LEAST_VARIATION = 0.1
"""Standard deviation of the running sequences, relative to their mean, below which step_s and sequence_s look alike."""
LEAST_STEPS = 3
"""Steps a run must have: the first one, which warms up, is left out where there are more."""


class FittedPart(msgspec.Struct, frozen=True):
    """One fitted piece of the table."""

    what: str
    constants: dict[str, float]
    points: int
    """Measurements behind it."""
    residual: float
    """Root mean square of what the fit leaves over, relative to the mean."""
    note: str = ""
    """What to beware of."""


class Calibration(msgspec.Struct, frozen=True):
    """What a measured run says about its machine and workload."""

    table: dict[str, Any]
    """The fitted `[simulate]` table."""
    parts: list[FittedPart]
    step_s: float
    """Measured mean seconds of a step, the first one left out."""

    def toml(self) -> str:
        """The overlay: `flash simulate RUN_DIR/config.toml` and this file simulate the run."""
        return tomli_w.dumps({"simulate": self.table})


class ResponseTimes(NamedTuple):
    """All responses [R] of a run, in the order in which they began."""

    begin: Floats
    """When it got its place in an engine."""
    end: Floats
    tokens: Floats
    cold: Floats
    """Prompt tokens that were not in a KV cache."""
    context: Floats
    """Tokens before the response."""
    late: npt.NDArray[np.bool_]
    """Whether it had to wait for the end of a step in flight: others were running, and it got its place at once."""
    fitted: npt.NDArray[np.bool_]
    """Whether it counts as a measurement; every one counts as load."""


def calibrate(run_dir: Path) -> Calibration:
    """Fit a `[simulate]` table to a finished run.

    Raises:
        ConfigError: the folder is not that of a run with samples and at least LEAST_STEPS steps.
    """
    directory = RunDirectory(run_dir)
    rows, samples = by_step(directory.read_metrics()), directory.read_samples()
    if not directory.config.is_file() or not samples or len(rows) < LEAST_STEPS:
        raise ConfigError(
            f"{run_dir} cannot be calibrated from: expected the directory of a run with config.toml, samples.jsonl "
            f"and at least {LEAST_STEPS} steps in metrics.jsonl"
        )
    # Read as a simulation's: the run's model and devices need not be at hand.
    config = load([directory.config], ["simulate={}"], simulated=True)
    spans = directory.read_spans()
    hardware = placement(config)
    engines = hardware["rollout_gpus"] // hardware["gpus_per_engine"]
    seen = sum(turn.tokens for sample in samples for turn in sample.turns)
    ledger = json.loads(directory.ledger.read_text()) if directory.ledger.is_file() else {}
    unseen = max(1.0, ledger.get("generated_tokens", seen) / max(seen, 1))
    swaps = [span for span in spans if span.name == "swap"]
    pause = fit_pause(swaps)
    first = min(sample.step for sample in samples)
    responses = gather(samples, swaps, engines, engines * config.engine.max_sequences / unseen, first)
    recompute = config.rollout.swap != "keep"
    engine = fit_engine(responses, swaps, engines, unseen, recompute=recompute)
    trainers = hardware["gpus"] - hardware["rollout_gpus"]
    training = fit_training(rows, samples, spans, trainers)
    workload = fit_workload(samples)
    parts = [engine, pause, training]
    constants = {key: value for part in parts for key, value in part.constants.items()}
    return Calibration(hardware | constants | {"context_s": 0.0} | workload, parts, measured_step_s(rows))


def measured_step_s(rows: Sequence[Row]) -> float:
    """Mean seconds of a step, the first one left out."""
    seconds = [value for row in rows[1:] if (value := number(row, "interval_s")) is not None]
    return sum(seconds) / len(seconds)


def placement(config: Config) -> dict[str, int]:
    """The run's devices as the simulator counts them. On the CPU, each engine and each trainer rank is one."""
    width = config.engine.tensor_parallel if config.gpus_per_node else 1
    per_node = [config.engines_on(node) for node in range(config.cluster.nodes)]
    serving = sum(per_node) * width
    return {
        "gpus": serving + config.trainer_world_size,
        "rollout_gpus": serving,
        "gpus_per_engine": width,
        "nodes": sum(count > 0 for count in per_node),
    }


# -- engines ----------------------------------------------------------------------------------------------------------


def gather(
    samples: Sequence[SampleTimes], swaps: Sequence[Activity], engines: int, places: float, first_step: int
) -> ResponseTimes:
    """The responses of all samples, each from the moment it got one of the engines' places, first come, first served.

    Which prompt tokens were cached follows the simulator's rule: a problem's prompt after its first request on an
    engine, an episode's context after its last turn, both until the next swap.
    """
    swapped = np.sort(np.array([swap.start for swap in swaps]))
    known: dict[tuple[int, int], int] = {}
    taken: list[float] = []
    rows: list[tuple[float, float, float, float, float, bool, bool]] = []
    asked = sorted(
        ((turn.start, sample, place) for sample in samples for place, turn in enumerate(sample.turns)),
        key=lambda entry: entry[0],
    )
    for start, sample, place in asked:
        turn = sample.turns[place]
        end = start + turn.generate_s
        while taken and taken[0] <= start:
            heapq.heappop(taken)
        begin = start if len(taken) < places else min(max(start, heapq.heappop(taken)), end)
        heapq.heappush(taken, end)
        context = _context(sample.turns, place)
        epoch = int(np.searchsorted(swapped, begin))
        cold = 1.0 if _cached(known, sample, place, epoch, engines) else float(context)
        before = _before(sample.turns, place)
        if before and int(np.searchsorted(swapped, before[-1].start)) == epoch:
            cold = float(turn.observation_tokens)
        rows.append((begin, end, turn.tokens, cold, context, begin == start, sample.step > first_step))
    begin, end, tokens, cold, context, at_once, fitted = (np.array(column) for column in zip(*rows, strict=True))
    begun, ended = np.sort(begin), np.sort(end)
    others = np.searchsorted(begun, begin, side="left") > np.searchsorted(ended, begin, side="right")
    late = at_once & others
    return ResponseTimes(begin, end, tokens.astype(float), cold, context.astype(float), late, fitted & (tokens > 0))


def _before(turns: Sequence[TurnTimes], place: int) -> list[TurnTimes]:
    """The turns before one, in its branch."""
    return [turn for turn in turns[:place] if turn.branch == turns[place].branch]


def _context(turns: Sequence[TurnTimes], place: int) -> int:
    """Tokens before a turn's response."""
    before = sum(turn.observation_tokens + turn.tokens for turn in _before(turns, place))
    return before + turns[place].observation_tokens


def _cached(known: dict[tuple[int, int], int], sample: SampleTimes, place: int, epoch: int, engines: int) -> bool:
    """Whether a first prompt has been seen by every engine since the last swap, as even routing would have it."""
    if place:
        return False
    key = (sample.group_id, epoch)
    known[key] = known.get(key, 0) + 1
    return known[key] > engines


def fit_engine(
    responses: ResponseTimes, swaps: Sequence[Activity], engines: int, unseen: float, *, recompute: bool
) -> FittedPart:
    """step_s, sequence_s and prefill_s. `unseen` is by how much the run's load exceeded the recorded responses'."""
    begin, end, fitted = responses.begin, responses.end, responses.fitted
    knots = np.unique(np.concatenate([begin, end]))
    running = _level(begin, end, knots) * unseen / engines
    joining = _joining(responses, swaps, engines, unseen, recompute=recompute)
    paused = _paused(swaps, begin, end, engines)
    duration = (end - begin - paused)[fitted]
    steps = responses.tokens + 0.5 * responses.late
    weights = np.full(len(knots) - 1, 1.0)
    found, at, constants = np.zeros(0), np.zeros(0), np.zeros(3)
    for _ in range(ROUNDS):
        at = _mean_over(running, weights, knots, begin, end)
        columns = np.stack([steps, steps * at, joining], axis=1)[fitted]
        constants, found = nonnegative_fit(columns, duration)
        weights = 1.0 / np.maximum(constants[0] + constants[1] * running[:-1], 1e-12)
    sequences = at[fitted]
    note = ""
    if sequences.std() < LEAST_VARIATION * sequences.mean():
        note = f"about {sequences.mean():.0f} sequences ran all the time: step_s and sequence_s cannot be told apart"
    names = ("step_s", "sequence_s", "prefill_s")
    return FittedPart(
        "engine",
        dict(zip(names, map(float, constants), strict=True)),
        int(fitted.sum()),
        relative(found, duration),
        note,
    )


def _level(begin: Floats, end: Floats, knots: Floats) -> Floats:
    """How many intervals are open after each knot."""
    started = np.searchsorted(np.sort(begin), knots, side="right")
    ended = np.searchsorted(np.sort(end), knots, side="right")
    return (started - ended).astype(np.float64)


def _mean_over(running: Floats, weights: Floats, knots: Floats, begin: Floats, end: Floats) -> Floats:
    """Mean running sequences over each response's steps, which are as dense as the weights between knots."""
    steps = np.concatenate([[0.0], np.cumsum(weights * np.diff(knots))])
    sums = np.concatenate([[0.0], np.cumsum(weights * running[:-1] * np.diff(knots))])
    count = np.interp(end, knots, steps) - np.interp(begin, knots, steps)
    total = np.interp(end, knots, sums) - np.interp(begin, knots, sums)
    return np.divide(total, count, out=np.ones_like(total), where=count > 0)


def _joining(
    responses: ResponseTimes, swaps: Sequence[Activity], engines: int, unseen: float, *, recompute: bool
) -> Floats:
    """Tokens that its engine prefills during each response: its own, its share of the others', those after swaps."""
    begin, end = responses.begin, responses.end
    times, amounts = [begin], [responses.cold * unseen / engines]
    if recompute and swaps:
        stops = np.array([swap.stop for swap in swaps])
        again = [_held(responses, swap) * unseen / engines**2 for swap in swaps]
        times.append(stops)
        amounts.append(np.array(again))
    at, amount = np.concatenate(times), np.concatenate(amounts)
    order = np.argsort(at, kind="stable")
    sums = np.concatenate([[0.0], np.cumsum(amount[order])])
    at = at[order]
    others = sums[np.searchsorted(at, end, side="left")] - sums[np.searchsorted(at, begin, side="left")]
    return others + responses.cold * (1 - unseen / engines)


def _held(responses: ResponseTimes, swap: Activity) -> float:
    """Context of all responses that a swap interrupted."""
    running = (responses.begin < swap.start) & (swap.stop < responses.end)
    begin, end = responses.begin[running], responses.end[running]
    done = (swap.start - begin) / (end - begin)
    return float((responses.context[running] + done * responses.tokens[running]).sum())


def _paused(swaps: Sequence[Activity], begin: Floats, end: Floats, engines: int) -> Floats:
    """Seconds of each response in which its engine, as far as is known, was swapping."""
    total = np.zeros_like(begin)
    for _, lane in itertools.groupby(sorted(swaps, key=lambda swap: swap.lane), key=lambda swap: swap.lane):
        bars = list(lane)
        total += (covered_until(bars, end) - covered_until(bars, begin)) / engines
    return total


def fit_pause(swaps: Sequence[Activity]) -> FittedPart:
    """swap_s: the median of the swaps on the timeline, without each engine's first load, which interrupts nothing."""
    lanes: dict[str, list[Activity]] = {}
    for swap in sorted(swaps, key=lambda swap: swap.start):
        lanes.setdefault(swap.lane, []).append(swap)
    seconds = np.array([swap.stop - swap.start for bars in lanes.values() for swap in bars[1:]])
    if not seconds.size:
        return FittedPart("swap", {"swap_s": 0.0}, 0, 0.0, "the timeline has no swap of a running engine")
    middle = float(np.median(seconds))
    return FittedPart("swap", {"swap_s": middle}, seconds.size, relative(seconds - middle, seconds))


# -- training ---------------------------------------------------------------------------------------------------------


def fit_training(
    rows: Sequence[Row], samples: Sequence[SampleTimes], spans: Sequence[Activity], trainers: int
) -> FittedPart:
    """train_token_s and train_step_s: steps' times over their tokens, and what publishing and checkpoints add."""
    tokens: dict[int, int] = {}
    for sample in samples:
        length = sum(turn.observation_tokens + turn.tokens for turn in sample.turns)
        tokens[sample.step] = tokens.get(sample.step, 0) + length
    known = [
        (tokens[row["step"]], seconds)
        for row in rows[1:]
        if row["step"] in tokens and (seconds := number(row, "trainer_step_s")) is not None
    ]
    if not known:
        raise ConfigError("the run's metrics.jsonl has no trainer_step_s for the steps of samples.jsonl")
    amount, seconds = np.array(known, dtype=np.float64).T
    columns = np.stack([amount, np.ones_like(amount)], axis=1)
    constants, left = nonnegative_fit(columns, seconds)
    note = ""
    if slope_error(amount, left) > 0.2 * constants[0]:
        constants = np.array([seconds.sum() / amount.sum(), 0.0])
        left = seconds - amount * constants[0]
        note = "steps differ too little in tokens to tell their fixed part from the rest: all counts as tokens"
    announcing = _median_s(spans, "publish") + _total_s(spans, "checkpoint") / len(rows)
    fitted = {"train_token_s": float(constants[0]) * trainers, "train_step_s": float(constants[1]) + announcing}
    return FittedPart("training", fitted, len(known), relative(left, seconds), note)


def _median_s(spans: Sequence[Activity], name: str) -> float:
    seconds = [span.stop - span.start for span in spans if span.name == name and span.lane == "trainer 0"]
    return float(np.median(seconds)) if seconds else 0.0


def _total_s(spans: Sequence[Activity], name: str) -> float:
    return sum(span.stop - span.start for span in spans if span.name == name and span.lane == "trainer 0")


# -- workload ---------------------------------------------------------------------------------------------------------


def fit_workload(samples: Sequence[SampleTimes]) -> dict[str, str]:
    """Lengths, latencies, turns and success as distributions of the values that were seen."""
    turns = [turn for sample in samples for turn in sample.turns]
    later = [turn for sample in samples for turn in sample.turns[1:]]
    middle = [turn.env_s for sample in samples for turn in sample.turns[:-1]]
    last = [sample.turns[-1].env_s for sample in samples]
    usual = sum(middle) / len(middle) if middle else 0.0
    rewards: dict[int, list[float]] = {}
    for sample in samples:
        rewards.setdefault(sample.group_id, []).append(min(max(sample.reward, 0.0), 1.0))
    return {
        "prompt_tokens": spread_of([sample.turns[0].observation_tokens for sample in samples], whole=True),
        "response_tokens": spread_of([turn.tokens for turn in turns], whole=True),
        "observation_tokens": spread_of([turn.observation_tokens for turn in later] or [1], whole=True),
        "turns": spread_of([len(sample.turns) for sample in samples], whole=True),
        "env_s": spread_of(middle or [0.0]),
        "reward_s": spread_of([max(0.0, seconds - usual) for seconds in last]),
        "success": spread_of([sum(group) / len(group) for group in rewards.values()]),
    }
