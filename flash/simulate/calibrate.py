"""Calibration: fits a `[simulate]` table to the machine and the workload of a measured run.

The constants of the engine are fitted to the durations of all responses. Each decoding step takes
step_s + sequence_s · (running sequences) + prefill_s · (prompt tokens of joining sequences), so

    duration − pauses = step_s · steps + sequence_s · Σ over steps of running + prefill_s · Σ over steps of joining

is linear in the constants. They are fitted by least squares without negative constants. The number of running sequences
follows from the intervals of all responses. The times of single steps are not recorded: there are more steps per second
where fewer sequences run, and this density depends on the constants. So density and constants are fitted in turns. The
cost of context cannot be separated from `sequence_s`.

All other values are measured directly: pauses and publishing from the timeline; training from the tokens and times of
the steps; lengths, latencies and success rates from the samples. Units are seconds and tokens.
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
from flash.observe.rundir.rundir import RunDirectory, SampleTimes, TurnTimes
from flash.observe.rundir.summary import Row, by_step, number
from flash.observe.timeline import Floats, covered_until
from flash.types import Activity

ROUNDS = 12
"""Number of times that constants and density of steps are fitted in turns; both converge within a few."""
LEAST_VARIATION = 0.1
"""Standard deviation of the number of running sequences, relative to its mean, below which step_s and sequence_s cannot
be separated."""
LEAST_STEPS = 3
"""Fewest steps that a run must have. The first step is left out, since it includes the warm-up."""
VALUES = 32
"""Most values that a fitted distribution lists."""


class FittedPart(msgspec.Struct, frozen=True):
    """Constants of the table that were fitted together."""

    what: str
    """Name of the part, such as `engine`."""
    constants: dict[str, float]
    """Fitted values, by key of the table."""
    points: int
    """Number of measurements."""
    residual: float
    """Root mean square of the residuals, relative to the mean of the measurements."""
    note: str = ""
    """Warning for the user; empty if there is none."""


class Calibration(msgspec.Struct, frozen=True):
    """Result of the calibration with a measured run."""

    table: dict[str, Any]
    """The fitted `[simulate]` table."""
    parts: list[FittedPart]
    """Fits of the constants, for the report to the user."""
    step_s: float
    """Measured mean seconds of a step, without the first step."""

    def toml(self) -> str:
        """Return the table as a TOML overlay: `flash simulate RUN_DIR/config.toml OVERLAY` simulates the run."""
        return tomli_w.dumps({"simulate": self.table})


class ResponseTimes(NamedTuple):
    """All R responses of a run as arrays of length R, in the order in which they were requested."""

    begin: Floats
    """Time at which an engine began the response."""
    end: Floats
    """Time at which the response was complete."""
    tokens: Floats
    """Tokens of the response."""
    cold: Floats
    """Prompt tokens that were not in the KV cache."""
    context: Floats
    """Tokens before the response."""
    late: npt.NDArray[np.bool_]
    """True if the response had to wait for the end of a running step: others were running, and a place was free."""
    fitted: npt.NDArray[np.bool_]
    """True if the constants are fitted to this response. All responses count as load."""


def calibrate(run_dir: Path) -> Calibration:
    """Fit a `[simulate]` table to a finished run.

    Raises:
        ConfigError: the folder is not the directory of a run with samples and at least LEAST_STEPS steps, or a value is
        missing.
    """
    directory = RunDirectory(run_dir)
    rows, samples = by_step(directory.read_metrics()), directory.read_samples()
    if not directory.config.is_file() or not samples or len(rows) < LEAST_STEPS:
        raise ConfigError(
            f"{run_dir} cannot be calibrated from: expected the directory of a run with config.toml, samples.jsonl "
            f"and at least {LEAST_STEPS} steps in metrics.jsonl"
        )
    # Load it as the configuration of a simulation: model and devices of the run need not exist on this machine.
    config = load([directory.config], ["simulate={}"], simulated=True)
    spans = directory.read_spans()
    # A sample without turns is refused here, before `gather`, which needs at least one turn.
    workload = fit_workload(samples)
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
    parts = [engine, pause, training]
    constants = {key: value for part in parts for key, value in part.constants.items()}
    return Calibration(hardware | constants | {"context_s": 0.0} | workload, parts, measured_step_s(rows))


def measured_step_s(rows: Sequence[Row]) -> float:
    """Return the mean seconds of a step, without the first step.

    Raises:
        ConfigError: no row after the first one has `interval_s`.
    """
    seconds = [value for row in rows[1:] if (value := number(row, "interval_s")) is not None]
    if not seconds:
        raise ConfigError(
            "no step after the first one has interval_s, the seconds of a step, in the run's metrics.jsonl: calibrate "
            "from another run"
        )
    return sum(seconds) / len(seconds)


def placement(config: Config) -> dict[str, int]:
    """Return the run's devices as keys of the `[simulate]` table.

    In a run without GPUs, each engine and each trainer rank counts as one GPU.
    """
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
    """Collect the responses of all samples, and estimate when each began and which prompt tokens were cached.

    A response begins when it gets one of the engines' places, in order of arrival. Caching follows the rule of the
    simulator: the prompt of a problem is cached after its first request on an engine, and the context of an episode
    after its last turn. Both are lost at the next swap.

    Args:
        samples: trained samples of the run.
        swaps: swaps of all engines on the timeline.
        engines: number of engines.
        places: most sequences of all engines together, divided by `unseen` (see `fit_engine`): the places that are left
            for recorded responses.
        first_step: step whose samples count as load only, since they include the warm-up.
    """
    swapped = np.sort(np.array([swap.start for swap in swaps]))
    # Number of first requests of each group since each swap: see `_cached`.
    known: dict[tuple[int, int], int] = {}
    # Heap of the ends of the responses that have a place.
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
    """Return the turns before the one at `place` that are in its branch."""
    return [turn for turn in turns[:place] if turn.branch == turns[place].branch]


def _context(turns: Sequence[TurnTimes], place: int) -> int:
    """Return the number of tokens before a turn's response."""
    before = sum(turn.observation_tokens + turn.tokens for turn in _before(turns, place))
    return before + turns[place].observation_tokens


