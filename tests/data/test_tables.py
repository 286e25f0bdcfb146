"""Files become rows: every form of file, every encoding, and the messages for files that cannot be read."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest

from flash.data.tables import Row, column_names, read_rows, refuse_rows, value_of
from flash.errors import ConfigError

ROWS = [{"prompt": f"question {i}", "answer": i, "source": "x"} for i in range(5)]
FORMS = (
    *("rows.jsonl", "rows.jsonl.gz", "rows.ndjson", "list.json", "list.json.gz", "lines.json", "pretty.json"),
    *("rows.csv", "rows.csv.gz", "rows.tsv", "rows.parquet", "stream.arrow", "file.arrow"),
    *("mark.jsonl", "utf16.jsonl", "utf16-no-mark.jsonl", "mark.csv", "utf16.csv"),
)
"""Names of files, which tell how `write` writes them."""
CELLS = (".csv", ".tsv")
"""Suffixes of files of separated cells."""


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows in the form that the name tells."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stem, suffix = path.name.split(".", 1)
    if suffix == "parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    elif suffix == "arrow":
        table = pa.Table.from_pylist(rows)
        make = pyarrow.ipc.new_file if stem == "file" else pyarrow.ipc.new_stream
        with make(path, table.schema) as writer:
            writer.write_table(table)
    else:
        text = as_text(rows, stem, suffix.removesuffix(".gz"))
        encodings = {"mark": "utf-8-sig", "utf16": "utf-16", "utf16-no-mark": "utf-16-le"}
        data = text.encode(encodings.get(stem, "utf-8"))
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def as_text(rows: list[dict[str, Any]], stem: str, suffix: str) -> str:
    """Return rows as cells, as a JSON list, or as JSON lines with blank lines between them."""
    if suffix in ("csv", "tsv"):
        text = io.StringIO()
        names = dict.fromkeys(name for row in rows for name in row)
        cells = csv.DictWriter(text, names, delimiter="\t" if suffix == "tsv" else ",")
        cells.writeheader()
        for row in rows:
            cells.writerow(
                {key: json.dumps(value) if isinstance(value, (list, dict)) else value for key, value in row.items()}
            )
        return text.getvalue()
    if stem in ("list", "pretty"):
        return json.dumps(rows, indent=2 if stem == "pretty" else None)
    return "\n\n".join(map(json.dumps, rows))


def values(path: Path) -> list[dict[str, Any]]:
    """Return the values of all rows of a table."""
    return [row.values for row in read_rows(str(path))]


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_file_gives_its_rows(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, ROWS)
    assert column_names(str(path)) == ["prompt", "answer", "source"]
    expected = [{**row, "answer": str(row["answer"])} if ".csv" in name or ".tsv" in name else row for row in ROWS]
    assert values(path) == expected


@pytest.mark.parametrize("name", FORMS)
def test_rows_are_counted_from_one(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, ROWS)
    places = [row.place for row in read_rows(str(path))]
    assert [place.partition(" (line")[0] for place in places] == [f"{path}, row {number}" for number in range(1, 6)]
    if name == "rows.jsonl":  # with blank lines between them
        assert places[1] == f"{path}, row 2 (line 3)"


def test_line_of_csv_row_counts_names_and_line_breaks_in_cells(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('a,b\n1,"x\ny"\n2,z\n\n3,w\n')
    assert [row.place for row in read_rows(str(path))] == [
        f"{path}, row 1 (line 3)",
        f"{path}, row 2 (line 4)",
        f"{path}, row 3 (line 6)",
    ]


def test_rows_may_have_different_columns(tmp_path: Path) -> None:
    rows = [{"a": 1}, {"b": 2}]
    assert values(write(tmp_path / "rows.jsonl", rows)) == rows


def test_a_folder_gives_its_files_in_order(tmp_path: Path) -> None:
    write(tmp_path / "data" / "train-00001-of-00002.parquet", ROWS[3:])
    write(tmp_path / "data" / "train-00000-of-00002.parquet", ROWS[:3])
    assert values(tmp_path) == ROWS


def test_a_save_to_disk_folder_is_read_without_the_datasets_library(tmp_path: Path) -> None:
    write(tmp_path / "data-00000-of-00002.arrow", ROWS[:2])
    write(tmp_path / "data-00001-of-00002.arrow", ROWS[2:])
    (tmp_path / "state.json").write_text("{}")
    (tmp_path / "dataset_info.json").write_text("{}")
    assert values(tmp_path) == ROWS


def test_a_pattern_chooses_files(tmp_path: Path) -> None:
    write(tmp_path / "train-0.parquet", ROWS)
    write(tmp_path / "test-0.parquet", ROWS[:1])
    assert values(tmp_path / "train-*.parquet") == ROWS


@pytest.mark.parametrize("suffix", ["parquet", "jsonl.gz"])
def test_mixed_splits_are_refused_with_a_pattern_to_use(tmp_path: Path, suffix: str) -> None:
    write(tmp_path / f"train-0.{suffix}", ROWS)
    write(tmp_path / f"test-0.{suffix}", ROWS)
    with pytest.raises(ConfigError, match=rf"several splits \(test, train\); .*test\*\.{suffix}"):
        column_names(str(tmp_path))


def test_a_folder_of_saved_splits_is_refused_with_a_split_to_use(tmp_path: Path) -> None:
    write(tmp_path / "train" / "data-0.arrow", ROWS)
    (tmp_path / "dataset_dict.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"several splits .*train"):
        column_names(str(tmp_path))


def test_a_folder_of_saved_splits_without_any_split_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds no \.arrow"):
        column_names(str(tmp_path))


def test_a_missing_file_names_its_nearest_neighbour(tmp_path: Path) -> None:
    write(tmp_path / "problems.jsonl", ROWS)
    with pytest.raises(ConfigError, match=r"no data set at .*; did you mean .*problems\.jsonl\?"):
        column_names(str(tmp_path / "problem.jsonl"))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet", "data-0.arrow"])
def test_a_missing_column_names_what_is_there_and_the_nearest(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, ROWS)
    with pytest.raises(ConfigError, match=r"no column 'prompts', only 'prompt', .*; did you mean 'prompt'\?") as caught:
        column_names(str(path), ["prompts"])
    assert str(path) in str(caught.value)


def test_a_name_of_another_sense_is_not_suggested(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"question": "q", "answer": "a"}])
    with pytest.raises(ConfigError) as caught:
        column_names(str(path), ["solution"])
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet", "data-0.arrow"])
def test_a_dotted_name_leads_into_a_column(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, [{"reward_model": {"style": "rule", "ground_truth": "72"}}])
    assert "reward_model.ground_truth" in column_names(str(path))
    assert [value_of(row, "reward_model.ground_truth") for row in read_rows(str(path))] == ["72"]


def test_a_name_with_a_dot_is_a_name(tmp_path: Path) -> None:
    assert value_of(Row("", {"a.b": 1, "a": {"b": 2}}), "a.b") == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt": "x"}, "row 3 has no 'answer', only 'prompt'"),
        ({"answer": None}, "row 3: 'answer' is null; expected a value, or leave the row out"),
    ],
)
def test_a_row_without_the_value_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        value_of(Row("x.jsonl, row 3", values), "answer")


def test_fields_that_parquet_has_padded_are_left_out(tmp_path: Path) -> None:
    rows = [{"calls": [{"a": {"x": 1}}, {"b": {"y": None, "z": [2]}}], "note": None}]
    assert values(write(tmp_path / "rows.parquet", rows)) == [
        {"calls": [{"a": {"x": 1}}, {"b": {"z": [2]}}], "note": None}
    ]


def test_nan_hurts_only_where_it_is_used(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "NaN", "answer": "1"}\n{"prompt": "q", "score": NaN, "least": -Infinity}\n')
    first, second = values(path)
    assert first == {"prompt": "NaN", "answer": "1"}
    assert second["score"] != second["score"]
    path.write_text('[{"prompt": "q", "score": NaN}]')
    assert values(path)[0]["prompt"] == "q"


REFUSED = {
    "rows.jsonl": [
        (
            b'{"a": 1}\n{oops\n',
            "rows.jsonl, row 2 is not a JSON object on one line: .*; expected one object in each line",
        ),
        (b'{"a": 1}\n\n"text"\n', r"rows.jsonl, row 2 \(line 3\) is not a JSON object"),
        (b'{"a": 1}\n{"a": "\xe9"}\n', r"rows.jsonl, row 2 is not UTF-8 text \(byte 0xe9\); save the file as UTF-8"),
        (b'[{"a": 1}, 7]', "rows.jsonl, row 2 is not a JSON object"),
        (b'[{"a": 1}, NaN]', "rows.jsonl, row 2 is not a JSON object, but nan"),
        (b"[{]", "rows.jsonl is no list of JSON objects"),
        (b'[{"a": "\\ud800"}]', "rows.jsonl is no list of JSON objects: .* surrogates not allowed"),
        (b'{"a": "\\ud800", "b": NaN}', "rows.jsonl, row 1 is not a JSON object on one line: .* surrogate pair"),
        (b'{"a": "a", "b": ' + b"[" * 990 + b"]" * 990 + b"}", "rows.jsonl, row 1 .* recursion"),
        (b'\xff\xfe{\x00"\x00a', "rows.jsonl, row 1 is not utf-16 text"),
        (b"", "rows.jsonl has no rows"),
        (b"\x1f\x8b\x08\x00", r"rows.jsonl is compressed by gzip: name it rows.jsonl.gz"),
    ],
    "rows.json": [(b'{\n  "data": []\n}', "rows.json, row 1 is not a JSON object .* or one list of objects")],
    "rows.csv": [
        (b"a,b\n1,2,3\n", "rows.csv, row 1 has more cells than the first line has names"),
        (b'a\n"1\n', "rows.csv, row 1 cannot be read: unexpected end of data; a cell with quotes"),
        (b"a\n1\n\xe9\n", "rows.csv, row 1 cannot be read: .*save the file as UTF-8"),
        (b"a,b\n", "rows.csv has no rows"),
        (b"a,b,a\n1,2,3\n", "rows.csv has two columns 'a'; expected a name of its own for each"),
    ],
    "rows.jsonl.gz": [(b"{}", "rows.jsonl.gz cannot be read: Not a gzipped file"), (b"\x1f\x8b", "cannot be read")],
    "rows.parquet": [
        (b"not a table", "rows.parquet cannot be read"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:6652\nsize 9\n",
            "a pointer of Git LFS .* `git lfs pull`",
        ),
    ],
    "data-0.arrow": [(b"not a table", "data-0.arrow cannot be read"), (b"ARROW1 no", "data-0.arrow cannot be read")],
    "notes.txt": [(b"x", "notes.txt is not a data file that can be read; expected .jsonl, .json, .csv")],
    "data.parquet.gz": [(b"x", "data.parquet.gz is not a data file")],
}


@pytest.mark.parametrize(
    ("name", "data", "message"), [(name, *case) for name, some in REFUSED.items() for case in some]
)
def test_a_file_that_cannot_be_read_is_named_with_its_row(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        _ = column_names(str(path)), list(read_rows(str(path)))


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no \.arrow"):
        column_names(str(tmp_path))


def test_one_message_lists_the_first_faults_and_counts_the_others() -> None:
    refuse_rows([])
    with pytest.raises(ConfigError, match=r"^row 0\nrow 1\nrow 2\nrow 3\nrow 4\n… and 2 more rows$"):
        refuse_rows([f"row {number}" for number in range(7)])


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"b": {"a": 1, "a": 2}, "a": 3}', '[{"a": 1, "a": 2}]'])
def test_two_values_of_one_name_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="row 1 has two values of 'a'"):
        values(path)


def test_a_name_may_also_be_in_a_nested_object_or_a_text(tmp_path: Path) -> None:
    rows = [{"a": 1, "b": {"a": 2}, "c": ["a", {"a": 3}, {"a": 4}], "d": '{"a": 5, "a": 6}'}]
    assert values(write(tmp_path / "rows.jsonl", rows)) == rows


def test_a_data_set_that_is_missing_is_named_with_the_folder_that_was_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"no data set at train.jsonl in the working directory, {tmp_path}"):
        column_names("train.jsonl")
    with pytest.raises(ConfigError, match=f"no data set at {tmp_path}/train.jsonl$"):
        column_names(f"{tmp_path}/train.jsonl")
