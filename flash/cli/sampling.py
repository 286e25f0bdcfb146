"""`flash eval` and `flash rollout`: play a model in the environment of a configuration, without training.

Both commands accept the arguments of `flash train`, with `--model` to replace `model.path`; or a run directory, with
its configuration and newest weights; or a model together with `--env`. They write nothing to the run directory.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from flash.cli.arguments import CommandParsers, check_writable, require_engine
from flash.config.check import advise_on_engines
from flash.config.decode import ConfigProblem
from flash.config.load import load, split_arguments
from flash.config.models import SHOWN, folders_beside, is_gguf
from flash.config.tree import Config
from flash.errors import ConfigError
from flash.observe.console import best_of_lines, environment_lines, evaluation_line
from flash.observe.rundir.rundir import RunDirectory, write_atomically
from flash.observe.stats import BestOf, best_of_each
from flash.run.models import make_missing_models, model_folder, overrides_of_run
from flash.text import harmless, one_line
from flash.trainer.checkpoint_files import MANIFEST

if TYPE_CHECKING:
    from flash.observe.rundir.samples import Sample
    from flash.run.sampling import Sampled

INDENT = "    "
"""Indentation of the texts in a printed episode."""


def add_eval(commands: CommandParsers) -> argparse.ArgumentParser:
    """Add the parser of `flash eval` to `commands`, and return it."""
    parser = commands.add_parser("eval", help="Evaluate a configuration, a run or a model on held-out problems.")
    add_options(parser)
    parser.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help="Number of answers to each problem, which gives pass@k for k up to N. Default: eval.samples.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write the result to this file.")
    parser.set_defaults(run=run_eval)
    return parser


def run_eval(arguments: argparse.Namespace) -> int:
    """Evaluate a model with the settings of `[eval]`, as a run does, for `flash eval`. Returns 1 if an episode failed.

    Prints the line that a run prints, pass@k (the mean reward of the best of k answers), and the metrics of the
    environment.
    """
    from flash.run.sampling import evaluate

    check_writable(arguments.json, arguments.transcripts)
    config, model = load_named(arguments)
    if arguments.samples is not None:  # read again, so that the value is checked like that of any key
        config, model = load_named(arguments, *_several_answers(arguments.samples, config))
    sampled, samples = play_model(config, model, evaluate)
    found = best_of_each(rewards_by_problem(samples))
    if arguments.json is not None:
        write_atomically(arguments.json, evaluation_json(sampled.evaluation, found))
    write_transcripts(arguments.transcripts, samples)
    lines = [evaluation_line(sampled.evaluation)]
    if len(found) > 1:
        lines += best_of_lines(found, binary=sampled.evaluation["binary"] == 1)
    sys.stdout.writelines(f"{one_line(line)}\n" for line in lines + environment_lines(sampled.evaluation))
    return print_failures(sampled)


def _several_answers(samples: int, config: Config) -> list[str]:
    """Return the overrides with which `config` evaluates `samples` answers per problem, the value of `--samples`. May
    print a line about the temperature on stderr."""
    # At temperature 0 several answers would be equal, so the temperature of training is used, which a line reports.
    temperature = config.eval.temperature
    if samples > 1 and temperature == 0:
        temperature = config.rollout.temperature
        sys.stderr.write(f"[answers are drawn at temperature {temperature:g}, as for training]\n")
    return [f"eval.samples={samples}", f"eval.temperature={temperature}"]


def rewards_by_problem(samples: Sequence[Sample]) -> list[list[float]]:
    """Return the rewards of the answers to each problem, in one list per problem. The answers to a problem form a
    group."""
    problems: dict[int, list[float]] = {}
    for sample in samples:
        problems.setdefault(sample.group_id, []).append(sample.reward)
    return list(problems.values())


def evaluation_json(row: dict[str, float], found: Sequence[BestOf]) -> bytes:
    """Return the content of the file of `--json`: the numbers of `row`, the row of the evaluation, by name; `time`, the
    present Unix time in seconds; and `best_of`, the list of `found`, the pass@k for each k with its interval.

    If a reward is neither 0 nor 1, `found` has the mean of the best of k rewards instead of pass@k.
    """
    each = [{"k": one.k, **one.interval._asdict()} for one in found]
    return msgspec.json.format(msgspec.json.encode({**row, "time": time.time(), "best_of": each}), indent=2) + b"\n"


def add_rollout(commands: CommandParsers) -> argparse.ArgumentParser:
    """Add the parser of `flash rollout` to `commands`, and return it."""
    parser = commands.add_parser(
        "rollout", help="Play some episodes of a configuration, a run or a model, and print their texts."
    )
    add_options(parser)
    parser.add_argument("--episodes", "-n", type=int, default=4, metavar="N", help="Number of episodes. Default: 4.")
    parser.set_defaults(run=run_rollout)
    return parser


def run_rollout(arguments: argparse.Namespace) -> int:
    """Play the first training problems, sampled as in training, for `flash rollout`. Returns 1 if an episode failed.

    Prints the episodes and their mean reward.
    """
    from flash.run.sampling import roll_out

    if arguments.episodes < 1:
        raise ConfigError(f"--episodes: expected at least 1, got {arguments.episodes}")
    check_writable(arguments.transcripts)
    config, model = load_named(arguments)
    sampled, samples = play_model(config, model, partial(roll_out, episodes=arguments.episodes))
    write_transcripts(arguments.transcripts, samples)
    for one in samples:
        sys.stdout.write(transcript(one) + "\n")
    mean = sum(one.reward for one in samples) / len(samples)
    sys.stdout.write(f"{len(samples)} episodes, mean reward {mean:.3f}\n")
    return print_failures(sampled)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that both `flash eval` and `flash rollout` accept."""
    parser.add_argument(
        "config",
        nargs="*",
        metavar="CONFIG|RUN_DIR|MODEL|KEY=VALUE",
        help="Configuration files and settings, as for `flash train`; or the folder of a run; or, with --env, a model.",
    )
    parser.add_argument(
        "--env",
        metavar="MODULE:CLASS",
        help="Environment in which MODEL is played, without a configuration. "
        "Settings env.options.KEY=VALUE are its options.",
    )
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="Folder, hub id, GGUF file, checkpoint or run to sample from. "
        "Default: model.path, or the newest weights of the run.",
    )
    parser.add_argument(
        "--transcripts",
        type=Path,
        metavar="FILE.jsonl",
        help="Write each episode to this file, one per line, with its texts.",
    )


