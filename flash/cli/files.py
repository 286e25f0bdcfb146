"""The files and folders that people name to commands."""

from __future__ import annotations

import os
from pathlib import Path

from flash.config.check import beside
from flash.errors import ConfigError
from flash.observe.rundir.rundir import RunDirectory

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
