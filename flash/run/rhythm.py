"""Rhythm of attention in a text or in recorded samples, measured as training does it, but without training.

With `algorithm.rhythm`, the advantage of a token is multiplied if the token is a *plan* or an *anchor*. At a plan, the
distance that the model looks back changes most. To an anchor, later tokens attend most. `algorithms.rhythm` has the
formulas. The command `flash rhythm` calls this module to show which tokens are chosen, and why. It makes
`RhythmResponses` with `text_responses` or `recorded_responses`, and measures them with `examine_responses`.

Each token of a response has *signals*. WAAD is the mean distance in tokens that the model looks back from it, within a
window. FAI or *influence* is the attention that later tokens pay to it. The suffix `_R` stands for the R tokens of a
response.

The model runs on the CPU in float32, in the process of the command. Attention heads are classified by the responses
that are examined here; a run classifies them by a whole batch, or by its first batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from algorithms.couplings import Signals, anchors, couplings, plans
from algorithms.rhythm import FloatArray, Rhythm, changes
from flash.branches import split_branches
from flash.config.decode import examine, refuse
from flash.config.load import parse_value
from flash.config.tree import ModelConfig
from flash.errors import ConfigError
from flash.foreign.torch import single_process_group
from flash.observe.rhythm import DrawnRhythm, MeasuredHead, MeasuredResponse, MeasuredRhythm
from flash.observe.rundir.recording import read_batch, recorded_steps
from flash.observe.rundir.rundir import RunDirectory
from flash.rollout.episode.tokenizer import Tokenizer
from flash.types import Outcome, ShardSample, Span, Task, Trajectory, Turn, VersionRun

MAP_TOKENS = 96
"""Largest number of tokens in an attention map. The size of a map grows with the square of the number of tokens."""
MAP_CONTEXT = 8
"""Number of tokens that a map shows before the token with which the user lets it begin; fewer if there are fewer."""
KEY = "algorithm.rhythm"
"""Key of the options in the configuration."""


@dataclass(frozen=True)
class RhythmResponses:
    """Responses to examine: a text, or branches of the samples of a recorded batch."""

    trajectories: list[Trajectory]
    """The responses, each with its prompt. Each is one sequence, and has at least 2 tokens, one of which is trained."""
    names: list[str]
    """Name of each response for the output."""
    min_version: int
    """Oldest version of the weights whose tokens are trained."""


def overridden_options(base: Rhythm, overrides: Sequence[str]) -> Rhythm:
    """Return a copy of `base` in which KEY=VALUE overrides of `[algorithm.rhythm]` have changed options.

    `base` has the options of the run, or the defaults. The user gives the overrides to `flash rhythm`.

    Raises:
        ConfigError: there is no such option, or the value is invalid.
    """
    table = msgspec.to_builtins(base)
    for override in overrides:
        key, _, value = override.partition("=")
        table[key.strip()] = parse_value(value.strip())
    options, problems = examine(table, Rhythm, KEY)
    if problems:
        raise refuse(problems)
    return options


def text_responses(text: Path, prompt: Path | None, tokenizer: Tokenizer) -> RhythmResponses:
    """Return one response: the tokens of a text file after those of its prompt file.

    For `flash rhythm` with a text. Without a prompt, the first token of the text takes its place. A newline at the end
    of a file does not belong to the text.

    Args:
        text: file of the response.
        prompt: file of the prompt; None: there is no prompt.
        tokenizer: the model's tokenizer.

    Raises:
        ConfigError: a file cannot be read or is empty, or the response has fewer than two tokens.
    """
    prompt_tokens = [] if prompt is None else _tokens_of_file(prompt, tokenizer.render)
    # `render` begins with the tokens that the tokenizer puts before any text. After a prompt they must not come again.
    text_tokens = _tokens_of_file(text, partial(tokenizer.follow, end=None) if prompt_tokens else tokenizer.render)
    before = len(prompt_tokens) or 1
    count = len(prompt_tokens) + len(text_tokens) - before
    if count < 2:
        instead = "" if prompt_tokens else " after its first, which stands for the prompt"
        raise ConfigError(
            f"{text} has {count} token{'' if count == 1 else 's'} to look at{instead}; expected at least 2, since a "
            "change is between neighbours"
        )
    tokens = np.array([*prompt_tokens, *text_tokens], dtype="<i4")
    # The measurement takes trajectories, as of a recorded batch. Rewards, log-probs and versions have no effect on it.
    whole = Trajectory(
        task=Task(0, 0, 0, seed=0),
        outcome=Outcome.OK,
        reward=0.0,
        token_ids=tokens.tobytes(),
        action_spans=[Span(before, len(tokens))],
        logprobs=np.zeros(count, dtype="<f4").tobytes(),
        versions=[VersionRun(0, count)],
        turns=[Turn("", "", 0.0, 0.0, 0.0, 0.0)],
    )
    return RhythmResponses([whole], [text.name], 0)


def recorded_responses(run_dir: Path, step: int | None, samples: int) -> RhythmResponses:
    """Return the responses of up to `samples` samples of a recorded batch, spread evenly over it.

    For `flash rhythm` with a run. An episode with several branches, which are several sequences of tokens, gives a
    response for each of them.

    Args:
        run_dir: the run directory.
        step: number of the step that trained the batch; None: the newest recorded step.
        samples: largest number of samples.

    Raises:
        ConfigError: there is no such batch, or it has no response that can be examined.
        RecordingError: the batch is damaged.
    """
    folder = RunDirectory(run_dir).batches
    steps = recorded_steps(folder)
    if not steps:
        raise ConfigError(
            f"{run_dir} holds no recorded batches: its run has made no step yet, or had checkpoint.batches = 'none'"
        )
    step = steps[-1] if step is None else step
    if step not in steps:
        raise ConfigError(f"--step: expected one that is recorded ({steps[0]} to {steps[-1]}), got {step}")
    batch = read_batch(folder, step)
    fit: list[tuple[int, int, Trajectory]] = []  # number of the sample, number of the branch, the branch
    for number, one in enumerate(batch.trajectories):
        for place, branch in enumerate(split_branches(one)):
            if branch.action_count > 1 and branch.trained_tokens(batch.min_version) > 0:
                fit.append((number, place, branch))
    if not fit:
        raise ConfigError(
            f"{run_dir}: no response of step {step} has a token that was trained and at least 2 tokens, since a change "
            "is between neighbours"
        )
    numbers = list(dict.fromkeys(number for number, _, _ in fit))  # samples with a response that can be examined
    count = min(samples, len(numbers))
    chosen = {numbers[place * len(numbers) // count] for place in range(count)}
    some = [(number, place, branch) for number, place, branch in fit if number in chosen]
    names: list[str] = []
    for number, place, one in some:
        branch = f", branch {place}" if len(batch.trajectories[number].branches) > 1 else ""
        names.append(f"step {step}, sample {number}{branch} (group {one.task.group_id}, reward {one.reward:g})")
    return RhythmResponses([branch for _, _, branch in some], names, batch.min_version)


def examine_responses(
    model: ModelConfig,
    weights: str,
    responses: RhythmResponses,
    options: Rhythm,
    token_texts: Callable[[Sequence[int]], list[str]],
    drawn: tuple[int, int] | None,
) -> tuple[MeasuredRhythm, DrawnRhythm | None]:
    """Measure the rhythm of responses under a model. With `drawn`, also return attention maps of one response.

    For `flash rhythm`. The measurement has the options, the class and span of each attention head, and the signals and
    the choice of each token. It also shows how plans and anchors follow each other (*couplings*).

    Args:
        model: settings of the model. The path is a model folder or a hub id.
        weights: name of the weights in the result.
        responses: responses, from `text_responses` or `recorded_responses`.
        options: options, from `overridden_options`.
        token_texts: function of the tokenizer that returns the texts of tokens.
        drawn: number of a response, and number of one of its tokens, with which the maps begin; both from 0. None: no
            maps are made.

    Raises:
        ConfigError: the model cannot be loaded or examined, or has fewer positions than a response has tokens.
    """
    from flash.foreign.transformers import hidden_progress_bars, positions
    from flash.trainer.mesh import trainer_mesh
    from flash.trainer.model.model import load_model, shard_model
    from flash.trainer.packing import pack
    from flash.trainer.rhythm import attention_maps, observe_responses

    with single_process_group("gloo"):
        mesh = trainer_mesh("cpu")
        with hidden_progress_bars():
            policy = shard_model(load_model(model), mesh, model)
        longest, limit = max(one.length for one in responses.trajectories), positions(policy)
        if limit is not None and longest > limit:
            raise ConfigError(f"{weights} has {limit} positions, and there are {longest} tokens; expected no more")
        # A micro-batch for each response, in the order of the responses, so that results are found by their numbers.
        micros = pack(
            [ShardSample(number, one) for number, one in enumerate(responses.trajectories)],
            min_version=responses.min_version,
            max_tokens=longest,
            share_rows=False,
        )
        heads, observed = observe_responses(policy, mesh, micros, options)
        measured_responses: list[MeasuredResponse] = []
        for trajectory, name, one in zip(responses.trajectories, responses.names, observed, strict=True):
            texts = token_texts(trajectory.tokens().tolist())
            measured_responses.append(_measured_response(name, texts, options, one.signals, one.multiplier_R))
        measured = MeasuredRhythm(
            weights=weights,
            options=options,
            temperatures=sorted({one.task.sampling.temperature for one in responses.trajectories}),
            heads=[MeasuredHead(one.layer, one.head, one.span, one.kind) for one in heads],
            responses=measured_responses,
            couplings=couplings(options, [one.signals for one in observed]),
        )
        if drawn is None:
            return measured, None
        number, begin = drawn
        part = _drawn_range(observed[number].signals, responses.trajectories[number].length, begin)
        maps = attention_maps(policy, micros[number], heads, part)
        return measured, DrawnRhythm(measured.responses[number], part.start, maps)


def _drawn_range(signals: Signals, length: int, begin: int) -> slice:
    """Return the range of the sequence's tokens that attention maps show.

    The range begins MAP_CONTEXT tokens before token `begin`, and has up to MAP_TOKENS tokens.

    Args:
        signals: signals of the response, which have the positions of its tokens in the sequence.
        length: number of tokens of the sequence.
        begin: number of a response token, from 0.
    """
    start = max(int(signals.position_R[begin]) - MAP_CONTEXT, 0)
    return slice(start, min(start + MAP_TOKENS, length))


def _measured_response(
    name: str, tokens: list[str], options: Rhythm, signals: Signals, multiplier_R: FloatArray
) -> MeasuredResponse:
    """Return the findings of one response, for the output: for each of its R tokens the signals, and whether it is a
    plan or an anchor.

    Args:
        name: name of the response.
        tokens: texts of all tokens of its sequence, with the prompt.
        options: options of `algorithm.rhythm`.
        signals: signals of its R tokens, with their positions in the sequence.
        multiplier_R: factor of the advantage of each token.
    """
    return MeasuredResponse(
        name=name,
        tokens=tokens,
        places=signals.position_R.tolist(),
        waad=signals.waad_R.tolist(),
        change=changes(signals.waad_R, signals.position_R).tolist(),
        fai=signals.influence_R.tolist(),
        entropy=signals.entropy_R.tolist(),
        multiplier=multiplier_R.tolist(),
        plan=plans(options, signals).tolist(),
        anchor=anchors(options, signals).tolist(),
    )


def _tokens_of_file(file: Path, encode: Callable[[str], list[int]]) -> list[int]:
    """Return the tokens of a text file, without a newline at its end.

    `encode` is a method of the model's tokenizer that returns the tokens of a text.

    Raises:
        ConfigError: the file cannot be read or is empty, or the tokenizer has no tokens for its text.
    """
    try:
        text = file.read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; expected a file of UTF-8 text") from error
    if not text:
        raise ConfigError(f"{file} is empty: expected a text of several tokens")
    try:
        return encode(text)
    except Exception as error:  # tokenizers raise errors of no common class
        raise ConfigError(f"{file}: the model's tokenizer has no tokens for this text: {error}") from error
