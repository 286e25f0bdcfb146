"""What commands share: the files, folders and hubs that people name to them, and what was meant by mistakes."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from flash.config.check_models import beside
from flash.config.decode import nearest, suggest
from flash.config.load import as_setting
from flash.errors import ConfigError
from flash.observe.rundir.rundir import RunDirectory

if TYPE_CHECKING:
    from flash.run.processes.hub_place import HubPlace


class CommandParsers(Protocol):
    """Where a command adds its parser."""

    def add_parser(self, name: str, *, help: str) -> argparse.ArgumentParser:
        """The parser of a new command."""
        ...


OUTPUTS = Path("outputs")
"""Where runs are unless `run.output_dir` says otherwise."""


def run_directory(path: Path) -> RunDirectory:
    """What a run has left, or leaves, there. Raises ConfigError where there is no run."""
    directory = RunDirectory(path)
    if not path.exists():
        raise ConfigError(f"there is no run {path}{beside(path)}")
    if not directory.config.is_file():
        raise ConfigError(f"{path} is no run directory: it holds no {directory.config.name}")
    return directory


def runs_in(folder: Path, command: str) -> list[Path]:
    """The newest first. Raises ConfigError where there are none; `command` is what asks."""
    found = [path.parent for path in folder.glob(f"*/{RunDirectory(folder).config.name}")]
    if not found:
        raise ConfigError(f"there is no run in {folder}/ here: name a run directory: flash {command} RUN_DIR")
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def check_writable(*files: Path | None) -> None:
    """That files such as that of `--json FILE` can be written, before minutes of work. Raises ConfigError."""
    for file in files:
        if file is None:
            continue
        _check_folder(file)
        if file.is_dir():
            raise ConfigError(f"cannot write {file}: it is a folder; expected the name of a file")


def check_folder_writable(folder: Path | None) -> None:
    """The same of a folder that is to be made: what lay in one of its name would be gone. Raises ConfigError."""
    if folder is None:
        return
    _check_folder(folder)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"cannot write {folder}: it is a file; expected the name of a folder")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"cannot write {folder}: there are files in it, which would be lost; name a new folder")


def _check_folder(path: Path) -> None:
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"cannot write {path}: the folder {folder} does not exist")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write {path}: you may not write to the folder {folder}")


def add_hub_option(parser: argparse.ArgumentParser) -> None:
    """The other way beside the run directory."""
    parser.add_argument("--hub", metavar="HOST:PORT", help="the hub, instead of RUN_DIR; FLASH_TOKEN is its token")


def hub_place(hub: str | None, folders: list[str]) -> HubPlace:
    """Where the hub is. Raises ConfigError: not exactly one place is named."""
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


OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*")


def unknown_arguments(parser: argparse.ArgumentParser, unknown: Sequence[str], given: Sequence[str]) -> str:
    """The complaint about arguments that a command does not have, with what was meant by the first of them.

    Args:
        parser: of the command.
        unknown: at least one.
        given: all that stood on the command line.
    """
    word = unknown[0]
    after = given[list(given).index(word) + 1 :] if word in given else []
    said = f"unrecognized arguments: {' '.join(unknown)}"
    options = [option for option in OPTION.findall(parser.format_help()) if option not in ("-h", "--help")]
    if "KEY=VALUE" in parser.format_usage() and (setting := as_setting(word.lstrip("-"), after)):
        return f"{said}; a setting is given as {setting}"
    return said + suggest(word.partition("=")[0], options)


def unknown_command(name: str, commands: Sequence[str]) -> str:
    """The complaint about a command that there is not."""
    near = nearest(name, commands)
    return f"there is no command {name}; " + (f"did you mean `flash {near}`?" if near else "`flash --help` lists them")


VARIABLE = "FLASH_TYPED"
"""In which `launch.sh` hands over what it was called as, quoted for a shell."""


def typed(argv: Sequence[str], environment: MutableMapping[str, str]) -> list[str]:
    """The words, of a process with these arguments. What it starts does not inherit the variable."""
    if script := environment.pop(VARIABLE, ""):
        return shlex.split(script)
    program, *rest = argv
    # Found through PATH it was called by its name; so is `python -m flash`, for short.
    by_path = Path(program).name == "flash" and program != shutil.which("flash", path=environment.get("PATH"))
    return [program if by_path else "flash", *rest]
