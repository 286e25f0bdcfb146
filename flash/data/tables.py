"""Reading of tables on disk, row by row.

Formats: JSON lines, a JSON list, CSV (each also compressed by gzip), Parquet, Arrow, and folders that the Hugging Face
`datasets` library has written. `flash sft` and environments read rows from here, and `flash.data.shapes` converts them.
Error messages count the rows of each file from 1; the first line of a CSV file names the columns and is no row. Text
may be UTF-8, with or without a byte-order mark, UTF-16 or UTF-32. Files are read with the standard library or pyarrow;
`datasets` is not needed. Functions that yield rows raise a fault, as ConfigError, when they come to the faulty row.
"""

from __future__ import annotations

import contextlib
import csv
import difflib
import glob
import gzip
import importlib
import io
import json
import sys
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from flash.errors import ConfigError, advice_for_extra

SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
"""Usual beginnings of the file names of a data set's splits. A folder with files of several splits is refused."""
JSON_LINES = (".jsonl", ".ndjson", ".json")
"""Suffixes of files with JSON lines or a JSON list."""
GZIP = b"\x1f\x8b"
"""First bytes of a file that is compressed by gzip."""
SEPARATORS = {".csv": ",", ".tsv": "\t"}
"""Separator of the cells, by the suffix of the file."""
READ_TOGETHER = 128
"""Number of rows of a Parquet file that are decoded at once."""
METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Names of metadata files in the folder of a data set, which contain no rows."""
LFS = b"version https://git-lfs.github.com/spec/"
"""Beginning of a Git LFS pointer, a small file in the place of data that Git LFS stores elsewhere."""
FAULTS = 5
"""Most faulty rows that one error message lists."""
NEAR = 0.8
"""Lowest similarity, from 0 to 1, of a name that is suggested for another. With this value, `question` is not suggested
for `solution`."""


class Row(NamedTuple):
    """Row of a table."""

    place: str
    """File and number of the row, counted from 1, for error messages."""
    values: dict[str, Any]
    """Values by column name. Fields that Parquet or Arrow have padded with null are removed from nested values."""


def column_names(path: str, needed: Sequence[str] = ()) -> list[str]:
    """Return the columns of the table's first file; nested columns have dotted names.

    The columns are those of the first row, or of the schema of a Parquet or Arrow file. Further rows are not decoded.
    Commands call this first, so that a wrong name of a column is refused before any other work.

    Args:
        path: file, folder or glob pattern of the table (`_files`).
        needed: names of columns that must be there.

    Raises:
        ConfigError: the table does not exist, is empty, cannot be read, or lacks a needed column.
    """
    first = _files(path)[0]
    if _kind(first) in (".parquet", ".arrow"):
        with _arrow_file(first) as (schema, _):
            names = list(_names_of_fields(schema))
    else:
        with contextlib.closing(_rows(first)) as rows:
            row = next(rows, None)
        if row is None:
            raise ConfigError(f"{first} has no rows")
        names = list(_names_of_values(row.values))
    for name in needed:
        if name not in names:
            raise ConfigError(f"{first} has no column {name!r}, only {_listed(names)}{suggested(name, names)}")
    return names


def suggested(name: str, names: Iterable[str]) -> str:
    """Return `; did you mean …?` with the most similar of the names, or an empty text if none is similar enough."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=NEAR)
    return f"; did you mean {near[0]!r}?" if near else ""


def read_rows(path: str) -> Iterator[Row]:
    """Yield every row of all files of the table. Rows of JSON may have different columns.

    `path`: file, folder or glob pattern of the table (`_files`).

    Raises:
        ConfigError: the table does not exist or cannot be read; the message names the file and the row.
    """
    for file in _files(path):
        yield from _rows(file)


