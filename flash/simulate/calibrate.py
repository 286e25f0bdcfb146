"""Calibration: fits a `[simulate]` table to the machine and the workload of a measured run.

`flash calibrate` (`flash.cli.simulate`) calls `calibrate` with the directory of a finished run, and writes the table to
a file that `flash simulate` reads. A response is the text that the model samples in one turn. To prefill is to compute
the KV cache of tokens that are not sampled. A sequence joins when an engine begins to decode it. A swap is the pause in
which an engine loads a new version of the weights.

The constants of the engine are fitted to the durations of all responses. Each decoding step takes
step_s + sequence_s · (running sequences) + prefill_s · (prompt tokens of joining sequences), so

    duration − pauses = step_s · steps + sequence_s · Σ over steps of running + prefill_s · Σ over steps of joining

is linear in the constants. They are fitted by least squares without negative constants. The number of running sequences
follows from the intervals of all responses. The times of single steps are not recorded, so the density of steps (steps
per second) is unknown. It is higher where fewer sequences run, and it depends on the constants. So `fit_engine` fits
density and constants in turns. The cost of context cannot be separated from `sequence_s`.

All other values are measured directly: pauses and publishing from the timeline; training from the tokens and times of
the steps; lengths, latencies and success rates from the samples. Times are in seconds, lengths in tokens.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import tomli_w

from flash.config.load import load
from flash.config.tree import Config
from flash.errors import DECODE_ERRORS, ConfigError
from flash.observe.rundir.rundir import RunDirectory, SampleTimes
from flash.observe.rundir.summary import Row, by_step, number
from flash.observe.timeline import Floats, covered_until
from flash.types import Activity

ROUNDS = 12
"""Number of times that `fit_engine` fits the constants and the density of steps; both converge within a few times."""
LEAST_VARIATION = 0.1
"""Standard deviation of the number of running sequences, relative to its mean, below which step_s and sequence_s cannot
be separated."""
MOST_SLOPE_ERROR = 0.2
"""Standard error of the seconds per token, relative to the mean seconds per token, above which the fixed part of a
training step cannot be separated from the rest."""
LEAST_STEPS = 3
"""Fewest steps that a run must have. The first step is left out, since it includes the warm-up."""
VALUES = 32
"""Most values that a fitted distribution lists."""


class FittedPart(msgspec.Struct, frozen=True):
    """Constants of the `[simulate]` table that were fitted together. `flash calibrate` prints one line for each
    part."""

    name: str
    """Name of the part: `engine`, `swap` or `training`."""
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
    """Time at which an engine began the response, as `gather` estimates it. Times are Unix seconds."""
    end: Floats
    """Time at which the response was complete."""
    tokens: Floats
    """Tokens of the response."""
    cold: Floats
    """Prompt tokens that were not in the KV cache, as `gather` estimates them."""
    context: Floats
    """Tokens before the response: its prompt, and all earlier turns of its branch."""
    waited: npt.NDArray[np.bool_]
    """True if the response had to wait for the end of a running step: others were running, and a place was free.
    A response that waited for a place begins at the end of a step, so this is False for it."""
    fitted: npt.NDArray[np.bool_]
    """True if the constants are fitted to this response. The others, which are empty or of the first step, only count
    as load of the engines."""


def calibrate(run_dir: Path) -> Calibration:
    """Fit a `[simulate]` table to a finished run.

    Raises:
        ConfigError: the folder is not the directory of a run with samples and at least LEAST_STEPS steps, or its files
            lack a value that is needed.
    """
    directory = RunDirectory(run_dir)
    rows, samples = by_step(directory.read_metrics()), directory.read_samples()
    if not directory.config.is_file() or not samples or len(rows) < LEAST_STEPS:
        raise ConfigError(
            f"{run_dir} cannot be calibrated from: expected the directory of a run with config.toml, samples.jsonl "
            f"and at least {LEAST_STEPS} steps in metrics.jsonl"
        )
    # Load it as the configuration of a simulation: model and devices of the run need not exist on this machine. The
    # simulator's default prompt may be longer than the run's model allows.
    config = load([directory.config], ["simulate={prompt_tokens=1}"], simulated=True)
    spans = directory.read_spans()
    # A sample without turns is refused here, before `gather`, which needs at least one turn.
    workload = fit_workload(samples)
    hardware = placement(config)
    engines = hardware["rollout_gpus"] // config.engine.tensor_parallel
    seen = sum(turn.tokens for sample in samples for turn in sample.turns)
    try:
        ledger = msgspec.json.decode(directory.ledger.read_bytes(), type=dict[str, float])
    except FileNotFoundError:  # the run was killed before its first checkpoint
        ledger = {}
    except DECODE_ERRORS as error:
        raise ConfigError(f"{directory.ledger} is damaged: {error}; calibrate from another run") from error
    # Only trained samples are recorded. Discarded ones kept the engines busy, too.
    load_factor = max(1.0, ledger.get("generated_tokens", seen) / max(seen, 1))
    swaps = [span for span in spans if span.name == "swap"]
    pause = fit_pause(swaps)
    first = min(sample.step for sample in samples)
    responses = gather(samples, swaps, engines, engines * config.engine.max_sequences / load_factor, first)
    # With `abort`, a sequence moves before the swap, and the engine that it moves to prefills it again.
    recompute = config.rollout.swap in ("recompute", "abort")
    engine = fit_engine(responses, swaps, engines, load_factor, recompute=recompute)
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

    In a run without GPUs, each worker process of an engine and each trainer rank counts as one GPU.
    """
    serving = sum(map(config.engines_on, range(config.cluster.nodes))) * config.engine.tensor_parallel
    return {"gpus": serving + config.trainer_world_size, "rollout_gpus": serving}


