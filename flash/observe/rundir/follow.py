"""Reading the rows of a file while another process appends to it."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from flash.errors import RunDirectoryError

T = TypeVar("T")

NO_ROW = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors from decoding a line that is no row. A crash cut the line off and later lines follow, or the disk is
broken."""


def opened(path: Path) -> BufferedReader:
    """Open a regular file for reading. Never blocks, as opening a pipe would.

    Raises:
        FileNotFoundError: there is no such file.
        RunDirectoryError: it is no regular file, or it cannot be opened.
    """
    try:
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115 - returned
    except FileNotFoundError:
        raise
    except OSError as error:
        # Opening a socket raises.
        raise RunDirectoryError(f"cannot read {path}: {error.strerror or error}") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise RunDirectoryError(f"cannot read {path}: it is a pipe or a device, expected a regular file; remove it")
    return file


class Followed(Generic[T]):
    """Rows of a growing file. `read` takes in the lines that were appended since the last call.

    A line is taken once it is complete. If the file was replaced or cut, as a resumed run does, `rows` starts again
    from the beginning of the file, and `life` increases.
    """

    def __init__(self, path: Path, kind: type[T]) -> None:
        self._path = path
        self._decoder = msgspec.json.Decoder(kind)
        self._file: tuple[int, int] | None = None
        self._offset = 0
        self.rows: list[T] = []
        self.life = 0

    def read(self) -> None:
        """Add the appended rows to `rows`. Raises RunDirectoryError if the file cannot be read."""
        try:
            with opened(self._path) as file:
                status = os.fstat(file.fileno())
                self._begin((status.st_dev, status.st_ino), status.st_size)
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            self._begin(None, 0)
            return
        except OSError as error:
            raise RunDirectoryError(f"cannot read {self._path}: {error.strerror or error}") from error
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            with suppress(*NO_ROW):
                self.rows.append(self._decoder.decode(line))

    def _begin(self, file: tuple[int, int] | None, size: int) -> None:
        """Forget all rows if this is another file than before, or if it is shorter than the part that was read."""
        if file != self._file or size < self._offset:
            if self._file is not None:
                self.life += 1
            self._file, self._offset, self.rows = file, 0, []
