"""The rows of a file that another process appends to, read as they come."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from flash.errors import RunDirectoryError

T = TypeVar("T")

NO_ROW = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding a line raises that is no row: torn by a crash and gone on behind, or made by a broken disk."""


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
            with self._path.open("rb") as file:
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