def _cached(known: dict[tuple[int, int], int], sample: SampleTimes, place: int, epoch: int, engines: int) -> bool:
    """Return True if the first prompt of an episode is cached, and count the request in `known`.

    With even routing, the first request of a group goes to each engine before an engine gets a second one. So the
    prompt is cached on every engine once the group has sent as many requests as there are engines since the last swap.
    """
    if place:
        return False
    key = (sample.group_id, epoch)
    known[key] = known.get(key, 0) + 1
    return known[key] > engines


def fit_engine(
    responses: ResponseTimes, swaps: Sequence[Activity], engines: int, unseen: float, *, recompute: bool
) -> FittedPart:
    """Fit step_s, sequence_s and prefill_s to the durations of responses.

    Args:
        responses: responses of the run.
        swaps: swaps of all engines on the timeline.
        engines: number of engines.
        unseen: factor, at least 1, by which the run generated more tokens than the recorded responses have.
        recompute: True if a swap computes the KV cache of the running sequences again.
    """
    begin, end, fitted = responses.begin, responses.end, responses.fitted
    knots = np.unique(np.concatenate([begin, end]))
    running = _level(begin, end, knots) * unseen / engines
    joining = _joining(responses, swaps, engines, unseen, recompute=recompute)
    paused = _paused(swaps, begin, end, engines)
    duration = (end - begin - paused)[fitted]
    steps = responses.tokens + 0.5 * responses.late
    # Steps per second between the knots, up to a factor. The first round assumes equally many everywhere.
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
    """Return the number of intervals that are open right after each knot."""
    started = np.searchsorted(np.sort(begin), knots, side="right")
    ended = np.searchsorted(np.sort(end), knots, side="right")
    return (started - ended).astype(np.float64)


def _mean_over(running: Floats, weights: Floats, knots: Floats, begin: Floats, end: Floats) -> Floats:
    """Return the mean number of running sequences over the steps of each response.

    `weights` are the steps per second between the knots, up to a constant factor.
    """
    steps = np.concatenate([[0.0], np.cumsum(weights * np.diff(knots))])
    sums = np.concatenate([[0.0], np.cumsum(weights * running[:-1] * np.diff(knots))])
    count = np.interp(end, knots, steps) - np.interp(begin, knots, steps)
    total = np.interp(end, knots, sums) - np.interp(begin, knots, sums)
    return np.divide(total, count, out=np.ones_like(total), where=count > 0)


def _joining(
    responses: ResponseTimes, swaps: Sequence[Activity], engines: int, unseen: float, *, recompute: bool
) -> Floats:
    """Return the tokens that the engine of each response prefills during that response.

    These are the response's own tokens, the tokens of other responses divided by the number of engines, and the tokens
    that are computed again after swaps.
    """
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
    """Return the tokens of context of all responses during a swap."""
    running = (responses.begin < swap.start) & (swap.stop < responses.end)
    begin, end = responses.begin[running], responses.end[running]
    done = (swap.start - begin) / (end - begin)
    return float((responses.context[running] + done * responses.tokens[running]).sum())


def _paused(swaps: Sequence[Activity], begin: Floats, end: Floats, engines: int) -> Floats:
    """Return the expected seconds of each response in which its engine was swapping."""
    # The record does not name a response's engine, so each swap counts with probability 1/engines.
    total = np.zeros_like(begin)
    for _, lane in itertools.groupby(sorted(swaps, key=lambda swap: swap.lane), key=lambda swap: swap.lane):
        bars = list(lane)
        total += (covered_until(bars, end) - covered_until(bars, begin)) / engines
    return total


