"""Command `flash check-env`: it plays an environment without a model, and reports faults in one line each.

The checks are in `flash.run.checks.env`. They run in the process of the command, on an event loop like that of a run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Generator
from pathlib import Path
from typing import NoReturn

import msgspec

from flash.cli.arguments import CommandParsers
from flash.cli.prepare import finding_lines
from flash.config.check import check_env
from flash.config.decode import refuse
from flash.config.load import merge_tables
from flash.config.objects import import_from
from flash.config.tree import Config
from flash.errors import ConfigError
from flash.run.checks.doctor import Finding
from flash.text import harmless

MINUTES = 10.0
"""Default time of all checks, in minutes."""
GRACE_S = 10.0
"""Seconds after the end of the time in which the command must end. Later, code that never ends keeps it alive."""
WITHOUT_MODEL = {"run": {"name": "check-env"}, "model": {"path": "none"}}
"""Tables that a configuration needs, if the user gives none. No model is loaded."""
WITHOUT_GPUS = {"cluster": {"gpus_per_node": 0}}
"""Table that takes precedence over those of the user: the checks need no GPU."""


def add_check_env(commands: CommandParsers) -> argparse.ArgumentParser:
    """Add the parser of `flash check-env` to `commands`, and return it."""
    parser = commands.add_parser(
        "check-env", help="Check an environment, a data set with its reward, or an agent, without a model."
    )
    parser.add_argument(
        "config",
        nargs="+",
        metavar="MODULE:CLASS|CONFIG|KEY=VALUE",
        help="Import path of the environment, configuration files, and settings such as rollout.max_turns=8. "
        "Without an import path it is the environment of the configuration.",
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="Option of the environment, as in [env.options]. May be repeated.",
    )
    parser.add_argument("--json", action="store_true", help="Print the findings as JSON.")
    parser.add_argument(
        "--minutes",
        type=float,
        default=MINUTES,
        metavar="N",
        help=f"Longest time of all checks. Default: {MINUTES:g}.",
    )
    parser.add_argument("--no-training", action="store_true", help="Leave out the training of a tiny model.")
    parser.set_defaults(run=run_check_env)
    return parser


def run_check_env(arguments: argparse.Namespace) -> int:
    """Check an environment and print a line for each check, for `flash check-env`. Returns 1 if there is a failure.

    If code of the environment blocks the event loop for longer than the time of all checks and GRACE_S, the process
    exits from another thread, with 1.
    """
    from flash.run.checks.env.checks import CHECKS, counted, examine_environment
    from flash.run.loop_watch import run_watched

    if not 0 < arguments.minutes <= 24 * 60:
        raise ConfigError(f"--minutes: expected a positive number of at most {24 * 60}, got {arguments.minutes:g}")
    config = named_environment(arguments.config, arguments.option)
    checks = {name: check for name, check in CHECKS.items() if name != "training" or not arguments.no_training}
    findings: list[Finding] = []
    width = max(map(len, checks))

    def report(finding: Finding) -> None:
        """Keep a finding, and print it at once unless all are printed as JSON."""
        findings.append(finding)
        if not arguments.json:
            write("".join(f"{harmless(line)}\n" for line in finding_lines([finding], width)))

    def finish() -> int:
        """Print the findings as JSON, or the number of failures. Returns the exit code."""
        states = [finding.state for finding in findings]
        if arguments.json:
            write(msgspec.json.format(msgspec.json.encode(findings), indent=2).decode() + "\n")
        else:
            failures, warnings = (counted(states.count(state), state) for state in ("failure", "warning"))
            write(f"{failures}, {warnings}\n")
        return int("failure" in states)

    end_process = os._exit

    def fail(message: str) -> NoReturn:
        """Report that the running check has failed, and end the process with exit code 1."""
        name = [*checks][min(len(findings), len(checks) - 1)]  # each check so far has a finding: this is the next one
        report(Finding("failure", message, check=name))
        finish()
        end_process(1)  # an ordinary end would wait for threads in which the environment's code may run for ever

    def give_up() -> None:
        """End the process, because code of the environment blocks the event loop and never ends. Runs in the thread of
        `timer`."""
        fail(f"did not end; {blocked[-1] if blocked else 'no line is known'}")

    def exit_of_environment(code: int) -> NoReturn:
        """Stand in for `os._exit`, with which an environment would end the command with its own exit code."""
        if os.getpid() != checking:
            end_process(code)  # a process that was forked ends in this way
        *_, caller, _ = traceback.extract_stack()
        fail(f"the process was ended by os._exit({code}) in {caller.filename}:{caller.lineno}")

    blocked: list[str] = []  # messages of the watched loop, each with the line that blocks it
    checking = os.getpid()
    seconds = 60 * arguments.minutes
    timer = threading.Timer(seconds + GRACE_S, give_up)
    timer.name, timer.daemon = "flash check-env", True
    with _output_apart() as write:
        timer.start()
        os._exit = exit_of_environment
        try:
            run_watched(blocked.append, examine_environment, config, seconds, report, checks)
        finally:
            os._exit = end_process
            timer.cancel()
        return finish()


@contextlib.contextmanager
def _output_apart() -> Generator[Callable[[str], None]]:
    """Yield a function that writes a text to standard output, where nothing else is written while the block runs.

    The environment, its libraries in C and its processes may print, which would damage the JSON. That goes to standard
    error.
    """
    output = sys.stdout
    output.flush()
    try:
        # A copy of the descriptor of the output. The descriptor 1 itself, to which libraries write, becomes stderr.
        apart = os.dup(1) if output.fileno() == 1 else None
    except OSError:  # the output is kept in memory
        apart = None

    def write(text: str) -> None:
        """Write a text to the standard output of the command."""
        if apart is None:
            output.write(text)
            output.flush()
            return
        left = text.encode(errors="backslashreplace")
        while left:
            left = left[os.write(apart, left) :]

    with contextlib.redirect_stdout(sys.stderr):
        if apart is None:
            yield write
            return
        os.dup2(2, 1)
        try:
            yield write
        finally:
            # Code may have kept `sys.stdout` from before and written to it: that text goes to stderr, too.
            output.flush()
            os.dup2(apart, 1)
            os.close(apart)


def named_environment(words: list[str], options: list[str]) -> Config:
    """Return the configuration with the environment that the user has named, and add the folders of its modules to
    Python's import path.

    The configuration is not resolved, and only the table `[env]` is checked: no model or GPU is needed.

    Args:
        words: the import path of the environment, configuration files and settings.
        options: options of the environment, `KEY=VALUE` each.

    Raises:
        ConfigError: not exactly one environment is named, it cannot be imported, or it refuses its options.
    """
    # A word with a colon is an import path, unless it is a file with a colon in its name.
    paths = [word for word in words if "=" not in word and (":" not in word or word.endswith(".toml"))]
    classes = [word for word in words if "=" not in word and word not in paths]
    if len(classes) > 1 or not (classes or paths):
        named = f", got {' and '.join(classes)}" if classes else ""
        raise ConfigError(f"expected one environment, as module:Class or as env.path in a configuration{named}")
    if wrong := [option for option in options if "=" not in option]:
        raise ConfigError(f"--option: expected KEY=VALUE, got {wrong[0]}")
    overrides = [f"env.path={json.dumps(one)}" for one in classes]
    overrides += [f"env.options.{option}" for option in options]
    overrides += [word for word in words if "=" in word]
    files = [Path(path) for path in paths]
    _, config = merge_tables(files, overrides, [("`flash check-env`", WITHOUT_GPUS)], WITHOUT_MODEL)
    import_from([*(str(file.resolve().parent) for file in files), *map(os.path.abspath, config.env.folders)])
    if problems := [*check_env(config)]:
        raise refuse(problems)
    return config
