"""Command line of Flash. Each command is a function that adds its parser, which names the function that runs it.

`main` parses and validates the arguments first. torch and vllm are imported only when something starts.
"""

from __future__ import annotations

import argparse
import errno
import importlib.metadata
import io
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path

from flash.cli.arguments import typed, unknown_arguments, unknown_command
from flash.config.decode import show
from flash.errors import ConfigError, FlashError, advice_for_extra
from flash.run.processes.launch_state import caller_file, end_with_parent, use_torchrun_variables
from flash.text import OneLine, harmless

DESCRIPTION = "Asynchronous reinforcement-learning post-training for language models."
COMMANDS = {
    "install": "flash.cli.prepare:add_install",
    "init": "flash.cli.prepare:add_init",
    "doctor": "flash.cli.prepare:add_doctor",
    "check-env": "flash.cli.check_env:add_check_env",
    "plan": "flash.cli.prepare:add_plan",
    "train": "flash.cli.train:add_train",
    "sft": "flash.cli.train:add_sft",
    "join": "flash.cli.train:add_join",
    "drain": "flash.cli.train:add_drain",
    "eval": "flash.cli.sampling:add_eval",
    "rollout": "flash.cli.sampling:add_rollout",
    "view": "flash.cli.runs:add_view",
    "watch": "flash.cli.runs:add_watch",
    "plot": "flash.cli.runs:add_plot",
    "compare": "flash.cli.runs:add_compare",
    "trace": "flash.cli.runs:add_trace",
    "track": "flash.cli.runs:add_track",
    "export": "flash.cli.runs:add_export",
    "bundle": "flash.cli.replay:add_bundle",
    "replay": "flash.cli.replay:add_replay",
    "rhythm": "flash.cli.runs:add_rhythm",
    "simulate": "flash.cli.simulate:add_simulate",
    "calibrate": "flash.cli.simulate:add_calibrate",
    "fetch": "flash.cli.prepare:add_fetch",
    "schema": "flash.cli.prepare:add_schema",
    "sandbox": "envs.sandbox.cli:add_sandbox",
}
"""Function that adds the parser of each command, as `module:function`, in the order of the help.

Only the module of the given command is imported. The function sets `run`, which carries out the parsed arguments and
returns the exit code.
"""
REMOVED: dict[tuple[str, ...], str] = {
    ("profile",): '`flash profile` was removed. Set `train.profile = "3:5"` in the configuration, and `flash train` '
    "records steps 3 to 5 with torch's profiler",
    ("sandbox", "shell"): "`flash sandbox shell` was removed. Run single commands with `flash sandbox run --in ID "
    "COMMAND`; for a terminal use `podman exec -it` or `docker exec -it` on the sandbox's machine",
}
"""Commands that no longer exist, with the error message that names their replacement."""
BROKEN_PIPE = 128 + signal.SIGPIPE
"""Exit code of a process that writes to a pipe without a reader, as in shells."""


def parsers(names: Iterable[str] = COMMANDS) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser of the command line with the given commands, and the parser of each command by name.

    `parse` calls this, and scripts/reference_docs.py, which writes the page of the commands.
    """
    parser = argparse.ArgumentParser(prog="flash", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"flash-rl {importlib.metadata.version('flash-rl')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers: dict[str, argparse.ArgumentParser] = {}
    for name in names:
        module, _, add = COMMANDS[name].partition(":")
        parsers[name] = getattr(import_module(module), add)(commands)
    return parser, parsers


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed arguments of the command line `argv`; None: those of this process.

    `arguments.run` is the function that carries the command out. Files and overrides may also follow options, where
    argparse alone does not accept them. Exits with code 2 and an error message if an argument or a command is unknown,
    and with 0 after `--help` or `--version`.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    named = bool(given) and given[0] in COMMANDS
    # With the name of a command, only its module is imported, which makes the start faster.
    parser, commands = parsers(given[:1] if named else COMMANDS)
    for words in (tuple(given[:1]), tuple(given[:2])):
        if words in REMOVED:
            parser.error(REMOVED[words])
    if given and not given[0].startswith("-") and not named:
        parser.error(unknown_command(given[0], [*COMMANDS]))
    arguments, rest = parser.parse_known_args(given)
    unknown = [argument for argument in rest if argument.startswith("-") or "config" not in arguments]
    if unknown:
        of_command = commands[arguments.command]
        of_command.error(unknown_arguments(of_command, unknown, given))
    if rest:  # files and overrides that follow an option
        arguments.config += rest
    return arguments


def _prepare_output() -> None:
    """Let standard output and standard error accept any text, and escape log records.

    If the process was started without an output (`>&-`, as some supervisors do), the output is discarded.
    """
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open until the process ends
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - open until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if logging.lastResort is not None:  # used by commands that set up no logging of their own
        logging.lastResort.setFormatter(OneLine())


def extra_of(module: str) -> str | None:
    """Return the first extra of this distribution that installs a module; None if no extra does.

    `main` names it in the error message about a missing package. An extra is an optional group of dependencies, such as
    `view`.
    """
    wanted = module.partition(".")[0].lower()
    for line in importlib.metadata.requires("flash-rl") or []:
        name, extra = re.match(r"[\w.-]+", line), re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        if name and extra and name[0].lower().replace("-", "_") == wanted:
            return extra[1]
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. It is the entry point of `flash`.

    Exit codes: 0 success, 1 a finding that the command reports, 2 wrong input, 130 an interrupt, 141 an output without
    a reader.
    """
    _prepare_output()
    arguments = parse(argv)
    arguments.typed = typed(sys.argv, os.environ) if argv is None else ["flash", *argv]  # to say how to repeat it
    if (caller := caller_file(os.environ)) is not None:  # a Python program has started this process
        arguments.typed = []  # nobody can repeat this command by typing it
        end_with_parent()
    try:
        use_torchrun_variables(os.environ)  # torchrun may have started one process on each node
        code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except FlashError as error:
        return _refuse(error, caller)
    except ModuleNotFoundError as error:
        extra = extra_of(error.name or "")
        if extra is None:
            raise
        message = f"`flash {arguments.command}` needs the package {error.name}, which is not installed"
        return _refuse(ConfigError(f"{message}: {advice_for_extra(extra)}"), caller)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # For example `flash … | head`. Without this, the interpreter would fail again when it flushes the output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        # A path that the user has given is too long for the system. Any other error is a fault in Flash.
        if error.errno != errno.ENAMETOOLONG:
            raise
        return _refuse(ConfigError(f"{show(str(error.filename))} cannot be used: {error.strerror}"), caller)


def _refuse(error: FlashError, caller: Path | None) -> int:
    """Report an error of the command, and return the exit code.

    A user reads it on standard error. A Python program that has started the command finds it in the file `caller`, as
    JSON with the name of the class (`error`) and the message, and raises it. None: a user has started the command.
    """
    if caller is None:
        sys.stderr.write(f"flash: error: {harmless(str(error))}\n")
    else:
        caller.write_text(json.dumps({"error": type(error).__name__, "message": str(error)}), encoding="utf-8")
    return 2
