"""Commands that start and end processes of a run: `flash train`, `flash sft`, `flash join` and `flash drain`.

A machine that joins a run adds its engines to it, until the run is over or `flash drain` names its node.

`carry_out` is the common part of train and sft: it checks the configuration, then tries it (`--dry-run`) or starts the
run, and says at the end how to go on.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from flash.cli.arguments import CommandParsers, add_hub_option, hub_place, require_engine
from flash.config.check import advise
from flash.config.decode import ConfigProblem, refuse
from flash.config.load import dump, is_setting, load, split_arguments
from flash.config.tree import Config
from flash.errors import ConfigError
from flash.run.processes.launch_state import refuse_several
from flash.text import harmless

if TYPE_CHECKING:
    from flash.run.restart import RunMark
    from flash.run.sft_rows import CourseTokens


def add_train(commands: CommandParsers) -> argparse.ArgumentParser:
    """Add the parser of `flash train` to `commands`, and return it."""
    about = "Train a model with reinforcement learning: rollouts and training run at the same time."
    parser = add_run_parser(commands, "train", about, tried="Try everything except engines and training")
    parser.set_defaults(run=run_train)
    return parser


def add_run_parser(commands: CommandParsers, name: str, about: str, *, tried: str) -> argparse.ArgumentParser:
    """Add and return the parser of a command that runs a configuration: `flash train` or `flash sft`.

    Args:
        commands: the parsers of all commands.
        name: name of the command.
        about: help text of the command.
        tried: phrase for the help of `--dry-run`: what the dry run tries.
    """
    parser = commands.add_parser(name, help=about)
    parser.add_argument(
        "config",
        nargs="+",
        metavar="CONFIG|KEY=VALUE",
        help="Configuration files (TOML; later ones take precedence), and settings such as train.async_ratio=2.",
    )
    parser.add_argument("--dry-run", action="store_true", help=f"{tried}, and print the whole configuration.")
    parser.add_argument(
        "--resume", action="store_true", help="Continue the run in the folder that run.output_dir and run.name give."
    )
    return parser


def run_train(arguments: argparse.Namespace) -> int:
    """Check the configuration, make a model that is missing, and train, for `flash train`. Returns the exit code.

    Raises the errors of `carry_out`, and ModuleNotFoundError if torch or vLLM is not installed.
    """
    from flash.run.checks.preflight import start_problems

    def try_out(config: Config) -> Iterable[str]:
        """Carry out `--dry-run`: yield a line for each part that was tried."""
        from flash.run.checks.dry_run import dry_run

        return dry_run(config)

    def begin(config: Config) -> int:
        """Make the models that are missing, and run the launch. Returns its exit code."""
        from flash.run.models import make_missing_models
        from flash.run.processes.launcher import launch

        require_engine()
        interruptible()
        make_missing_models(config)
        return launch(config)

    return carry_out(arguments, start_problems, try_out, begin)


def carry_out(
    arguments: argparse.Namespace,
    problems: Callable[[Config], list[ConfigProblem]],
    try_out: Callable[[Config], Iterable[str]],
    begin: Callable[[Config], int],
    complete: Callable[[Config], Config] = lambda config: config,
) -> int:
    """Check a configuration, then try it (`--dry-run`) or start the run; return the exit code.

    `flash train` and `flash sft` call this with functions of their own. The exit code is that of `begin`, and 0 after a
    dry run or if a resumed run has nothing left to do. At the end of a run that has failed or was interrupted, a line
    says how to continue it.

    Args:
        arguments: the arguments of the command line.
        problems: finds what would stop the run on this machine, beyond the checks that every process makes.
        try_out: tries a checked configuration and yields a line for each part that was tried.
        begin: runs a checked configuration and returns its exit code.
        complete: called once with the checked configuration, before the dry run or the start. Returns it with the
            values that the command itself determines, such as the number of steps of `flash sft`.

    Raises:
        FlashError: the configuration is invalid, a part of it fails in the dry run or at the start, or a launcher such
            as srun has started the command several times.
    """
    from flash.run.checks.preflight import changes_without_effect

    if not arguments.dry_run:
        refuse_several(os.environ)
    paths, overrides = split_arguments(arguments.config)
    if arguments.resume:
        overrides.append("run.resume=true")
    config = complete(load(paths, overrides, also=problems))
    advise(config, changes_without_effect(config))
    if arguments.dry_run:
        # The configuration is long, so the results follow it: a reader looks at the end of the output.
        sys.stdout.write(dump(config))
        sys.stdout.flush()
        for line in try_out(config):
            sys.stderr.write(f"checked {harmless(line)}\n")
        return 0
    from flash.run.processes.launch import LOST
    from flash.run.processes.supervisor import End, say
    from flash.run.restart import is_done, run_mark

    if config.run.resume and is_done(config):
        left = how_to_continue(config, arguments.typed, None)
        say(f"{left}: it has made its {config.run.steps} steps; raise run.steps")
        return 0
    before = run_mark(config)
    code = begin(config)
    # After LOST the run goes on without this node. `typed` is empty if a Python program has started the command.
    if code not in (End.OVER, LOST) and arguments.typed:
        end = "interrupted" if code == End.INTERRUPTED else "it failed; the lines above say why"
        say(f"{end}; {how_to_continue(config, arguments.typed, before)}")
    return code


def how_to_continue(config: Config, typed: Sequence[str], before: RunMark) -> str:
    """Return a phrase that says how to continue a run that has ended early, or that nothing is left to do.

    `carry_out` prints it after the end of a run. A run that was interrupted before it had written its run directory
    cannot be continued. The directory is then missing, or it is that of an earlier run with the mark `before`.

    Args:
        config: configuration of the run.
        typed: the words of the command that the user has typed.
        before: result of `run_mark` before the run was started; None if the run directory held no run. It is not used
            if the run was resumed.
    """
    from flash.run.processes.launcher import resume_command
    from flash.run.restart import is_done, run_mark

    if not config.run.resume and run_mark(config) == before:
        return f"the run had not started yet, so nothing is kept; start it with: {shlex.join(typed)}"
    if is_done(config):
        return f"the run in {config.run_dir} has nothing left to do"
    return f"go on with: {resume_command(typed)}"


def interruptible() -> None:
    """Make SIGTERM and SIGHUP interrupt this process in the same way as Ctrl-C.

    `flash train` and `flash sft` call this before they make a model or read rows, so that unfinished files are cleaned
    up. The launch later handles signals itself.
    """
    # nohup ignores SIGHUP, which must stay ignored then.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt. A signal handler of `interruptible`, which Python calls in the main thread."""
    raise KeyboardInterrupt