# -- engines ----------------------------------------------------------------------------------------------------------


def gather(
    samples: Sequence[SampleTimes], swaps: Sequence[Activity], engines: int, places: float, warmup_step: int
) -> ResponseTimes:
    """Collect the responses of all samples, and estimate when each began and which prompt tokens were cached.

    A response begins when it gets one of the engines' places, in order of arrival. The prompt of a problem is cached
    after its first request on an engine, and the context of an episode after its last turn. A request after a swap
    cannot use either.

    Args:
        samples: trained samples of the run, with at least one turn among them.
        swaps: swaps of all engines on the timeline; empty if there were none.
        engines: number of engines.
        places: most recorded responses that run at once on all engines together. Responses that were not recorded
            take the other places.
        warmup_step: the first step of the run. Constants are not fitted to its samples, since they include the warm-up.
    """
    swap_starts = np.sort(np.array([swap.start for swap in swaps]))
    # Number of requests of first turns by (group, number of swaps before the request).
    first_requests: Counter[tuple[int, int]] = Counter()
    # Heap of the ends of the responses that have a place.
    place_ends: list[float] = []
    # One row for each response. Its columns are named where they are read, after the loop.
    rows: list[tuple[float, float, float, float, float, bool, bool]] = []
    requests = sorted(
        ((sample.turns[index].start, sample, index) for sample in samples for index in range(len(sample.turns))),
        key=lambda request: request[0],
    )
    for start, sample, index in requests:
        turn = sample.turns[index]
        end = start + turn.generate_s
        while place_ends and place_ends[0] <= start:
            heapq.heappop(place_ends)
        # Without a free place, the response begins when another one ends, but not after its own recorded end.
        begin = start if len(place_ends) < places else min(max(start, heapq.heappop(place_ends)), end)
        heapq.heappush(place_ends, end)
        earlier = [other for other in sample.turns[:index] if other.branch == turn.branch]
        context = sum(other.observation_tokens + other.tokens for other in earlier) + turn.observation_tokens
        swaps_before = int(np.searchsorted(swap_starts, begin))
        cold = float(context)
        if index == 0:
            # With even routing, each engine gets one request of the group before any engine gets a second one. So the
            # prompt is cached on every engine after as many requests as there are engines since the last swap.
            first_requests[sample.group_id, swaps_before] += 1
            if first_requests[sample.group_id, swaps_before] > engines:
                # An engine always computes the last token, because it samples the next token from its logits.
                cold = 1.0
        if earlier and int(np.searchsorted(swap_starts, earlier[-1].start)) == swaps_before:
            cold = float(turn.observation_tokens)
        rows.append((begin, end, turn.tokens, cold, context, begin == start, sample.step > warmup_step))
    begin, end, tokens, cold, context, at_once, fitted = (np.array(column) for column in zip(*rows, strict=True))
    # True for a response that begins while others are running: more responses have begun before it than have ended.
    others = np.searchsorted(np.sort(begin), begin, side="left") > np.searchsorted(np.sort(end), begin, side="right")
    waited = at_once & others
    return ResponseTimes(begin, end, tokens.astype(float), cold, context.astype(float), waited, fitted & (tokens > 0))


