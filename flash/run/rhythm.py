"""Rhythm of attention in a text or in recorded samples, measured as training does it, but without training.

With `algorithm.rhythm`, the advantage of a token is multiplied if it is a *plan* (where the distance that the model
looks back changes most) or an *anchor* (to which later tokens attend most); `algorithms.rhythm` has the formulas. The
command `flash rhythm` calls this module to show which tokens are chosen, and why.

The model runs on the CPU in float32, in this process alone. Attention heads are classified by the responses that are
examined here; a run classifies them by a whole batch, or by its first batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from algorithms.couplings import Signals, anchors, couplings, plans
from algorithms.rhythm import FloatArray, Rhythm, changes
from flash.config.decode import examine, refuse
from flash.config.load import parse_value
from flash.config.tree import ModelConfig
from flash.errors import ConfigError
from flash.foreign.torch import single_process_group
from flash.observe.rhythm import DrawnRhythm, MeasuredHead, MeasuredResponse, MeasuredRhythm
from flash.observe.rundir.recording import read_batch, recorded_steps
from flash.observe.rundir.rundir import RunDirectory
from flash.types import Outcome, ShardSample, Span, Task, Trajectory, Turn, VersionRun

MAP_TOKENS = 96
"""Most tokens of which attention maps are drawn. The size of a map grows with the square of the number of tokens."""
MAP_PROMPT = 8
"""Number of prompt tokens at the beginning of a map; fewer if the prompt is shorter."""
KEY = "algorithm.rhythm"
"""Key of the options in the configuration."""

Encode = Callable[[str], list[int]]
"""Function that tokenizes a text."""


@dataclass(frozen=True)
class RhythmResponses:
    """Responses to examine: a text, or samples of a recorded batch."""

    trajectories: list[Trajectory]
    names: list[str]
    """Name of each response for the output."""
    min_version: int
    """Oldest version of action tokens that are trained. Responses with older tokens only are not examined."""
    max_tokens: int
    """Most tokens of a micro-batch."""


def options_with(base: Rhythm, overrides: Sequence[str]) -> Rhythm:
    """Return a copy of `base` with the options changed that KEY=VALUE overrides of `[algorithm.rhythm]` name.

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


def text_responses(text: Path, prompt: Path | None, encode: Encode) -> RhythmResponses:
    """Return one response: the tokens of a text after its prompt.

    Without a prompt, the first token of the text takes its place. A newline at the end of a file does not belong to the
    text.

    Raises:
        ConfigError: a file cannot be read, or the response has fewer than two tokens.
    """
    prompt_tokens = [] if prompt is None else _encoded(prompt, encode)
    text_tokens = _encoded(text, encode)
    if not text_tokens:
        raise ConfigError(f"{text} is empty: expected a text of several tokens")
    before = len(prompt_tokens) or 1
    count = len(prompt_tokens) + len(text_tokens) - before
    if count < 2:
        instead = "" if prompt_tokens else " after its first, which stands for the prompt"
        raise ConfigError(
            f"{text} has {count} token{'' if count == 1 else 's'} to look at{instead}; expected at least 2, since a "
            "change is between neighbours"
        )
    tokens = np.array([*prompt_tokens, *text_tokens], dtype="<i4")
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
    return RhythmResponses([whole], [text.name], 0, len(tokens))


def recorded_responses(run_dir: Path, step: int | None, samples: int, *, max_tokens: int) -> RhythmResponses:
    """Return up to `samples` samples of a recorded batch, spread evenly over it. None as `step` means the newest batch.

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
    fit = [
        number
        for number, one in enumerate(batch.trajectories)
        if one.action_count > 1 and one.trained_tokens(batch.min_version) > 0
    ]
    if not fit:
        raise ConfigError(
            f"{run_dir}: no response of step {step} has a token that was trained and at least 2 tokens, since a change "
            "is between neighbours"
        )
    count = min(samples, len(fit))
    chosen = [fit[place * len(fit) // count] for place in range(count)]
    some = [batch.trajectories[number] for number in chosen]
    names = [
        f"step {step}, sample {number} (group {one.task.group_id}, reward {one.reward:g})"
        for number, one in zip(chosen, some, strict=True)
    ]
    return RhythmResponses(some, names, batch.min_version, max_tokens)


def examine_responses(
    model: ModelConfig,
    weights: str,
    given: RhythmResponses,
    options: Rhythm,
    token_texts: Callable[[Sequence[int]], list[str]],
    drawn: tuple[int, int] | None,
) -> tuple[MeasuredRhythm, DrawnRhythm | None]:
    """Measure the rhythm of responses under a model. If `drawn` is given, also return attention maps of one response.

    Args:
        model: settings of the model. The path is a model folder or a hub id.
        weights: name of the weights in the result.
        given: responses, from `text_responses` or `recorded_responses`.
        options: options, from `options_with`.
        token_texts: function of the tokenizer that returns the texts of tokens.
        drawn: index of a response, and index of the token of it from which the maps are drawn; both from 0.

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
        longest, limit = max(one.length for one in given.trajectories), positions(policy)
        if limit is not None and longest > limit:
            raise ConfigError(f"{weights} has {limit} positions, and there are {longest} tokens; expected no more")
        samples = [ShardSample(number, one) for number, one in enumerate(given.trajectories)]
        micros = pack(samples, min_version=given.min_version, max_tokens=given.max_tokens)
        heads, found = observe_responses(policy, mesh, micros, options)
        found.sort(key=lambda one: one.sample)
        seen = MeasuredRhythm(
            weights=weights,
            options=options,
            temperatures=sorted({one.task.sampling.temperature for one in given.trajectories}),
            heads=[MeasuredHead(one.layer, one.head, one.span, one.kind) for one in heads],
            responses=[
                _response(given.names[one.sample], token_texts(tokens.tolist()), options, one.signals, one.multiplier_R)
                for one, tokens in ((one, given.trajectories[one.sample].tokens()) for one in found)
            ],
            couplings=couplings(options, [one.signals for one in found]),
        )
        if drawn is None:
            return seen, None
        number, begin = drawn
        part = _part(found[number].signals, samples[number].trajectory.length, begin)
        (micro,) = pack([samples[number]], min_version=given.min_version, max_tokens=given.max_tokens)
        return seen, DrawnRhythm(seen.responses[number], part.start, attention_maps(policy, micro, heads, part))


def _part(signals: Signals, length: int, begin: int) -> slice:
    """Return the range of the sequence's tokens that are drawn: up to MAP_TOKENS, from MAP_PROMPT before token `begin`.

    Args:
        signals: signals of the response, which have the positions of its tokens in the sequence.
        length: number of tokens of the sequence.
        begin: index of a response token.
    """
    start = max(int(signals.position_R[begin]) - MAP_PROMPT, 0)
    return slice(start, min(start + MAP_TOKENS, length))


def _response(
    name: str, tokens: list[str], options: Rhythm, signals: Signals, multiplier_R: FloatArray
) -> MeasuredResponse:
    """Return the findings of one response, for the output.

    Args:
        name: name of the response.
        tokens: texts of all tokens of its sequence.
        options: options of `algorithm.rhythm`.
        signals: signals of its R tokens.
        multiplier_R: multipliers of its advantages.
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


def _encoded(file: Path, encode: Encode) -> list[int]:
    """Return the tokens of a text file, without a newline at its end. Raises ConfigError."""
    try:
        text = file.read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; expected a file of UTF-8 text") from error
    try:
        return encode(text)
    except Exception as error:  # tokenizers raise errors of no common class
        raise ConfigError(f"{file}: the model's tokenizer has no tokens for this text: {error}") from error
