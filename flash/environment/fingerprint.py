"""The fingerprint of an environment: tells one set of problems from another, so that no group is of two."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from hashlib import file_digest, sha256
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from stat import S_ISREG
from typing import Any

from flash.config.tree import EnvConfig

READ = 1 << 26
"""Bytes that are read in all, a tenth of a second: of a file beyond them count size and time of change."""
MOST_FILES = 1000
"""Of a folder, the first ones in order."""


def fingerprint(env: EnvConfig) -> str:
    """Of its options, of the files and folders that they name, and of the modules of its classes. Reads the files."""
    told = sha256(json.dumps([env.path, env.options], sort_keys=True, default=str).encode())
    left = READ
    for text in sorted({env.path, *texts_in(env.options)}):
        for file in _files(text):
            with suppress(OSError):  # what cannot be read is told where it is needed
                size = file.stat().st_size
                told.update(_of_file(file, read=size <= left))
                left -= min(size, left)
    return told.hexdigest()


def texts_in(value: Any) -> Iterator[str]:
    """Yield all texts in options."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():  # pyright: ignore[reportUnknownVariableType]: anything may stand there
            yield from texts_in(each)
    elif isinstance(value, list | tuple):
        for each in value:  # pyright: ignore[reportUnknownVariableType]
            yield from texts_in(each)


def _files(text: str) -> list[Path]:
    """Those that a text names, as a path or as `module:Class`."""
    module, separator, name = text.partition(":")
    if separator and name.isidentifier() and all(map(str.isidentifier, module.split("."))):
        with suppress(ImportError, ValueError):
            spec = find_spec(module)
            return [] if spec is None or not spec.has_location or spec.origin is None else [Path(spec.origin)]
    with suppress(OSError, ValueError):
        path = Path(text)
        if path.is_file():
            return [path]
        if text and path.is_dir():
            return list(islice(_below(path), MOST_FILES))
    return []


def _below(folder: Path) -> Iterator[Path]:
    """The files of a folder, in an order that their names alone decide."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        yield from (Path(place, name) for name in sorted(names))


def _of_file(file: Path, *, read: bool) -> bytes:
    stat = file.stat()
    if not read or not S_ISREG(stat.st_mode):  # a pipe would be waited for
        return f"{file.name} {stat.st_size} {stat.st_mtime_ns}".encode()
    with file.open("rb") as stream:
        return file.name.encode() + file_digest(stream, "sha256").digest()