def value_of(row: Row, column: str) -> Any:
    """Return the value of a column. A dotted name selects a nested value, also inside JSON text.

    A column whose own name has dots comes first.

    Raises:
        ConfigError: the row has no such column, or no value in it.
    """
    value: Any = row.values
    if column in row.values:
        value = row.values[column]
    else:
        for name in column.split("."):
            value = json_of(value) if isinstance(value, str) else value
            if not isinstance(value, dict) or name not in value:
                raise ConfigError(f"{row.place} has no {column!r}, only {_listed(_names_of_values(row.values))}")
            value = cast("dict[str, Any]", value)[name]
    if value is None:
        raise ConfigError(f"{row.place}: {column!r} is null; expected a value, or leave the row out")
    return value


def refuse_rows(faults: Sequence[str]) -> None:
    """Raise ConfigError if rows have faults. The message has the first faults and the number of the others."""
    if faults:
        more = f"\n… and {len(faults) - FAULTS} more rows" if len(faults) > FAULTS else ""
        raise ConfigError("\n".join(faults[:FAULTS]) + more)


def json_of(text: str) -> Any:
    """Return the list or object that a JSON text encodes; None if the text encodes neither, or is no JSON."""
    # Most texts are not JSON, so the first character decides before anything is decoded.
    if text.lstrip()[:1] not in ("[", "{"):
        return None
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None


def _files(path: str) -> list[Path]:
    """Return the files of a table, in order: one file, the files of a folder, or the matches of a glob pattern.

    Raises:
        ConfigError: there is no file, or a folder holds several splits. Or a file is of no known format, or is only a
            pointer of Git LFS.
    """
    place = Path(path)
    if place.is_file():
        files = [place]
    elif place.is_dir():
        files = _files_of_folder(place)
    else:
        files = sorted(Path(name) for name in glob.glob(path, recursive=True))
        if not files:
            where = "" if place.is_absolute() else f" in the working directory, {Path.cwd()}"
            raise ConfigError(f"there is no data set at {path}{where}{_nearest(place)}")
    for file in files:
        if _kind(file) not in (*JSON_LINES, *SEPARATORS, ".parquet", ".arrow"):
            raise ConfigError(
                f"{file} is not a data file that can be read; expected .jsonl, .json, .csv, .parquet or .arrow"
            )
        _refuse_pointer(file)
    return files


def _refuse_pointer(file: Path) -> None:
    """Raise ConfigError if a file is a Git LFS pointer, because the repository was cloned without Git LFS."""
    # An unreadable file is reported later, by the function that reads its rows.
    with contextlib.suppress(OSError), file.open("rb") as data:
        if data.read(len(LFS)) == LFS:
            raise ConfigError(f"{file} is a pointer of Git LFS and not the data; fetch that with `git lfs pull`")


def _kind(file: Path) -> str:
    """Return the suffix that names the format of a file; for `rows.jsonl.gz` this is `.jsonl`."""
    suffixes = file.suffixes
    if suffixes[-1:] == [".gz"] and suffixes[-2:-1] and suffixes[-2] in (*JSON_LINES, *SEPARATORS):
        return suffixes[-2]
    return file.suffix


def _files_of_folder(folder: Path) -> list[Path]:
    """Return the files of a folder, in order. If it has files of several formats, only one format is read.

    Raises:
        ConfigError: the folder has no data file, or the files of several splits, such as `train` and `test`.
    """
    # `datasets` writes this file into a folder with one folder for each split.
    if (folder / "dataset_dict.json").is_file() and (
        splits := sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    ):
        raise ConfigError(f"{folder} holds several splits ({', '.join(splits)}); give one, as {folder / splits[0]}")
    # The most preferred format is first: Arrow and Parquet have exact types. Parquet files are often in subfolders.
    patterns = ("*.arrow", "**/*.parquet", "*.jsonl", "*.jsonl.gz", "*.json", "*.json.gz", "*.csv", "*.csv.gz")
    found = ([file for file in sorted(folder.glob(one)) if file.name not in METADATA] for one in patterns)
    files = next(filter(None, found), [])
    if not files:
        raise ConfigError(f"the folder {folder} holds no .arrow, .parquet, .jsonl, .json or .csv file")
    # The usual names are `train.jsonl` and `train-00000-of-00004.parquet`.
    splits = sorted({split for file in files for split in SPLITS if file.name.split("-")[0].split(".")[0] == split})
    if len(splits) > 1:
        pattern = files[0].parent / f"{splits[0]}*{''.join(files[0].suffixes)}"
        raise ConfigError(f"{folder} holds several splits ({', '.join(splits)}); give one by a pattern, as {pattern}")
    return files