def fit_pause(swaps: Sequence[Activity]) -> FittedPart:
    """Return swap_s, the median duration of the swaps on the timeline.

    The first load of each engine is left out, because it interrupts no sequence.
    """
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
    """Fit train_token_s and train_step_s to the tokens and times of the steps.

    The seconds per step of publishing and of checkpoints are added to train_step_s, because the simulated trainer
    spends no other time on them. If the steps have nearly equal numbers of tokens, all of their time counts as time per
    token.

    Raises:
        ConfigError: no step has both a time and samples.
    """
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
    """Return the median seconds of trainer rank 0's activities of this name; 0 if there are none."""
    seconds = [span.stop - span.start for span in spans if span.name == name and span.lane == "trainer 0"]
    return float(np.median(seconds)) if seconds else 0.0


def _total_s(spans: Sequence[Activity], name: str) -> float:
    """Return the total seconds of trainer rank 0's activities of this name."""
    return sum(span.stop - span.start for span in spans if span.name == name and span.lane == "trainer 0")


# -- workload ---------------------------------------------------------------------------------------------------------


def fit_workload(samples: Sequence[SampleTimes]) -> dict[str, float | list[float]]:
    """Return lengths, latencies, turns and success rates as distributions of the measured values.

    The record does not separate the reward's time from the last step of an environment. So the time of a last step
    beyond the mean of other steps counts as the reward's.

    Raises:
        ConfigError: a sample has no turns.
    """
    if empty := [sample for sample in samples if not sample.turns]:
        raise ConfigError(
            f"{len(empty)} of {len(samples)} samples in the run's samples.jsonl have no turns, the first one at step "
            f"{empty[0].step}: remove these lines from a copy of the run directory, or calibrate from another run"
        )
    turns = [turn for sample in samples for turn in sample.turns]
    later = [turn for sample in samples for turn in sample.turns[1:]]
    middle = [turn.env_s for sample in samples for turn in sample.turns[:-1]]
    last = [sample.turns[-1].env_s for sample in samples]
    usual = sum(middle) / len(middle) if middle else 0.0
    rewards: dict[int, list[float]] = {}
    for sample in samples:
        rewards.setdefault(sample.group_id, []).append(min(max(sample.reward, 0.0), 1.0))
    return {
        "prompt_tokens": spread_of([sample.turns[0].observation_tokens for sample in samples], integer=True),
        "response_tokens": spread_of([turn.tokens for turn in turns], integer=True),
        "observation_tokens": spread_of([turn.observation_tokens for turn in later] or [1], integer=True),
        "turns": spread_of([len(sample.turns) for sample in samples], integer=True),
        "env_s": spread_of(middle or [0.0]),
        "reward_s": spread_of([max(0.0, seconds - usual) for seconds in last]),
        "success": spread_of([sum(group) / len(group) for group in rewards.values()]),
    }


# -- arithmetic ------------------------------------------------------------------------------------------------------


def spread_of(values: Sequence[float], *, integer: bool = False) -> float | list[float]:
    """Return a distribution (`flash.config.simulate.Distribution`) of at most VALUES equally likely values with the
    mean of the measured ones.

    Each value is the mean of an equal part of the sorted measured values. If `integer` is True, values are rounded, and
    the rounding error of each is added to the next one, so that the mean is preserved.
    """
    parts = np.array_split(np.sort(np.array(values, dtype=np.float64)), min(VALUES, len(values)))
    means = [float(part.mean()) for part in parts]
    if integer:
        rounded: list[float] = []
        owed = 0.0
        for mean in means:
            rounded.append(float(round(mean + owed)))
            owed += mean - rounded[-1]
        means = rounded
    shown = [float(f"{mean:.6g}") for mean in means]  # six digits are enough, and keep the file readable
    return shown[0] if len(set(means)) == 1 else shown


def nonnegative_fit(columns: Floats, target: Floats) -> tuple[Floats, Floats]:
    """Solve least squares without negative constants. Returns the constants and the residuals.

    It tries every subset of the columns, so there must be few of them.
    """
    count = columns.shape[1]
    best = np.zeros(count), target
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):
            part = columns[:, chosen]
            scale = np.maximum(np.abs(part).max(axis=0), 1e-300)
            solved = np.linalg.lstsq(part / scale, target, rcond=None)[0] / scale
            if (solved < 0).any():
                continue
            constants = np.zeros(count)
            constants[list(chosen)] = solved
            left = target - columns @ constants
            if (left**2).sum() < (best[1] ** 2).sum() * (1 - 1e-9):
                best = constants, left
    return best


def relative(left: Floats, values: Floats) -> float:
    """Return the root mean square of the residuals `left`, relative to the mean absolute value of `values`."""
    mean = float(np.abs(values).mean())
    return float(np.sqrt((left**2).mean())) / mean if mean else 0.0


def slope_error(x: Floats, left: Floats) -> float:
    """Return the standard error of the slope of a fitted line with residuals `left`; infinity if it is undefined."""
    spread = float(((x - x.mean()) ** 2).sum())
    if spread == 0 or len(x) < 3:
        return float("inf")
    return float(np.sqrt((left**2).sum() / (len(x) - 2) / spread))