def transcript(sample: Sample) -> str:
    """Return an episode as text for people: the observation and the answer of each turn, with rewards and notes."""
    tokens = sum(span.stop - span.start for span in sample.action_spans)
    lines = [f"--- seed {sample.seed}: {sample.outcome}, reward {sample.reward:g}, {tokens} tokens"]
    for number, turn in enumerate(sample.turns, 1):
        where = f" in branch {turn.branch}" if len(sample.branches) > 1 else ""
        lines += [f"[{number}] shown{where}:", _indented(turn.observation)]
        lines.append(f"[{number}] answer, reward {turn.reward:g}:")
        lines.append(_indented(turn.action))
        lines += [f"[{number}] note: {one_line(turn.note)}"] if turn.note else []
    return "\n".join(lines)


def _indented(text: str) -> str:
    """Return the text indented and without control sequences of the terminal, because models may write any text."""
    return "\n".join(INDENT + line for line in harmless(text).split("\n"))


def print_failures(sampled: Sampled) -> int:
    """Print the number of failed episodes and the last failure. Returns the exit code: 1 if any episode failed."""
    failed, played = sampled.failures, len(sampled.trajectories)
    if failed:
        last = f"the last one ({failed[-1].outcome}): {failed[-1].message}"
        counted = f"{len(failed)} of {played + len(failed)} episodes failed, and are in no figure"
        sys.stdout.write(f"{counted}; {harmless(last)}\n")
    return int(bool(failed))


def write_transcripts(file: Path | None, samples: Sequence[Sample]) -> None:
    """Write one episode per line to `file`, in the format of a run's trajectories. None: write nothing."""
    if file is not None:
        write_atomically(file, b"".join(msgspec.json.encode(sample) + b"\n" for sample in samples))


def load_named(arguments: argparse.Namespace, *more: str) -> tuple[Config, str | None]:
    """Return the configuration that the arguments name, with the overrides `more`, and the model.

    `flash eval` and `flash rollout` call this before any work. The arguments may name configuration files, a run, or a
    model with `--env`. The model is as the user has named it; None if it is the one of `model.path`.

    Raises:
        ConfigError: the arguments name no configuration, or an invalid one.
    """
    named: str | None = arguments.model
    if not arguments.config:
        raise ConfigError(_nothing_named(named))
    paths, overrides = split_arguments(arguments.config)
    if len(paths) > 1 and (run := next((path for path in paths if RunDirectory(path).config.is_file()), None)):
        raise ConfigError(f"{run} is a run, which has its own configuration: name it alone, or with --model {run}")
    only = paths[0]  # the only path, except for configuration files, of which there may be several
    # The first two cases are a run, and a model with --env. The other cases are mistakes. Anything else is the path of
    # a configuration file, which `load` reads.
    if RunDirectory(only).config.is_file() and arguments.env is None:
        named = named or str(only)
        paths, overrides = [RunDirectory(only).config], [*overrides_of_run(named), *overrides]
    elif arguments.env is not None:
        if len(paths) != 1 or (only.is_file() and not is_gguf(str(only))) or named is not None:
            raise ConfigError("--env goes with one model: a folder, hub id or GGUF file; a config has its env.path")
        named = str(only)
        texts = {"run.name": "eval", "model.path": named, "env.path": arguments.env}
        paths, overrides = [], [*(f"{key}={json.dumps(text)}" for key, text in texts.items()), *overrides]
    elif (only / "config.json").is_file() or is_gguf(str(only)):
        raise ConfigError(f"{only} is a model: name its environment with --env, or give a config and --model {only}")
    elif (only / MANIFEST).is_file():
        raise ConfigError(_with_its_run(only))
    elif only.is_dir():
        runs = sorted(path.parent.name for path in only.glob("*/config.toml"))[-SHOWN:]
        found = f"; it has the runs {', '.join(runs)}" if runs else ""
        raise ConfigError(
            f"{only} is no run directory and no model: expected config.toml or config.json in it, or a config's file"
            + found
        )
    elif not only.exists() and only.suffix != ".toml":
        raise ConfigError(
            f"there is no configuration, run directory or model {only}{folders_beside(only)}; a hub id needs --env"
        )
    return load(paths, [*overrides, *more], also=_without_environment), named