def _nearest(place: Path) -> str:
    """Return the end of an error message about a missing path: its folder is missing, or a similar name is there.

    Returns an empty text if the folder exists and has no similar name.
    """
    if not place.parent.is_dir():
        return f": there is no folder {place.parent}"
    near = difflib.get_close_matches(place.name, [entry.name for entry in place.parent.iterdir()], n=1)
    return f"; did you mean {place.parent / near[0]}?" if near else ""


def _listed(names: Iterable[str]) -> str:
    """Return names for an error message, with commas between them; `none` if there are none."""
    return ", ".join(map(repr, names)) or "none"


def _rows(file: Path) -> Generator[Row]:
    """Return the rows of a file, read by its format. Nothing is read before the first row is taken."""
    kind = _kind(file)
    if kind in SEPARATORS:
        return _csv_rows(file, SEPARATORS[kind])
    return _json_rows(file) if kind in JSON_LINES else _arrow_rows(file)


def _place(file: Path, number: int, line: int | None = None, *, lines_before: int = 0) -> str:
    """Return the place of a row for error messages: the file and the number of the row.

    `line` is the line of the file in which the row ends; None if it is unknown. The place includes it if blank lines or
    line breaks in cells have moved it. Otherwise the row is `lines_before` lines, such as the head of a CSV file, below
    the line of its own number.
    """
    return f"{file}, row {number}" + ("" if line in (None, number + lines_before) else f" (line {line})")


@contextlib.contextmanager
def _opened(file: Path) -> Generator[tuple[gzip.GzipFile | io.BufferedReader, str]]:
    """Open a text file, decompress it if needed, and detect its encoding. Yields the open file and the encoding.

    A byte-order mark of UTF-8 is skipped. The file is closed at the end of the block.

    Raises:
        ConfigError: the file cannot be read, also later in the block, or it is compressed without the suffix `.gz`.
    """
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as data:
            # The first four bytes tell the encoding of JSON text. They are not taken from the stream.
            head = data.peek(4)[:4]
            if head.startswith(GZIP) and file.suffix != ".gz":
                raise ConfigError(f"{file} is compressed by gzip: name it {file.name}.gz, or decompress it")
            encoding = json.detect_encoding(head)
            if encoding == "utf-8-sig":
                data.read(3)
                encoding = "utf-8"
            yield data, encoding
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{file} cannot be read: {why}") from error


@contextlib.contextmanager
def _as_text(data: gzip.GzipFile | io.BufferedReader, encoding: str, newline: str) -> Generator[io.TextIOWrapper]:
    """Yield an open file as a stream of text.

    `newline` is as for `open`: with "" line breaks inside of cells stay as they are, and with a newline character only
    this character ends a line.
    """
    text = io.TextIOWrapper(cast("io.BufferedReader", data), encoding, newline=newline)
    try:
        yield text
    finally:
        text.detach()  # Else the wrapper closes the file, which `_opened` owns.


def _json_rows(file: Path) -> Generator[Row]:
    """Yield the rows of JSON lines, or of one JSON list that fills the file. Blank lines are skipped.

    Raises:
        ConfigError: the file cannot be read, or a row is not a JSON object.
    """
    with _opened(file) as (data, encoding), _as_text(data, encoding, "\n") as text:
        # Bytes are decoded only once if they are UTF-8 already, which JSON decoders take.
        lines = iter(data) if encoding == "utf-8" else (line.encode() for line in text)
        number = line_number = 0
        try:
            for line_number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                if number == 0 and line.lstrip().startswith(b"["):  # a list, and no JSON lines
                    yield from _json_list(file, line + b"".join(lines))
                    return
                number += 1
                yield Row(_place(file, number, line_number), _decoded(line, _place(file, number, line_number)))
        except UnicodeDecodeError as error:  # Only for other encodings; UTF-8 is decoded by `_decoded`.
            raise ConfigError(f"{_place(file, number + 1, line_number + 1)} is not {encoding} text: {error}") from error


