"""The rows of a file that another process appends to, read as they come."""

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
"""What decoding a line raises that is no row: torn by a crash and gone on behind, or made by a broken disk."""


def opened(path: Path) -> BufferedReader:
    """A file to read. Nobody is waited for, as a pipe would let its reader.

    Raises:
        FileNotFoundError: there is none.
        RunDirectoryError: it is no regular file, or cannot be opened.
    """
    try:
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115 - returned
    except FileNotFoundError:
        raise
    except OSError as error:
        # A socket cannot even be opened.
        raise RunDirectoryError(f"cannot read {path}: {error.strerror or error}") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise RunDirectoryError(f"cannot read {path}: it is a pipe or a device, expected a regular file; take it away")
    return file


class Followed(Generic[T]):
    """Call `read` now and then; `rows` are those that the file had then.

    A line counts once it is whole. Where the file was replaced or cut, as by a run that goes on from a checkpoint, it
    is read anew, and `life` is another number.
    """

    def __init__(self, path: Path, kind: type[T]) -> None:
        self._path = path
        self._decoder = msgspec.json.Decoder(kind)
        self._file: tuple[int, int] | None = None
        self._offset = 0
        self.rows: list[T] = []
        self.life = 0

    def read(self) -> None:
        """Take in what was appended. Raises RunDirectoryError when the file cannot be read."""
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
        """Forget what was read, if it was another file or more than there is."""
        if file != self._file or size < self._offset:
            if self._file is not None:
                self.life += 1
            self._file, self._offset, self.rows = file, 0, []