def fit_engine(
    responses: ResponseTimes, swaps: Sequence[Activity], engines: int, load_factor: float, *, recompute: bool
) -> FittedPart:
    """Fit step_s, sequence_s and prefill_s to the durations of responses, as the module's docstring describes.

    Args:
        responses: recorded responses of the run.
        swaps: swaps of all engines on the timeline.
        engines: number of engines.
        load_factor: tokens that the run generated, divided by those of the recorded responses; at least 1.
        recompute: True if a swap computes the KV cache of the running sequences again.

    Raises:
        ConfigError: the constants are fitted to no response.
    """
    begin, end, fitted = responses.begin, responses.end, responses.fitted
    if not fitted.any():
        raise ConfigError(
            "no response after the first step has a token in the run's samples.jsonl: calibrate from another run"
        )
    knots = np.unique(np.concatenate([begin, end]))
    running = _open_intervals(begin, end, knots) * load_factor / engines
    prefilled = _prefilled_tokens(responses, swaps, engines, load_factor, recompute=recompute)
    paused = _paused_s(swaps, begin, end, engines)
    duration = (end - begin - paused)[fitted]
    # Each token takes one step. A response that waits for the end of a running step waits for half a step on average.
    steps = responses.tokens + 0.5 * responses.waited
    # Steps per second between the knots, of which only the proportions matter: the first round assumes 1 everywhere.
    # Later rounds leave out the time of prefill and swaps, which make only few of the steps longer.
    density = np.full(len(knots) - 1, 1.0)
    residuals, mean_running, constants = np.zeros(0), np.zeros(0), np.zeros(3)
    for _ in range(ROUNDS):
        mean_running = _mean_over_steps(running, density, knots, begin, end)
        columns = np.stack([steps, steps * mean_running, prefilled], axis=1)[fitted]
        constants, residuals = nonnegative_fit(columns, duration)
        density = 1.0 / np.maximum(constants[0] + constants[1] * running[:-1], 1e-12)
    sequences = mean_running[fitted]
    note = ""
    if sequences.std() < LEAST_VARIATION * sequences.mean():
        note = f"about {sequences.mean():.0f} sequences ran all the time: step_s and sequence_s cannot be told apart"
    names = ("step_s", "sequence_s", "prefill_s")
    return FittedPart(
        "engine",
        dict(zip(names, map(float, constants), strict=True)),
        int(fitted.sum()),
        relative(residuals, duration),
        note,
    )


def _open_intervals(begin: Floats, end: Floats, knots: Floats) -> Floats:
    """Return the number of intervals [begin, end) that are open right after each knot, a time. Both are unsorted."""
    started = np.searchsorted(np.sort(begin), knots, side="right")
    ended = np.searchsorted(np.sort(end), knots, side="right")
    return (started - ended).astype(np.float64)


def _mean_over_steps(running: Floats, density: Floats, knots: Floats, begin: Floats, end: Floats) -> Floats:
    """Return the mean number of running sequences over the steps of each response.

    Args:
        running: number of running sequences of an engine from each knot to the next one.
        density: steps per second between the knots, up to a constant factor.
        knots: times between which both are constant.
        begin: beginning of each response.
        end: end of each response.
    """
    steps = np.concatenate([[0.0], np.cumsum(density * np.diff(knots))])
    sums = np.concatenate([[0.0], np.cumsum(density * running[:-1] * np.diff(knots))])
    count = np.interp(end, knots, steps) - np.interp(begin, knots, steps)
    total = np.interp(end, knots, sums) - np.interp(begin, knots, sums)
    return np.divide(total, count, out=np.ones_like(total), where=count > 0)