_decoder = msgspec.json.Decoder(dict[str, Any])
"""Decoder of one row."""
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])
"""Decoder that leaves the objects of a list undecoded, so that an error can name the row."""


def _json_list(file: Path, text: bytes) -> Iterator[Row]:
    """Yield the rows of a JSON list. Lists with NaN or Infinity, which are not JSON, are read too.

    Raises:
        ConfigError: the text is no list, or an element of it is not a JSON object.
    """
    try:
        rows: list[Any] = list(_list_decoder.decode(text))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        try:
            rows = cast("list[Any]", _loads(text))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file} is no list of JSON objects: {error}") from error
    for number, row in enumerate(rows, start=1):
        place = _place(file, number)
        if isinstance(row, msgspec.Raw):  # otherwise `_loads` has decoded all rows
            row = _decoded(row, place)
        if not isinstance(row, dict):
            raise ConfigError(f"{place} is not a JSON object, but {row!r:.100}")
        yield Row(place, cast("dict[str, Any]", row))


def _decoded(line: bytes | msgspec.Raw, place: str) -> dict[str, Any]:
    """Return the object of one row.

    Raises:
        ConfigError: the text is not a JSON object, or an object in it has two values of one name.
    """
    try:
        row = _decoder.decode(line)
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ConfigError(f"{place} is not UTF-8 text (byte {byte:#04x}); save the file as UTF-8") from error
    except (msgspec.MsgspecError, RecursionError) as error:
        if b"NaN" in bytes(line) or b"Infinity" in bytes(line):
            with contextlib.suppress(ValueError, RecursionError):
                row = _loads(bytes(line))
                if isinstance(row, dict):
                    return cast("dict[str, Any]", row)
        raise ConfigError(
            f"{place} is not a JSON object on one line: {error}; expected one object in each line, or one list of "
            "objects in the file"
        ) from error
    # The decoder keeps the last of several values of one name. Only a second decoding can find the others, and it is
    # far slower than this search. It is done only if a name occurs twice, which may also be in a nested object or text.
    text = bytes(line)
    if any(text.count(msgspec.json.encode(name)) > 1 for name in row):
        _refuse_equal_names(text, place)
    return row


def _loads(text: bytes) -> Any:
    """Decode JSON that may have NaN or Infinity. Python writes them, and they are harmless unless their column is used.

    Raises:
        ValueError, RecursionError: the text is not such JSON, or has a lone surrogate.
    """
    value = json.loads(text)
    # Python decodes lone surrogates too, which no tokenizer takes. A UnicodeEncodeError is a ValueError.
    json.dumps(value, ensure_ascii=False).encode()
    return value


def _refuse_equal_names(text: bytes, place: str) -> None:
    """Raise ConfigError if an object in a JSON text has two values of one name, or if the text nests too deeply."""

    def refuse_pairs(pairs: list[tuple[str, Any]]) -> None:
        """Check one object of the text. The decoder calls this for each object."""
        names = [name for name, _ in pairs]
        if twice := next((name for at, name in enumerate(names) if name in names[:at]), None):
            raise ConfigError(f"{place} has two values of {twice!r}; expected a name of its own for each")

    try:
        json.loads(text, object_pairs_hook=refuse_pairs)
    except RecursionError as error:  # this decoder allows a few levels less than the first one
        raise ConfigError(f"{place} cannot be read: {error}") from error