def add_sft(commands: CommandParsers) -> argparse.ArgumentParser:
    """Add the parser of `flash sft` to `commands`, and return it."""
    about = "Fine-tune a model on a file of messages, of prompts with completions, or of texts."
    parser = add_run_parser(commands, "sft", about, tried="Tokenize all rows")
    parser.set_defaults(run=run_sft)
    return parser


def run_sft(arguments: argparse.Namespace) -> int:
    """Check the configuration, fetch its model if it is missing, tokenize all rows, and train, for `flash sft`.

    The rows are tokenized before the run starts, because their number gives the number of steps.
    """
    from flash.run.checks.preflight import sft_problems, too_many_steps

    tokens: list[CourseTokens] = []  # tokens of all rows; `complete` puts them here for `try_out` and `begin`

    def complete(config: Config) -> Config:
        """Tokenize the rows, and return the configuration with the number of steps that follows from them."""
        from flash.run.models import make_fetched
        from flash.run.sft_rows import CourseTokens

        interruptible()
        if not arguments.dry_run:
            make_fetched(config)
        tokens.append(CourseTokens.read(config, _print_line))
        config = tokens[0].with_steps(config)
        if problems := list(too_many_steps(config)):
            raise refuse(problems)
        return config

    def try_out(config: Config) -> Iterator[str]:
        """Carry out `--dry-run`: describe the rows, the steps and the model."""
        from flash.rollout.episode.tokenizer import HfTokenizer
        from flash.run.checks.dry_run import model_described

        yield from tokens[0].described(HfTokenizer(config.model))
        yield f"steps: {config.run.steps} of {config.train.batch_size} rows"
        yield f"model: {config.model.path}, {model_described(config)}"

    def begin(config: Config) -> int:
        """Print how the rows were taken, and run the launch. Returns its exit code."""
        from flash.run.processes.launcher import launch_sft

        for line in tokens[0].lines:
            _print_line(line)
        return launch_sft(config, tokens[0])

    return carry_out(arguments, sft_problems, try_out, begin, complete)


def _print_line(line: str) -> None:
    """Print a line for the user at once, in the format of a run."""
    sys.stdout.write(f"[{harmless(line)}]\n")
    sys.stdout.flush()


def add_join(commands: CommandParsers) -> argparse.ArgumentParser:
    """Add the parser of `flash join` to `commands`, and return it."""
    parser = commands.add_parser("join", help="Add the engines of this machine to a run that is under way.")
    parser.add_argument(
        "where",
        nargs="*",
        metavar="RUN_DIR|KEY=VALUE",
        help="Folder of the run, and settings of this machine alone, such as engine.count=2.",
    )
    add_hub_option(parser)
    parser.set_defaults(run=run_join)
    return parser


def run_join(arguments: argparse.Namespace) -> int:
    """Join a run and serve it until it is over or a signal arrives, for `flash join`. Returns the exit code.

    A setting must be one of OWN_KEYS, the keys that may differ between machines.
    """
    from flash.run.processes.launcher import OWN_KEYS, join

    overrides = [argument for argument in arguments.where if is_setting(argument)]
    foreign = [override for override in overrides if override.partition("=")[0].strip() not in OWN_KEYS]
    if foreign:
        known = ", ".join(f"`{key}`" for key in OWN_KEYS)
        raise ConfigError(f"`{foreign[0]}` is not a machine's own: the run has it; a node that joins may set {known}")
    place = hub_place(arguments.hub, [argument for argument in arguments.where if not is_setting(argument)])
    require_engine()
    return join(place, overrides)


def add_drain(commands: CommandParsers) -> argparse.ArgumentParser:
    """Add the parser of `flash drain` to `commands`, and return it."""
    parser = commands.add_parser("drain", help="Let a node that has joined a run finish its samples and leave.")
    parser.add_argument(
        "where",
        nargs="+",
        metavar="RUN_DIR|NODE",
        help="Folder of the run, and then the number of the node, which the run prints.",
    )
    add_hub_option(parser)
    parser.set_defaults(run=run_drain)
    return parser


def run_drain(arguments: argparse.Namespace) -> int:
    """Ask the hub of a run, the process that coordinates it, to make a node leave, for `flash drain`. Does not wait
    until the node has left."""
    import anyio

    from flash.hub import protocol as p
    from flash.run.processes.hub_place import TOKEN_VARIABLE
    from flash.run.processes.rendezvous import ask

    *folders, node = arguments.where
    if not node.isdecimal():
        raise ConfigError(f"expected the number of a node, as the run's output names it, got {node}")
    place = hub_place(arguments.hub, folders)
    anyio.run(ask, place.find(os.environ.get(TOKEN_VARIABLE)), p.DrainRequest(int(node)))
    sys.stdout.write(f"node {node} was asked to leave\n")
    return 0
