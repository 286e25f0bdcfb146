"""Check `training` of `flash check-env`: `flash train` trains a tiny model on the environment for some minutes.

The run is a process of its own, in a temporary folder. It is ended after `TRAINED_S` seconds of training, and its
evaluations so far show if the model has improved.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter

import anyio
import msgspec
from anyio.abc import Process

from flash.config.check import WARM_START_METHODS
from flash.config.learning import TrainConfig
from flash.config.load import dump
from flash.config.objects import own_folders
from flash.config.tree import (
    CheckpointConfig,
    ClusterConfig,
    Config,
    EngineConfig,
    EvalConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TinyModelConfig,
)
from flash.environment.interface import SolvedExample, WarmStart
from flash.foreign.forking import python_command
from flash.observe.rundir.rundir import RunDirectory
from flash.observe.stats import Interval, difference
from flash.run.checks.doctor import Finding
from flash.run.checks.env.trial import Trial, examples_within

TRAINED_S = 180.0
"""Longest time of the training in seconds, counted from the first evaluation, which comes before the first step."""
LEAST_S = 90.0
"""Time in seconds below which nothing is trained: the model must be made, and the engine must start."""
END_S = 20.0
"""Seconds that an interrupted run has to end, before its processes are killed."""
STEPS, EVERY = 400, 20
"""Largest number of steps, and number of steps between two evaluations."""
COMMAND = (
    "import sys; from flash.cli.main import main; from flash.run.processes.launch_state import end_with_parent; "
    "end_with_parent(); sys.exit(main(sys.argv[1:]))"
)
"""Program that runs `flash`, and ends when this process is killed: otherwise the training would go on alone."""
SAMPLED = 200
"""Largest number of solved examples whose lengths give the limits of the run."""
EXAMPLES_SHARE = 0.1
"""Share of the time of the check in which these examples are made."""


async def train_tiny(trial: Trial) -> Finding:
    """Train a tiny model with solved examples of the environment, and compare the first evaluation with the last.

    Called as the check `training`. Returns `skipped` if the environment's class is no `WarmStart`, which has solved
    examples, or if time is too short. A cancellation ends the run, too.

    Raises:
        EnvError: the constructor or `solved_examples` failed.
    """
    # `until` is at half of the check's time: other checks stop there to wait for their last episodes.
    seconds = 2 * (trial.until - perf_counter()) - END_S
    made = trial.made()
    if not isinstance(made, WarmStart):
        needed = " and ".join(f"`{name}`" for name in WARM_START_METHODS)
        return Finding(
            "skipped", "the class has no solved examples for a tiny model", f"define {needed} to have it tried"
        )
    if seconds < LEAST_S:
        return Finding("skipped", f"{max(0.0, seconds):.0f} s are left for it", "allow more with --minutes")
    with tempfile.TemporaryDirectory(prefix="flash-check-") as folder:
        examples = await anyio.to_thread.run_sync(examples_within, made, SAMPLED, seconds * EXAMPLES_SHARE)
        config = config_of(trial.config, examples, Path(folder))
        file, log = Path(folder) / "run.toml", Path(folder) / "output.txt"
        file.write_text(dump(config), encoding="utf-8")
        ended, failed = "it was ended", False
        evaluations: list[Interval] = []
        start, trained_at = perf_counter(), None
        async with _training(file, log) as process:
            while perf_counter() < start + seconds and (trained_at is None or perf_counter() < trained_at + TRAINED_S):
                await anyio.sleep(1)
                evaluations = _evaluations(config.run_dir)
                trained_at = trained_at or (perf_counter() if evaluations else None)
                if process.returncode is not None:  # the run has finished its steps, or has failed
                    ended, failed = f"it ended with exit code {process.returncode}", process.returncode != 0
                    break
        evaluations = _evaluations(config.run_dir)  # the last one may have come while the run ended
        return judged(evaluations, f"{ended} after {perf_counter() - start:.0f} s", _last_line(log), failed=failed)


def judged(evaluations: Sequence[Interval], end: str, last_line: str, *, failed: bool) -> Finding:
    """Return the finding about the evaluations of a training: a pass only if the mean reward has surely grown.

    Args:
        evaluations: mean rewards of held-out problems with their 95 % intervals, the first before training.
        end: phrase for the end of the run.
        last_line: last line of the output of the run, which says why it has no evaluations.
        failed: True if the run ended with an error, so that more time would not help.
    """
    if len(evaluations) < 2:
        advice = "" if failed else "allow more with --minutes"
        return Finding("warning", f"no second evaluation: {end}; last line: {last_line}", advice)
    first, last = evaluations[0], evaluations[-1]
    gain = difference(first, last)
    text = f"held-out reward {_interval(first)} before training, and {_interval(last)} after it; {end}"
    if gain.low > 0:  # the whole interval of the difference is above 0
        return Finding("pass", text)
    return Finding("warning", f"no gain seen: {text}", "a longer run may learn, or the rewards may be too rare")


def config_of(config: Config, examples: list[SolvedExample], folder: Path) -> Config:
    """Return the configuration of the training, whose model and run lie in `folder`.

    The limits of answers and episodes are about twice as long as the examples: a model that is not perfect gives longer
    answers and needs more turns.

    Args:
        config: configuration with the environment.
        examples: solved examples of the environment; at least one.
        folder: temporary folder.
    """
    games = [(example, *example.later) for example in examples]  # the turns of each example
    longest = 2 + 2 * max(len(turn.answer) for game in games for turn in game)
    turns = min(config.rollout.max_turns, 2 * max(map(len, games)))
    # One token is one character. The tokens of an example are scaled from its own number of turns to `turns`.
    tokens = max(sum(len(turn.prompt) + longest for turn in game) * turns // len(game) for game in games)
    return Config(
        run=RunConfig("check-env", output_dir=str(folder), steps=STEPS),
        model=ModelConfig(str(folder / "model"), dtype="float32", max_length=max(32, tokens + 8)),
        env=msgspec.structs.replace(config.env, folders=[*config.env.folders, *own_folders()]),
        tiny_model=config.tiny_model or TinyModelConfig(layers=2, width=64),
        rollout=RolloutConfig(max_new_tokens=longest, max_turns=turns),
        engine=EngineConfig(max_sequences=128, enforce_eager=True, kv_cache_gib=0.5),
        train=TrainConfig(batch_size=128, learning_rate=6e-4, warmup_steps=10),
        eval=EvalConfig(every=EVERY, problems=256),
        checkpoint=CheckpointConfig(every=STEPS),
        cluster=ClusterConfig(gpus_per_node=0),
        deadlines=config.deadlines,
    )


@asynccontextmanager
async def _training(file: Path, log: Path) -> AsyncGenerator[Process]:
    """Run `flash train` on a configuration while the block runs, and interrupt it at the end of the block.

    Yields the process. If it does not end within `END_S` after the interrupt, its whole process group is killed. A
    cancellation of the block does not shorten this.

    Args:
        file: configuration.
        log: file that gets the output.
    """
    with log.open("wb") as output:
        process = await anyio.open_process(
            [*python_command(COMMAND), "train", str(file)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        with anyio.move_on_after(END_S, shield=True):
            await process.wait()
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)


def _evaluations(run_dir: Path) -> list[Interval]:
    """Return the mean rewards of a run's evaluations so far, with their intervals; empty if there are none yet.

    Evaluations without an interval are left out, such as an evaluation of which only one problem did not fail.
    """
    directory = RunDirectory(run_dir)
    rows = directory.read_evaluations() if directory.evals.is_file() else []
    return [Interval(row["mean_reward"], row["low"], row["high"]) for row in rows if "low" in row]


def _last_line(log: Path) -> str:
    """Return the last line of the file `log` that is not empty; `no output` if there is none."""
    return next(reversed(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()), "no output")


def _interval(one: Interval) -> str:
    """Return a mean with its 95 % interval, in words."""
    return f"{one.mean:.3f} ({one.low:.3f} to {one.high:.3f})"
