import json

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest

from envs.data.tables import column_names, read_columns, read_rows
from flash.errors import ConfigError

ROWS = [{"prompt": f"question {i}", "answer": i, "source": "x"} for i in range(5)]
WANTED = [[row["prompt"] for row in ROWS], [row["answer"] for row in ROWS]]


def write(path, rows=ROWS):
    """The rows as JSONL, Parquet or an Arrow stream, by the suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        table = pa.Table.from_pylist(rows)
        with pyarrow.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "data-00000-of-00001.arrow"])
def test_a_file_gives_its_columns(tmp_path, name):
    path = write(tmp_path / name)
    assert column_names(str(path)) == ["prompt", "answer", "source"]
    assert read_columns(str(path), ["prompt", "answer"]) == WANTED
    assert list(read_rows(str(path))) == ROWS


def test_rows_may_have_different_columns(tmp_path):
    rows = [{"a": 1}, {"b": 2}]
    assert list(read_rows(str(write(tmp_path / "rows.jsonl", rows)))) == rows


def test_a_parquet_folder_gives_its_files_in_order(tmp_path):
    write(tmp_path / "data" / "train-00001-of-00002.parquet", ROWS[3:])
    write(tmp_path / "data" / "train-00000-of-00002.parquet", ROWS[:3])
    assert read_columns(str(tmp_path), ["prompt", "answer"]) == WANTED


def test_a_save_to_disk_folder_is_read_without_the_datasets_library(tmp_path):
    write(tmp_path / "data-00000-of-00002.arrow", ROWS[:2])
    write(tmp_path / "data-00001-of-00002.arrow", ROWS[2:])
    (tmp_path / "state.json").write_text("{}")
    (tmp_path / "dataset_info.json").write_text("{}")
    assert read_columns(str(tmp_path), ["prompt", "answer"]) == WANTED


def test_a_pattern_chooses_files(tmp_path):
    write(tmp_path / "train-0.parquet")
    write(tmp_path / "test-0.parquet", ROWS[:1])
    assert read_columns(str(tmp_path / "train-*.parquet"), ["prompt", "answer"]) == WANTED


def test_mixed_splits_are_refused_with_a_pattern_to_use(tmp_path):
    write(tmp_path / "train-0.parquet")
    write(tmp_path / "test-0.parquet")
    with pytest.raises(ConfigError, match=r"several splits \(test, train\); .*test-\*\.parquet"):
        column_names(str(tmp_path))


def test_a_folder_of_saved_splits_is_refused_with_a_split_to_use(tmp_path):
    write(tmp_path / "train" / "data-0.arrow")
    (tmp_path / "dataset_dict.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"several splits .*train"):
        column_names(str(tmp_path))


def test_a_missing_file_names_its_nearest_neighbour(tmp_path):
    write(tmp_path / "problems.jsonl")
    with pytest.raises(ConfigError, match=r"no data set at .*; did you mean .*problems\.jsonl\?"):
        column_names(str(tmp_path / "problem.jsonl"))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "data-0.arrow"])
def test_a_missing_column_names_what_is_there_and_the_nearest(tmp_path, name):
    path = write(tmp_path / name)
    with pytest.raises(ConfigError, match=r"no column 'prompts', only 'prompt', .*; did you mean 'prompt'\?") as caught:
        column_names(str(path), ["prompts"])
    assert str(path) in str(caught.value)


def test_a_row_without_the_column_is_named(tmp_path):
    path = write(tmp_path / "rows.jsonl", [*ROWS, {"prompt": "no answer"}])
    with pytest.raises(ConfigError, match="row 6 has no 'answer'"):
        read_columns(str(path), ["prompt", "answer"])


def test_a_broken_line_is_named(tmp_path):
    path = write(tmp_path / "rows.jsonl")
    path.write_text(path.read_text() + "{oops\n")
    with pytest.raises(ConfigError, match="line 6 is not a JSON object"):
        read_columns(str(path), ["prompt", "answer"])


@pytest.mark.parametrize("name", ["rows.parquet", "data-0.arrow"])
def test_a_damaged_file_is_a_config_error(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"not a table")
    with pytest.raises(ConfigError, match="cannot be read"):
        column_names(str(path))


@pytest.mark.parametrize("name", ["notes.txt", "empty/"])
def test_what_holds_no_table_is_refused(tmp_path, name):
    path = tmp_path / name
    if name.endswith("/"):
        path.mkdir()
    else:
        path.write_text("x")
    with pytest.raises(ConfigError, match=r"holds no|not a data file"):
        column_names(str(path))