def _prefilled_tokens(
    responses: ResponseTimes, swaps: Sequence[Activity], engines: int, load_factor: float, *, recompute: bool
) -> Floats:
    """Return the expected number of tokens that the engine of each response prefills during that response.

    The number is an expected one, because the record does not name a response's engine. It counts the prompt tokens of
    the response itself, those of other responses that begin during it, and the tokens that are computed again after
    swaps. A response is on the engine of another one with probability 1 / `engines`.
    """
    begin, end = responses.begin, responses.end
    times, amounts = [begin], [responses.cold * load_factor / engines]
    if recompute and swaps:
        stops = np.array([swap.stop for swap in swaps])
        # The engine that swaps has 1 / `engines` of all sequences. This response is on it with probability 1 /
        # `engines`.
        again = [_context_during(responses, swap) * load_factor / engines**2 for swap in swaps]
        times.append(stops)
        amounts.append(np.array(again))
    at, amount = np.concatenate(times), np.concatenate(amounts)
    order = np.argsort(at, kind="stable")
    sums = np.concatenate([[0.0], np.cumsum(amount[order])])
    at = at[order]
    during = sums[np.searchsorted(at, end, side="left")] - sums[np.searchsorted(at, begin, side="left")]
    # `during` weights the response's own prompt like that of another response. Here its weight becomes 1.
    return during + responses.cold * (1 - load_factor / engines)


def _context_during(responses: ResponseTimes, swap: Activity) -> float:
    """Return the tokens of context of all responses that run from before a swap until after it, on all engines
    together."""
    running = (responses.begin < swap.start) & (swap.stop < responses.end)
    begin, end = responses.begin[running], responses.end[running]
    # Share of each response that was sampled at the start of the swap, if its tokens came at an even rate.
    done = (swap.start - begin) / (end - begin)
    return float((responses.context[running] + done * responses.tokens[running]).sum())


def _paused_s(swaps: Sequence[Activity], begin: Floats, end: Floats, engines: int) -> Floats:
    """Return the expected seconds of each response in which its engine was swapping."""
    # The record does not name a response's engine, so each swap counts with probability 1/engines.
    total = np.zeros_like(begin)
    # One engine at a time: `covered_until` counts seconds in which several swaps overlap only once.
    for _, lane in itertools.groupby(sorted(swaps, key=lambda swap: swap.lane), key=lambda swap: swap.lane):
        bars = list(lane)
        total += (covered_until(bars, end) - covered_until(bars, begin)) / engines
    return total


def fit_pause(swaps: Sequence[Activity]) -> FittedPart:
    """Return the part with swap_s, the median duration of the swaps on the timeline.

    The first load of each engine is left out, because it interrupts no sequence.
    """
    lanes: dict[str, list[Activity]] = {}
    for swap in sorted(swaps, key=lambda swap: swap.start):
        lanes.setdefault(swap.lane, []).append(swap)
    seconds = np.array([swap.stop - swap.start for bars in lanes.values() for swap in bars[1:]])
    if not seconds.size:
        return FittedPart("swap", {"swap_s": 0.0}, 0, 0.0, "the timeline has no swap of a running engine")
    median = float(np.median(seconds))
    return FittedPart("swap", {"swap_s": median}, seconds.size, relative(seconds - median, seconds))


# -- training ---------------------------------------------------------------------------------------------------------


def fit_training(
    rows: Sequence[Row], samples: Sequence[SampleTimes], spans: Sequence[Activity], trainers: int
) -> FittedPart:
    """Fit train_token_s (GPU seconds per token) and train_step_s (seconds) to the tokens and times of the steps.

    The seconds per step of publishing and of checkpoints are added to train_step_s, because the simulated trainer
    spends no other time on them. If the steps have nearly equal numbers of tokens, all of their time counts as time per
    token.

    Args:
        rows: rows of metrics.jsonl, ordered by step. The first one is left out.
        samples: trained samples of the run.
        spans: activities on the timeline.
        trainers: number of trainer GPUs. The simulator divides train_token_s by it.

    Raises:
        ConfigError: no step has both a time and samples.
    """
    tokens_of: Counter[int] = Counter()  # tokens of each step that the trainer computed
    for sample in samples:
        tokens_of[sample.step] += sum(turn.observation_tokens + turn.tokens for turn in sample.turns)
    measured = [
        (tokens_of[row["step"]], seconds)
        for row in rows[1:]
        if row["step"] in tokens_of and (seconds := number(row, "trainer_step_s")) is not None
    ]
    if not measured:
        raise ConfigError("the run's metrics.jsonl has no trainer_step_s for the steps of samples.jsonl")
    tokens, seconds = np.array(measured, dtype=np.float64).T
    # seconds = constants[0] · tokens + constants[1]
    columns = np.stack([tokens, np.ones_like(tokens)], axis=1)
    constants, residuals = nonnegative_fit(columns, seconds)
    note = ""
    if slope_error(tokens, residuals) > MOST_SLOPE_ERROR * seconds.mean() / tokens.mean():
        constants = np.array([seconds.sum() / tokens.sum(), 0.0])
        residuals = seconds - tokens * constants[0]
        note = "the steps have nearly equal numbers of tokens, so all of their time counts as time per token"
    publish_and_checkpoint_s = _median_s(spans, "publish") + _total_s(spans, "checkpoint") / len(rows)
    fitted = {
        "train_token_s": float(constants[0]) * trainers,
        "train_step_s": float(constants[1]) + publish_and_checkpoint_s,
    }
    return FittedPart("training", fitted, len(measured), relative(residuals, seconds), note)


