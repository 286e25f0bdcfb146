"""Arguments that several commands share: run directories, output files and hubs, with the errors for mistyped ones."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
from collections.abc import MutableMapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from flash.config.decode import nearest, suggest
from flash.config.load import as_setting
from flash.config.models import folders_beside, unreachable
from flash.errors import ConfigError
from flash.observe.rundir.rundir import RunDirectory

if TYPE_CHECKING:
    from flash.run.processes.hub_place import HubPlace


OUTPUTS = Path("outputs")
"""Default folder of runs, which `run.output_dir` can change."""
OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
"""Pattern of an option in the help of a command."""
TYPED_VARIABLE = "FLASH_TYPED"
"""Environment variable in which `launch.sh` passes the command that the user has typed, quoted for a shell."""


class CommandParsers(Protocol):
    """Collection to which a command adds its parser: argparse's subparsers, whose own class is private.

    If a command's positional argument is named `config`, files and settings may also follow options
    (`flash.cli.main.parse`). If `KEY=VALUE` is in its `metavar`, `unknown_arguments` suggests settings.
    """

    def add_parser(self, name: str, *, help: str) -> argparse.ArgumentParser:
        """Add a command and return its parser. `help` is the text of the command in `flash --help`."""
        ...


def require_engine() -> None:
    """Raise ModuleNotFoundError if torch or vLLM is not installed, before an engine starts.

    `flash.cli.main` turns the error into a sentence. Without this, only the process of the engine would report it.
    """
    for name in ("torch", "vllm"):
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def run_directory(path: Path) -> RunDirectory:
    """Return the run directory at a path that the user has named. Raises ConfigError if there is no run."""
    directory = RunDirectory(path)
    # `Path.exists` and `Path.is_file` would raise such an error, for example without the permission to enter a folder.
    if (why := unreachable(str(directory.config))) is not None:
        raise ConfigError(f"{path} cannot be read: {why}")
    if not path.exists():
        raise ConfigError(f"there is no run {path}{folders_beside(path, directory.config.name)}")
    if not directory.config.is_file():
        raise ConfigError(f"{path} is no run directory: it holds no {directory.config.name}")
    return directory


def runs_in(folder: Path, command: str) -> list[Path]:
    """Return the run directories in a folder, the newest first.

    Commands call this if the user has named no run. `command` is the name of the command, for the error message.

    Raises:
        ConfigError: the folder contains no run.
    """
    found = [path.parent for path in folder.glob(f"*/{RunDirectory(folder).config.name}")]
    if not found:
        raise ConfigError(f"there is no run in {folder}/ here: name a run directory: flash {command} RUN_DIR")
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def check_writable(*files: Path | None) -> None:
    """Check that files, such as the one of `--json FILE`, can be written, before a command works for minutes. None, for
    an option that was not given, is skipped. An existing file may be replaced.

    Raises:
        ConfigError: a file cannot be written.
    """
    for file in files:
        if file is None:
            continue
        _check_folder(file)
        if file.is_dir():
            raise ConfigError(f"cannot write {file}: it is a folder; expected the name of a file")
        # The new file is renamed over its target: as root, `--json /dev/null` would remove the device.
        if file.is_symlink() or (file.exists() and not file.is_file()):
            raise ConfigError(
                f"cannot write {file}: it is a link, a device, a pipe or a socket; expected the name of a regular or a "
                "new file"
            )


def check_plot(file: Path | None) -> None:
    """Check the name in `--plot FILE.png`, since the plots of commands are PNG images.

    Raises:
        ConfigError: the name does not end in `.png`.
    """
    if file is not None and file.suffix.lower() != ".png":
        raise ConfigError(f"--plot: expected a file that ends in .png, since a PNG image is written, got {file}")


def check_folder_writable(folder: Path | None) -> None:
    """Check that a folder can be made, and that it has no content that would be lost. Commands call this with the
    folder that they will write, before any work; None: nothing will be written.

    Raises:
        ConfigError: the folder cannot be made, or it exists and is not empty.
    """
    if folder is None:
        return
    _check_folder(folder)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"cannot write {folder}: it is a file; expected the name of a folder")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"cannot write {folder}: there are files in it, which would be lost; name a new folder")


def _check_folder(path: Path) -> None:
    """Raise ConfigError if the folder in which `path` lies does not exist or cannot be written to."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"cannot write {path}: the folder {folder} does not exist")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write {path}: you may not write to the folder {folder}")


