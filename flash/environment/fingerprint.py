"""Fingerprint of an environment: a hash of its import path, its options, and the files that they name.

The hub computes it at its start (`flash.samples.rules`) and stores it with its state. After a resume, a different
fingerprint means that a seed may now give another problem. Unfinished groups then start no more members
(`flash.samples.store`), because the samples of one group must be about the same problem.
"""

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

MAX_BYTES = 1 << 26
"""Number of bytes that are read of all files together, which takes a tenth of a second. For a file that does not fit
into the rest of this number, only the size and the time of change count."""
MAX_FILES = 1000
"""Largest number of files of one folder that count, so that a huge folder does not delay the start. The first files
count, sorted by name within each folder."""


def fingerprint(env: EnvConfig) -> str:
    """Return a hash of an environment's path and options, and of the files that they name. The hub calls this at its
    start.

    A text names a file by its path, by the path of a folder that has it, or as the module of `module:Class`. Reads
    these files, up to MAX_BYTES bytes. Files that cannot be read do not count.
    """
    digest = sha256(json.dumps([env.path, env.options], sort_keys=True, default=str).encode())
    unread = MAX_BYTES
    for text in sorted({env.path, *texts_in(env.options)}):
        for file in _files(text):
            with suppress(OSError):  # the code that needs an unreadable file reports it
                fits = (size := file.stat().st_size) <= unread
                digest.update(_file_digest(file, read=fits))
                if fits:  # a file that is too large uses nothing of the number, so smaller ones after it still fit
                    unread -= size
    return digest.hexdigest()


def texts_in(value: Any) -> Iterator[str]:
    """Yield every text in the options of an environment, also in nested dicts and lists.

    `flash.run.checks.preflight` also uses it, to find import paths in options.
    """
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():  # pyright: ignore[reportUnknownVariableType]: anything may stand there
            yield from texts_in(each)
    elif isinstance(value, list | tuple):
        for each in value:  # pyright: ignore[reportUnknownVariableType]
            yield from texts_in(each)


def _files(text: str) -> list[Path]:
    """Return the files that a text names, as a path or as `module:Class`; empty if it names none.

    A text that names a built-in module, or a package without a file, names no file.
    """
    module, separator, name = text.partition(":")
    if separator and name.isidentifier() and all(map(str.isidentifier, module.split("."))):
        with suppress(Exception):  # this imports the parent package, which is a user's and may raise anything
            spec = find_spec(module)
            return [] if spec is None or not spec.has_location or spec.origin is None else [Path(spec.origin)]
    with suppress(OSError, ValueError):
        path = Path(text)
        if path.is_file():
            return [path]
        if text and path.is_dir():
            return list(islice(_files_of_folder(path), MAX_FILES))
    return []


def _files_of_folder(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and its subfolders, in an order that their names alone decide.

    The order of a file system may differ between machines, and the hash must not.
    """
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        yield from (Path(place, name) for name in sorted(names))


def _file_digest(file: Path, *, read: bool) -> bytes:
    """Return bytes that change when a file changes: its name and a hash of its content, or its size and time.

    `read`: True if the content may be read.
    """
    stat = file.stat()
    if not read or not S_ISREG(stat.st_mode):  # reading a pipe would wait for its writer
        return f"{file.name} {stat.st_size} {stat.st_mtime_ns}".encode()
    with file.open("rb") as stream:
        return file.name.encode() + file_digest(stream, "sha256").digest()
