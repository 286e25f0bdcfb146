"""Columns of a table on disk: JSONL, Parquet, and folders written by the Hugging Face `datasets` library.

Everything is read with the standard library or pyarrow; `datasets` itself is not needed.
"""

from __future__ import annotations

import contextlib
import difflib
import glob
import importlib
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from flash.errors import ConfigError

SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
"""How the files of a data set's splits usually begin. A folder that mixes several is not read as one table."""

Row = dict[str, Any]


def column_names(path: str, needed: Sequence[str] = ()) -> list[str]:
    """The columns of the table's first file; reads its head only.

    Raises:
        ConfigError: the table does not exist, cannot be read, or lacks a needed column.
    """
    first = _files(path)[0]
    names = list(next(_json_rows(first), {})) if _is_json(first) else _arrow_names(first)
    for name in needed:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{first} has no column {name!r}, only {', '.join(map(repr, names)) or 'none'}{hint}")
    return names


def read_rows(path: str) -> Iterator[Row]:
    """Every row with all that it has, over all files of the table. Rows of JSONL may have different columns.

    Raises:
        ConfigError: the table does not exist or cannot be read.
    """
    for file in _files(path):
        yield from _json_rows(file) if _is_json(file) else _arrow_rows(file)


def read_columns(path: str, columns: Sequence[str]) -> list[list[Any]]:
    """The values of each column, over all files of the table.

    Raises:
        ConfigError: as `column_names`, or a row lacks a column.
    """
    column_names(path, columns)
    values: list[list[Any]] = [[] for _ in columns]
    for file in _files(path):
        if _is_json(file):
            _read_json(file, columns, values)
        else:
            _read_arrow(file, columns, values)
    return values


def _files(path: str) -> list[Path]:
    place = Path(path)
    if place.is_file():
        files = [place]
    elif place.is_dir():
        files = _files_of_folder(place)
    else:
        files = sorted(Path(name) for name in glob.glob(path, recursive=True))
        if not files:
            raise ConfigError(f"there is no data set at {path}{_nearest(place)}")
    for file in files:
        if file.suffix not in (".jsonl", ".json", ".parquet", ".arrow"):
            raise ConfigError(f"{file} is not a data file that can be read; expected .jsonl, .parquet or .arrow")
    return files


def _files_of_folder(folder: Path) -> list[Path]:
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        raise ConfigError(f"{folder} holds several splits ({', '.join(splits)}); give one, as {folder / splits[0]}")
    files = sorted(folder.glob("*.arrow")) or sorted(folder.rglob("*.parquet")) or sorted(folder.glob("*.jsonl"))
    if not files:
        raise ConfigError(f"the folder {folder} holds no .arrow, .parquet or .jsonl file")
    splits = sorted({split for file in files for split in SPLITS if file.name.split("-")[0].split(".")[0] == split})
    if len(splits) > 1:
        pattern = files[0].parent / f"{splits[0]}-*{files[0].suffix}"
        raise ConfigError(f"{folder} holds several splits ({', '.join(splits)}); give one by a pattern, as {pattern}")
    return files


def _nearest(place: Path) -> str:
    """`; did you mean …?` when a neighbour has nearly that name."""
    if not place.parent.is_dir():
        return f": there is no folder {place.parent}"
    near = difflib.get_close_matches(place.name, [entry.name for entry in place.parent.iterdir()], n=1)
    return f"; did you mean {place.parent / near[0]}?" if near else ""


def _is_json(file: Path) -> bool:
    return file.suffix in (".jsonl", ".json")


def _json_rows(file: Path) -> Iterator[Row]:
    decoder = msgspec.json.Decoder(Row)
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield decoder.decode(line)
                except msgspec.MsgspecError as error:
                    raise ConfigError(f"{file}, line {number} is not a JSON object on one line: {error}") from error


def _read_json(file: Path, columns: Sequence[str], values: list[list[Any]]) -> None:
    for number, row in enumerate(_json_rows(file), start=1):
        for column, gathered in zip(columns, values, strict=True):
            if column not in row:
                raise ConfigError(f"{file}: row {number} has no {column!r}, only {', '.join(map(repr, row))}")
            gathered.append(row[column])


def _arrow_names(file: Path) -> list[str]:
    with _readable(file):
        if file.suffix == ".parquet":
            return _module("pyarrow.parquet", file).read_schema(file).names
        with _module("pyarrow.ipc", file).open_stream(file) as reader:
            return reader.schema.names


def _read_arrow(file: Path, columns: Sequence[str], values: list[list[Any]]) -> None:
    with _readable(file):
        if file.suffix == ".parquet":
            table = _module("pyarrow.parquet", file).read_table(file, columns=list(columns))
        else:
            with _module("pyarrow.ipc", file).open_stream(file) as reader:
                table = reader.read_all()
        for column, gathered in zip(columns, values, strict=True):
            gathered.extend(table.column(column).to_pylist())


def _arrow_rows(file: Path) -> Iterator[Row]:
    with _readable(file):
        if file.suffix == ".parquet":
            for batch in _module("pyarrow.parquet", file).ParquetFile(file).iter_batches(batch_size=128):
                yield from batch.to_pylist()
            return
        with _module("pyarrow.ipc", file).open_stream(file) as reader:
            for batch in reader:
                yield from batch.to_pylist()


@contextlib.contextmanager
def _readable(file: Path) -> Generator[None]:
    """What pyarrow says of a damaged file, or of one that lacks a column, as a `ConfigError`."""
    pyarrow = _module("pyarrow", file)
    try:
        yield
    except (pyarrow.ArrowException, KeyError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def _module(name: str, file: Path) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{file} needs the package pyarrow: pip install -e '.[train]' in Flash's folder") from error