def _csv_rows(file: Path, separator: str) -> Generator[Row]:
    """Yield the rows of a file of separated cells. Its first line names the columns; all values are text.

    A cell that is missing at the end of a row is None.

    Raises:
        ConfigError: the file cannot be read, two columns have one name, or a row has too many cells or wrong quotes.
    """
    # Python's own limit of 128 KiB is too small for texts. The limit is a C long, which may have 32 bits.
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    with _opened(file) as (data, encoding), _as_text(data, encoding, "") as text:
        cells = csv.DictReader(text, delimiter=separator, strict=True)
        number = 0
        try:
            # Columns without a name, such as the index that pandas writes, may repeat.
            names = cells.fieldnames or ()
            if twice := next((name for at, name in enumerate(names) if name and name in names[:at]), None):
                raise ConfigError(f"{file} has two columns {twice!r}; expected a name of its own for each")
            for number, values in enumerate(cells, start=1):
                place = _place(file, number, cells.line_num, lines_before=1)
                if None in values:  # `csv` keeps cells without a name under this key
                    raise ConfigError(f"{place} has more cells than the first line has names; quote cells with commas")
                yield Row(place, cast("dict[str, Any]", values))
        except UnicodeDecodeError as error:
            raise ConfigError(f"{_place(file, number + 1)} cannot be read: {error}; save the file as UTF-8") from error
        except csv.Error as error:
            raise ConfigError(
                f"{_place(file, number + 1)} cannot be read: {error}; a cell with quotes, commas or line breaks stands "
                'between quotes, and a quote within it is written twice: "say ""yes"""'
            ) from error


@contextlib.contextmanager
def _arrow_file(file: Path) -> Generator[tuple[Any, Iterator[Any]]]:
    """Open a Parquet or Arrow file. Yields its schema and an iterator of its record batches.

    Raises:
        ConfigError: pyarrow is not installed, or the file cannot be read, also later in the block.
    """
    pyarrow = _module("pyarrow", file)
    try:
        if file.suffix == ".parquet":
            with _module("pyarrow.parquet", file).ParquetFile(file) as table:
                yield table.schema_arrow, table.iter_batches(batch_size=READ_TOGETHER)
            return
        with file.open("rb") as head:
            # `datasets` writes Arrow streams. Other programs write Arrow files, which have this mark and a footer.
            is_file = head.read(6) == b"ARROW1"
        ipc = _module("pyarrow.ipc", file)
        if is_file:
            with ipc.open_file(file) as reader:
                yield reader.schema, (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            with ipc.open_stream(file) as reader:
                yield reader.schema, iter(reader)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def _arrow_rows(file: Path) -> Generator[Row]:
    """Yield the rows of a Parquet or Arrow file. Raises the errors of `_arrow_file`."""
    with _arrow_file(file) as (_, batches):
        number = 0
        for batch in batches:
            for values in batch.to_pylist():
                number += 1
                yield Row(_place(file, number), {name: without_nulls(value) for name, value in values.items()})


def without_nulls(value: Any) -> Any:
    """Return a value without null fields in its objects. Arrow pads each object with the fields of all others."""
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value).items()
        return {name: without_nulls(inner) for name, inner in fields if inner is not None}
    if isinstance(value, list):
        return [without_nulls(inner) for inner in cast("list[Any]", value)]
    return value


def _names_of_fields(fields: Any, prefix: str = "") -> Iterator[str]:
    """Yield the names of the fields in an Arrow schema or struct; nested fields have dotted names."""
    for field in fields:
        yield prefix + field.name
        # Only the fields of structs are named: a list of structs has none that a row could select.
        if hasattr(field.type, "num_fields") and str(field.type).startswith("struct<"):
            yield from _names_of_fields(list(field.type), f"{prefix}{field.name}.")


def _names_of_values(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the names of a row's columns. Nested values, also inside JSON text, have dotted names in addition."""
    for name, value in values.items():
        yield prefix + name
        if isinstance(value, str) and value.startswith("{"):
            value = json_of(value)
        if isinstance(value, dict):
            yield from _names_of_values(cast("dict[str, Any]", value), f"{prefix}{name}.")


def _module(name: str, file: Path) -> Any:
    """Import a module of pyarrow, which only some formats need. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        message = f"{file} needs the package pyarrow, which is not installed"
        raise ConfigError(f"{message}: {advice_for_extra('view')}") from error