def _median_s(spans: Sequence[Activity], name: str) -> float:
    """Return the median seconds of trainer rank 0's activities of this name; 0 if there are none."""
    seconds = [span.stop - span.start for span in spans if span.name == name and span.lane == "trainer 0"]
    return float(np.median(seconds)) if seconds else 0.0


def _total_s(spans: Sequence[Activity], name: str) -> float:
    """Return the total seconds of trainer rank 0's activities of this name."""
    return sum(span.stop - span.start for span in spans if span.name == name and span.lane == "trainer 0")


# -- workload ---------------------------------------------------------------------------------------------------------


def fit_workload(samples: Sequence[SampleTimes]) -> dict[str, float | list[float]]:
    """Return lengths, latencies, turns and success rates as distributions of the measured values, by key of the table.

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
    # The mean reward of a group, cut to [0, 1], estimates the problem's probability of success.
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
    """Return a distribution (`flash.config.simulate.Distribution`) with the mean of the measured values, at least one.

    It is a list of at most VALUES equally likely values; a single number if they are equal. Each value is the mean of
    an equal part of the sorted measured values. If `integer` is True, values are rounded, and the rounding error of
    each is added to the next one, so that the mean is preserved.
    """
    parts = np.array_split(np.sort(np.array(values, dtype=np.float64)), min(VALUES, len(values)))
    means = [float(part.mean()) for part in parts]
    if integer:
        rounded: list[float] = []
        error = 0.0  # sum of the means so far, minus the sum of the rounded ones
        for mean in means:
            rounded.append(float(round(mean + error)))
            error += mean - rounded[-1]
        means = rounded
    shown = [float(f"{mean:.6g}") for mean in means]  # six digits are enough, and keep the file readable
    return shown[0] if len(set(means)) == 1 else shown


def nonnegative_fit(columns: Floats, target: Floats) -> tuple[Floats, Floats]:
    """Fit `target` [N] to a sum of the K `columns` [N, K], each times a constant, by least squares.

    No constant is negative. Returns the constants [K], and the residuals [N]: `target` minus the sum. The function
    tries every subset of the columns, so there must be few of them.
    """
    count = columns.shape[1]
    best_constants, best_residuals = np.zeros(count), target
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):
            part = columns[:, chosen]
            # Columns of very different size would make the fit inexact. The second number avoids a division by 0.
            scale = np.maximum(np.abs(part).max(axis=0), 1e-300)
            solved = np.linalg.lstsq(part / scale, target, rcond=None)[0] / scale
            if (solved < 0).any():
                continue
            constants = np.zeros(count)
            constants[list(chosen)] = solved
            residuals = target - columns @ constants
            # A subset with more constants must be better by more than rounding errors.
            if (residuals**2).sum() < (best_residuals**2).sum() * (1 - 1e-9):
                best_constants, best_residuals = constants, residuals
    return best_constants, best_residuals


def relative(residuals: Floats, values: Floats) -> float:
    """Return the root mean square of the residuals, relative to the mean absolute value of `values`."""
    mean = float(np.abs(values).mean())
    return float(np.sqrt((residuals**2).mean())) / mean if mean else 0.0


def slope_error(x: Floats, residuals: Floats) -> float:
    """Return the standard error of the slope of a line that was fitted over `x`; infinity if it is undefined.

    It is undefined if all `x` are equal, or if there are fewer than three points for the line's two constants.
    """
    spread = float(((x - x.mean()) ** 2).sum())
    if spread == 0 or len(x) < 3:
        return float("inf")
    return float(np.sqrt((residuals**2).sum() / (len(x) - 2) / spread))
