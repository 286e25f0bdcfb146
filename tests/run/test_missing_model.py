"""A tiny model that several nodes, or runs, find missing at the same time: one makes it, the others wait."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from flash.config.learning import CriticConfig
from flash.config.tree import Config
from flash.errors import ConfigError, DeadlineError
from flash.run.models import make_missing_models, tiny_models
from flash.trainer.model.tiny_model import FINGERPRINT

NAMES = ("tiny", "critic")
"""Names of the folders of tiny models."""
OTHER_NODE = """
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


def config_of(path: Path, wait_s: float = 60.0) -> Config:
    """Return a configuration with a tiny model in `path`, for which a process waits `wait_s` seconds."""
    tree = {
        "run": {"name": "test"},
        "model": {"path": str(path)},
        "env": {"path": "envs.arithmetic:Arithmetic"},
        "tiny_model": {"layers": 1, "width": 32, "warm_start_steps": 1, "batch_size": 4},
        "deadlines": {"rendezvous": wait_s},
    }
    return msgspec.convert(tree, Config)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Make the tiny model in another place, and return its folder. The other node will move it."""
    make_missing_models(config_of(tmp_path / "theirs"))
    return tmp_path / "theirs"


@pytest.fixture
def other(tmp_path: Path, made: Path) -> Iterator[subprocess.Popen[str]]:
    """Start another node that is making the model. It puts the model in place when it reads a line."""
    command = [sys.executable, "-c", OTHER_NODE, str(made), str(tmp_path / "tiny")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    yield process
    process.kill()
    process.communicate()


class Tells(logging.Handler):
    """Log handler that lets the other node finish its work when this process logs that it waits."""

    def __init__(self, other: subprocess.Popen[str]) -> None:
        super().__init__()
        self.other = other
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message, and let the other node finish."""
        self.heard.append(record.getMessage())
        assert self.other.stdin is not None
        self.other.stdin.write("go on\n")
        self.other.stdin.flush()


def test_a_process_that_finds_the_model_being_made_waits_and_uses_it(
    tmp_path: Path, made: Path, other: subprocess.Popen[str]
) -> None:
    file = (made / FINGERPRINT).stat().st_ino
    handler = Tells(other)
    logging.getLogger("flash").addHandler(handler)
    try:
        make_missing_models(config_of(tmp_path / "tiny"))
    finally:
        logging.getLogger("flash").removeHandler(handler)
    (waited,) = handler.heard
    assert waited.startswith(f"waiting up to 60 s for process {other.pid} on ")
    assert waited.endswith(f"which is making the tiny model {tmp_path / 'tiny'}")
    assert (tmp_path / "tiny" / FINGERPRINT).stat().st_ino == file


def test_a_process_that_waits_too_long_for_a_model_names_its_maker(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    with pytest.raises(DeadlineError, match=rf"waited 0.1 s for process {other.pid} on .* to make the tiny model"):
        make_missing_models(config_of(tmp_path / "tiny", wait_s=0.1))


def test_a_node_that_died_while_it_made_the_model_is_replaced(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    other.kill()
    other.wait()
    make_missing_models(config_of(tmp_path / "tiny"))
    assert (tmp_path / "tiny" / FINGERPRINT).is_file()


def test_only_the_leftovers_of_a_killed_maker_beside_the_model_are_removed(tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from flash.trainer.checkpoint_files import atomic_folder
with atomic_folder(Path({str(tmp_path / "tiny")!r})) as folder:
    (folder / "config.json").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", program], check=False)
    (left,) = tmp_path.iterdir()
    others = [tmp_path / name for name in (".tiny.backup", ".tiny-2.making-x")]
    for folder in others:
        folder.mkdir()
    make_missing_models(config_of(tmp_path / "tiny"))
    assert not left.exists()
    assert set(tmp_path.iterdir()) == {tmp_path / "tiny", tmp_path / ".tiny.lock", *others}


def test_weights_have_the_permissions_of_the_configuration(made: Path) -> None:
    assert len({file.stat().st_mode for file in made.iterdir()}) == 1


def test_the_critics_smaller_model_is_made_beside_the_policys_with_its_tokenizer(tmp_path: Path) -> None:
    config = config_of(tmp_path / "tiny")
    critic = CriticConfig(path=str(tmp_path / "critic"))
    assert config.tiny_model is not None
    policy = msgspec.structs.replace(config.tiny_model, layers=6)
    make_missing_models(msgspec.structs.replace(config, tiny_model=policy, critic=critic))
    layers = [json.loads((tmp_path / name / "config.json").read_text())["num_hidden_layers"] for name in NAMES]
    assert layers == [6, 2]
    assert len({(tmp_path / name / "tokenizer.json").read_text() for name in NAMES}) == 1


@pytest.mark.parametrize("where", ["tiny", "other"])
def test_no_critics_model_is_made_in_a_folder_that_holds_one_or_is_the_policys(tmp_path: Path, where: str) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    config = msgspec.structs.replace(config_of(tmp_path / "tiny"), critic=CriticConfig(path=str(tmp_path / where)))
    assert [key for key, _, _ in tiny_models(config)] == ["model.path"]


def test_a_place_where_no_model_can_be_made_is_a_named_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot make the tiny model .*file/tiny"):
        make_missing_models(config_of(tmp_path / "file" / "tiny"))