def _without_environment(config: Config) -> Iterator[ConfigProblem]:
    """Yield a problem if the configuration is one of `flash sft`, which has no environment to play."""
    if config.sft is not None:
        yield ConfigProblem("sft", "trains on rows and has no environment: name a model alone, with --env")


def _nothing_named(model: str | None) -> str:
    """Return the error message for a command line that names neither a configuration nor a run. `model`: value of
    `--model`; None if it was not given."""
    if model is None:
        return "expected a config, a run directory, or a model with --env, such as run.toml or outputs/my-run"
    if RunDirectory(Path(model)).config.is_file():
        return f"--model goes with a config; a run is named alone: {model}"
    if (Path(model) / MANIFEST).is_file():
        return _with_its_run(Path(model))
    return f"--model goes with a config: CONFIG --model {model}; without one, name the model alone, with --env"


def _with_its_run(checkpoint: Path) -> str:
    """Return the error message for a command line that names a checkpoint alone. It names the run of the checkpoint if
    that is two folders above."""
    run = Path(os.path.normpath(checkpoint / ".." / ".."))  # RUN_DIR/checkpoints/CHECKPOINT
    shown = run if RunDirectory(run).config.is_file() else "RUN_DIR"
    return f"{checkpoint} is a checkpoint: name its run as well: {shown} --model {checkpoint}"


def play_model(config: Config, named: str | None, play: Any) -> tuple[Sampled, list[Sample]]:
    """Start engines in this process, play episodes with a model, and return the result with readable samples.

    For `flash eval` and `flash rollout`. Prints the progress to standard error, since standard output has the result.

    Args:
        config: the configuration.
        named: the model, as the user has named it. None: that of `model.path`, which is made if it is missing.
        play: coroutine function that plays the episodes, such as `flash.run.sampling.evaluate`.

    Raises:
        ModuleNotFoundError: torch or vLLM is not installed.
        FlashError: the model cannot be made or loaded, the environment cannot be played, or the engines are gone.
    """
    from flash.environment.load import LoadedEnvironment
    from flash.observe.rundir.samples import readable
    from flash.rollout.vllm.engine import FixedEngine
    from flash.rollout.vllm.start import ready_tokenizer
    from flash.run.loop_watch import run_watched
    from flash.run.processes.launch_state import remember_shared_memory, scratch_folder

    require_engine()
    if named is None:
        make_missing_models(config)
        named = config.model.path
    advise_on_engines(config)
    sys.stderr.write(f"[reading {named}]\n")
    with scratch_folder(), model_folder(named, config) as path:
        model = msgspec.structs.replace(config.model, path=path)
        config = msgspec.structs.replace(config, model=model)
        tokenizer = ready_tokenizer(config)
        env = LoadedEnvironment(config.env.path, config.env.options)

        def engines(config: Config) -> list[Callable[[int], FixedEngine]]:
            """Return a constructor for each engine of this machine, for `flash.run.sampling`."""
            return [partial(make_engine, config)] * config.engines_on(0)

        def make_engine(config: Config, number: int) -> FixedEngine:
            """Return a new engine with this number. Its weights are those of the model folder."""
            return FixedEngine(config, number, config.engine_gpus(0, number), remember_shared_memory)

        def show(text: str) -> None:
            """Print a line about the progress."""
            sys.stderr.write(f"[{harmless(text)}]\n")

        async def play_episodes() -> Any:
            """Play the episodes, on the watched event loop."""
            return await play(config=config, env=env, tokenizer=tokenizer, engines=engines, show=show)

        sampled = run_watched(show, play_episodes)
    for note in sampled.notes:
        sys.stderr.write(f"{harmless(note)}\n")
    texts = tokenizer.token_texts
    # The samples are not trained, so there is no step from which their ages could count: 0.
    return sampled, [readable(played, 0, texts(played.tokens().tolist())) for played in sampled.trajectories]