def add_hub_option(parser: argparse.ArgumentParser) -> None:
    """Add `--hub`, with which the user names the hub instead of the run directory."""
    parser.add_argument(
        "--hub",
        metavar="HOST:PORT",
        help="Address of the run's hub, in place of RUN_DIR. The environment variable FLASH_TOKEN holds its token.",
    )


def hub_place(hub: str | None, folders: list[str]) -> HubPlace:
    """Return the place at which the hub of a run, the process that coordinates it, can be found. For `flash join` and
    `flash drain`.

    Args:
        hub: value of `--hub`, HOST:PORT; None if it was not given.
        folders: run directories that the user has named.

    Raises:
        ConfigError: not exactly one place is named, or `hub` is not HOST:PORT.
    """
    from flash.run.processes.hub_place import HubPlace

    if len(folders) + (hub is not None) != 1:
        named = f", got {' and '.join(folders)}" if folders else ""
        raise ConfigError(f"expected one run directory, such as outputs/quickstart, or --hub HOST:PORT{named}")
    if hub is None:
        return HubPlace(run_dir=str(Path(folders[0]).absolute()))
    host, _, port = hub.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"--hub: expected HOST:PORT, got {hub}")
    return HubPlace(host=host.strip("[]"), port=int(port))


def unknown_arguments(parser: argparse.ArgumentParser, unknown: Sequence[str], given: Sequence[str]) -> str:
    """Return the error message for unknown arguments of a command, with a suggestion for the first of them.

    `flash.cli.main.parse` exits with it.

    Args:
        parser: the parser of the command.
        unknown: the unknown arguments, at least one.
        given: all arguments of the command line.
    """
    word = unknown[0]
    message = f"unrecognized arguments: {' '.join(unknown)}"
    # The command takes settings, so a user may have written one as an option: `--train.async-ratio 2`. The words after
    # it may be the value.
    if "KEY=VALUE" in parser.format_usage():
        after = given[given.index(word) + 1 :]
        if setting := as_setting(word.lstrip("-"), after):
            return f"{message}; a setting is given as {setting}"
    return message + suggest(word.partition("=")[0], OPTION.findall(parser.format_help()))


def unknown_command(name: str, commands: Sequence[str]) -> str:
    """Return the error message for an unknown command, with a suggestion. `commands`: all names."""
    near = nearest(name, commands)
    return f"there is no command {name}; " + (f"did you mean `flash {near}`?" if near else "`flash --help` lists them")


def typed(argv: Sequence[str], environment: MutableMapping[str, str]) -> list[str]:
    """Return the words that the user has typed to start this process, for messages that say how to repeat the command.

    `flash.cli.main.main` calls this once, at the start.

    Args:
        argv: the arguments of the process, program included.
        environment: the environment variables. `FLASH_TYPED` is removed from them, so that child processes do not
            inherit it.
    """
    if command_line := environment.pop(TYPED_VARIABLE, ""):  # launch.sh has started this process
        return shlex.split(command_line)
    program, *rest = argv
    # A program that PATH finds, and `python -m flash`, whose program is `__main__.py`, are shown as `flash`. Another
    # `flash` can only be repeated by its path.
    by_path = Path(program).name == "flash" and program != shutil.which("flash", path=environment.get("PATH"))
    return [program if by_path else "flash", *rest]
