"""A small run, as one would have left it: rows, bars, readable samples and the batches that they come from."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np

from flash.observe.rundir.rundir import RunDirectory, sample_times
from flash.observe.rundir.samples import readable, write_samples
from flash.types import Activity, Batch, Outcome, Span, Task, TokenUse, TrainedSample, Trajectory, Turn, VersionRun
from tests.observe.sample_rows import STARTED, eval_row, metrics_row, spans

CONFIG = """[run]
name = "recorded"
steps = 60
[model]
path = "models/tiny"
[env]
path = "envs.arithmetic:Arithmetic"
[algorithm]
objective = "decoupled_ppo"
[train]
async_ratio = 1.0
"""
GROUP = 4
PROMPT = "What is 12 + 34? "

HOSTILE = (
    "<img src=x onerror='hacked=1'><script>hacked=1</script></pre></td></table><svg onload=hacked=1>"
    "\u202egnirts\u2066 \x1b[2J\x1b]0;title\x07 \u200bhidden {{hacked=1}} ${hacked=1}"
)
"""Text with markup, control characters and invisible characters, all of which must be shown as text."""


def record(path: Path, steps: int = 30, *, shift: float = 0.0, said: str = "the sum is 46") -> RunDirectory:
    """Record a run of `steps` steps, and return its directory. `shift` moves its curves. All responses are `said`."""
    directory = RunDirectory.open(path, CONFIG)
    directory.append_spans([*spans(steps), *_second_engine(steps)])
    for step in range(steps):
        append_step(directory, step, shift, said)
        if step % 10 == 0:
            directory.append_evaluation(eval_row(step, min(0.9, 0.3 + step / 60 + shift), k=1))
    return directory


def append_step(directory: RunDirectory, step: int, shift: float = 0.0, said: str = "the sum is 46") -> None:
    """Append the rows, samples and batch of a step to the files."""
    wave = random.Random(step).gauss(0.0, 0.6)
    row = metrics_row(
        step,
        reward_mean=0.3 + 0.5 * (1 - math.exp(-step / 25)) + 0.06 * wave + shift,
        entropy=1.1 * math.exp(-step / 60) + 0.04 * wave,
        grad_norm=0.45 + 0.1 * wave + shift,
        ess=0.93 - 0.03 * abs(wave),
        kl_reference=0.0004 * step,
        failures=int(step % 7 == 0),
        **{"env/correct": 0.4 + step / 100},
    )
    directory.append_metrics(row)
    trajectories = [sample(step, member, said) for member in range(GROUP)]
    directory.append_samples(sample_times(one, step) for one in trajectories)
    rewards = [one.reward for one in trajectories]
    texts = token_texts(said)
    write_samples(
        directory,
        step,
        [
            readable(one, step, texts, group_rewards=rewards, seen=seen(one, place))
            for place, one in enumerate(trajectories[:2])
        ],
    )
    directory.write_batch(Batch(step, max(0, step - 1), trajectories, []), keep_all=True)


def seen(trajectory: Trajectory, place: int) -> TrainedSample:
    """Return the values that a trainer reports: the first ratio is 1.5, the last token is clipped, one is too old."""
    count = trajectory.action_count
    logprobs = trajectory.behaviour() + np.array([math.log(1.5)] + [0.0] * (count - 1), dtype="<f4")
    advantages = np.full(count, 1.0 if trajectory.reward else -1.0, dtype="<f4")
    uses = bytearray([TokenUse.TRAINED] * count)
    if count > 2:
        uses[1], uses[-1], advantages[1] = TokenUse.TOO_OLD, TokenUse.CLIPPED, np.nan
    entropies = np.linspace(0.05, 4.0, count).astype("<f4").tobytes()
    return TrainedSample(place, logprobs.tobytes(), entropies, advantages.tobytes(), bytes(uses))


def sample(step: int, member: int, said: str) -> Trajectory:
    """Return a sample with a prompt of one token, and a token for each word of the response."""
    count = len(_words(said))
    old = min(1, step)
    versions = [VersionRun(step - old, 1), VersionRun(step, count - 1)] if old else [VersionRun(0, count)]
    reward = float(member % 2)
    turn = Turn(PROMPT, said, reward, STARTED + 2 * step, 0.5, 0.1, {"correct": reward}, "a note")
    return Trajectory(
        task=Task(step * GROUP + member, step, member, seed=step),
        outcome=Outcome.TRUNCATED if member else Outcome.OK,
        reward=reward,
        token_ids=np.arange(1 + count, dtype="<i4").tobytes(),
        action_spans=[Span(1, 1 + count)],
        logprobs=np.linspace(-0.01, -6.0, count).astype("<f4").tobytes(),
        versions=versions,
        turns=[turn],
    )


def _words(said: str) -> list[str]:
    """Return the text of each token of a response."""
    return [f"{word} " for word in said.split(" ")]


def token_texts(said: str) -> list[str]:
    """Return the text of each token of a sample."""
    return [PROMPT, *_words(said)]


def _second_engine(steps: int) -> list[Activity]:
    """Return activities of an engine: more bars than can be drawn one by one."""
    made: list[Activity] = []
    for place in range(60 * steps):
        at = STARTED + place / 30
        made.append(Activity("engine 1", "generate", at, at + 0.02))
    return made
