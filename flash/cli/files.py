"""The files that people have commands write, such as `--json FILE`."""

from __future__ import annotations

import os
from pathlib import Path

from flash.errors import ConfigError


def check_writable(*files: Path | None) -> None:
    """Before minutes of work. Raises ConfigError."""
    for file in files:
        if file is None:
            continue
        _check_folder(file)
        if file.is_dir():
            raise ConfigError(f"cannot write {file}: it is a folder; expected the name of a file")


def check_folder_writable(folder: Path | None) -> None:
    """The same of a folder that is to be made. Raises ConfigError."""
    if folder is None:
        return
    _check_folder(folder)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"cannot write {folder}: it is a file; expected the name of a folder")


def _check_folder(path: Path) -> None:
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"cannot write {path}: the folder {folder} does not exist")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write {path}: you may not write to the folder {folder}")
