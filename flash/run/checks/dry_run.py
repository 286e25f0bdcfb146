"""Checks of `flash train --dry-run`: everything that can be tried without an engine and without training.

`flash.cli.train` calls `dry_run` after all checks of the configuration and of the machine. The environment reads its
data, plays a first turn and calls its verifier. The model's configuration, tokenizer and chat template are loaded. The
objective computes a loss.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from flash.config.check_learning import why_not_streamed
from flash.config.machine import count_gpus
from flash.config.models import hub_models, other_models
from flash.config.tree import Config
from flash.environment.load import LoadedEnvironment
from flash.environment.shared import sharing
from flash.errors import ConfigError, FlashError
from flash.rollout.episode.episode import EpisodeSettings
from flash.rollout.episode.rehearsal import rehearse
from flash.rollout.episode.tokenizer import HfTokenizer, Tokenizer
from flash.rollout.vllm.start import configure, engine_environment, ready_tokenizer, registered_maker
from flash.run.fetch import described, source_of, why_not_there
from flash.run.loop_watch import run_watched
from flash.run.node_loop import limit_held_out_problems
from flash.run.play import play_answers
from flash.run.processes.supervisor import say
from flash.samples.rules import BufferRules, ProblemKinds
from flash.trainer.model import from_gguf
from flash.trainer.model.tiny_model import is_current, save_tokenizer
from flash.trainer.objective import try_objective
from flash.types import Failure, Trajectory
from flash.waiting import deadline

SHOWN = 200
"""Largest number of characters of an observation or an answer that is shown."""


def dry_run(config: Config) -> list[str]:
    """Run all checks, and return the lines that are shown to the user. For `flash train --dry-run`.

    Raises:
        ConfigError: something would stop the run.
        FlashError: the environment has failed, outside of the episode that is played.
    """
    try_objective(config)
    lines = [f"objective: {config.algorithm.objective} gives finite losses and gradients"]
    why = why_not_streamed(config)
    lines.append("steps: streamed" if why is None else f"steps: wait for their whole batches, because {why}")
    if (present := count_gpus()) < config.gpus_per_node:
        lines.append(
            f"machine: {present} NVIDIA GPUs here, where cluster.gpus_per_node = {config.gpus_per_node}: the run "
            "itself needs them; `flash doctor` says what else it wants"
        )
    with _tokenizer(config) as (tokenizer, found):
        lines.append(f"model: {found}")
        if tokenizer is None:
            lines.append(f"environment: {config.env.path} is not played, for want of the tokenizer that is fetched")
            return lines  # a later dry run, with the model, tries the rest
        if ends := tokenizer.missing_ends():
            lines.append(f"model: {ends}")
        played, own = run_watched(say, _play, config, tokenizer)
    (turn,) = played.turns  # `_play` plays first turns only
    prompt = played.action_spans[0].start  # number of tokens before the first response
    lines.append(f"environment: {config.env.path} shows {prompt} tokens: {_short(turn.observation)}")
    stand_in = "the prompt's last token in place of a model's answer"
    lines.append(f"environment: {_short(turn.action)} ({stand_in}) gets reward {turn.reward:g}")
    lines += own
    # A sink is a user's function that gets the metrics. The configuration's own checks have imported it.
    lines += [f"sink: {path} takes what it will be called with" for path in config.track.sinks]
    if config.engine.vllm:
        lines.append(f"engine: {try_arguments(config)}")
    return lines


def try_arguments(config: Config, maker: Callable[[dict[str, Any]], Callable[..., Any]] = registered_maker) -> str:
    """Let vLLM check the arguments in `[engine.vllm]`, which is not empty, and return a sentence about the result.

    The configuration's checks have compared names and types. vLLM's own check of the values needs the GPUs and the
    model, so without them it is left out. Tests replace `maker`, which does that check.

    Raises:
        ConfigError: vLLM refuses the arguments, or has no attention for the model.
    """
    names, model = ", ".join(config.engine.vllm), Path(config.model.path)
    is_there = (model / "config.json").is_file() or "model.path" in hub_models(config)
    if count_gpus() < config.gpus_per_node or not is_there:
        return f"the arguments {names} are known; vLLM checks their values only where an engine starts"
    # The first node may have trainer ranks alone. The nodes are alike, so the GPUs of another one's engine are here.
    node = next(node for node in range(config.cluster.nodes) if config.engines_on(node))
    with engine_environment(config):
        configure(config, 0, config.engine_gpus(node, 0), lambda stats: None, maker=maker)
    return f"vLLM takes {names}"


async def _play(config: Config, tokenizer: Tokenizer) -> tuple[Trajectory, list[str]]:
    """Play the first turn of a problem twice, with a stand-in's answer in place of the model's.

    `dry_run` calls this on an event loop like that of a run. Returns the first trajectory, and lines for the user:
    about the problem's own answer, about a problem that changes although its seed is the same, and about held-out
    problems, which only evaluations ask.

    Raises:
        ConfigError: the environment cannot be played with this answer.
        FlashError: the environment's `prepare` or a method of its class has failed.
    """
    env = LoadedEnvironment(config.env.path, config.env.options)
    async with sharing(config.run.name, close_s=config.deadlines.close):
        with deadline(config.deadlines.env_step, "the environment to be ready", "its `prepare`"):
            await env.prepare()
        settings, seed = EpisodeSettings.of_run(config), config.run.seed
        problems = ProblemKinds.of(config, env.kind_of, env.domains())
        samplings = BufferRules.of(config, problems.domains).samplings()
        first_turn = partial(
            rehearse,
            *(tokenizer, env.make, env.kind_of, settings),
            samplings=samplings,
            run_seed=seed,
            now=anyio.current_time,
        )
        played = await first_turn()
        lines = await try_own_answer(config, env, played.task.seed)
        with suppress(ConfigError):  # this may fail sometimes: a run tries such a sample again
            again = await first_turn()
            lines += other_problem(played, again)
        # Only the line about a limit is needed: a dry run evaluates nothing.
        await limit_held_out_problems(config, env, lambda line: lines.append(f"eval: {line}"))
        return played, lines


async def try_own_answer(config: Config, env: LoadedEnvironment, seed: int) -> list[str]:
    """Let the environment judge the problem's own answer, if it has one. Returns the lines that are shown to the user.

    If even this answer gets no reward, the verifier probably does not fit the data, and a run would learn nothing.
    Errors of `solution_of` and of the episode become a line, too. `seed` is the seed of the problem.

    Raises:
        FlashError: another class method of the environment has failed, such as `kind_of`.
    """
    try:
        with deadline(config.deadlines.env_step, "the problem's own answer", "the environment's `solution_of`"):
            # This may read a data set. The deadline can end only the wait for the thread.
            solution = await anyio.to_thread.run_sync(env.solution_of, seed, abandon_on_cancel=True)
    except FlashError as error:
        return [f"environment: the problem's own answer cannot be tried: {error}"]
    if solution is None or env.is_informed:  # an informed environment expects token ids, and here there are none
        return []
    subject = f"environment: the problem's own answer {_short(solution)} as the answer"
    played = await play_answers(config, env, [solution], seed, one_turn=True)
    if isinstance(played, Failure):
        return [f"{subject} fails: {played.message}"]
    reward = played.turns[0].reward
    if reward > 0:
        return [f"{subject} gets reward {reward:g}"]
    doubt = "perhaps no answer is ever rewarded; see that the verifier fits the column with the answers"
    return [f"{subject} gets reward {reward:g}: {doubt}; if the column holds tests for programs, this is no fault"]


def other_problem(played: Trajectory, again: Trajectory) -> list[str]:
    """Return a line for the user if two episodes with one seed show different problems; an empty list if they show the
    same."""
    (first,), (second,) = played.turns, again.turns
    if played.task.seed != again.task.seed or first.observation == second.observation:
        return []
    shown = f"first {_short(first.observation)}, then {_short(second.observation)}"
    why = "the samples of a group would be compared though they answer different problems"
    warning = (
        f"environment: WARNING: `reset` shows another problem when it is called again with seed {played.task.seed}: "
    )
    return [f"{warning}{shown}; {why}. Draw what is random from `random.Random(seed)`"]


@contextmanager
def _tokenizer(config: Config) -> Generator[tuple[HfTokenizer | None, str]]:
    """Yield the model's tokenizer and a description of the model, for the user. Nothing is fetched or made, except for
    a tokenizer in a temporary folder. The tokenizer is None if the model must be fetched from a package first.

    Raises:
        ConfigError: the model or its tokenizer cannot be loaded, or the tiny model's tokenizer cannot be made.
    """
    path = Path(config.model.path)
    source = source_of(config.model.fetch) if config.model.fetch is not None else None
    if source is not None and why_not_there(path, source) is not None:
        if not isinstance(source, Path):
            command = shlex.join(["flash", "fetch", source.name, "--to", str(path)])
            yield None, f"{path} will be made at the start, or by `{command}`: {described(source)}"
            return
        with tempfile.TemporaryDirectory(prefix="flash-tokenizer-") as folder:
            from_gguf.save_tokenizer(source, Path(folder))
            yield _of_folder(config, folder), f"{path} will be made from {source}, {from_gguf.describe(source)}"
        return
    wanted = config.tiny_model
    if wanted is not None and not is_current(path, wanted, config.env.path, config.env.options):
        with tempfile.TemporaryDirectory(prefix="flash-tokenizer-") as folder:
            save_tokenizer(Path(folder), config.env.path, config.env.options)
            yield _of_folder(config, folder), f"{path} will be made, with one token per character"
    else:
        yield ready_tokenizer(config), f"{config.model.path}, {model_described(config)}"


def _of_folder(config: Config, folder: str) -> HfTokenizer:
    """Return the tokenizer in a folder, with the settings of `[model]`. Raises the errors of `ready_tokenizer`."""
    model = msgspec.structs.replace(config.model, path=folder)
    return ready_tokenizer(msgspec.structs.replace(config, model=model))


def model_described(config: Config) -> str:
    """Return a phrase with the class and the size of the model. Only its configuration is read, not its weights.

    The dry runs of `flash train` and of `flash sft` show it.

    Raises:
        ConfigError: transformers knows no such causal language model, its layers cannot be divided among the ranks, it
            lacks the layers that adapters are made for, or the tokenizer of another model differs.
    """
    from flash.trainer.model.adapters import empty_policy
    from flash.trainer.model.model import check_divisible, described, parameter_count, published_parameters
    from flash.trainer.references import check_tokenizer

    made = empty_policy(config)
    check_divisible(made.config, config.parallel)
    on_hub = hub_models(config)
    for key, path in other_models(config).items():
        if Path(path).is_dir() or key in on_hub:  # otherwise the run makes the model first
            check_tokenizer(config, key, path)
    own = sum(weight.numel() for _, weight in published_parameters(made))
    part = "" if config.lora is None else f", {parameter_count(own)} of them in adapters"
    return f"{described(made)}{part}"


def _short(text: str) -> str:
    """Return a text for the user, quoted, and cut after SHOWN characters."""
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "…")
