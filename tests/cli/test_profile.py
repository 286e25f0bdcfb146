"""`flash profile` before its run starts: what it refuses, and where it would go."""

from __future__ import annotations

from pathlib import Path

import pytest

from flash.cli import profile
from flash.cli.main import main, parse
from flash.config.load import load
from flash.errors import ConfigError
from flash.profile.order import ProfileOrder, RecordingFacts
from flash.profile.order import write_part as order_part
from tests.profile.test_parts import event, write_part

CONFIG = """
run = { name = "mine", output_dir = "FOLDER", steps = 4 }
model = { path = "FOLDER/models/tiny", max_length = 32 }
rollout = { max_new_tokens = 8 }
tiny_model = { layers = 1, width = 32 }
env = { path = "envs.arithmetic:Arithmetic" }
cluster = { gpus_per_node = 0 }
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(CONFIG.replace("FOLDER", str(tmp_path)))
    return file


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["profile", *arguments]) == 2
    return capsys.readouterr().err


def test_more_steps_than_the_run_has_are_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, str(file), "--steps=3", "--warm-up=2")
    assert "--warm-up 2 and --steps 3: expected at most run.steps = 4 together, and the run has fewer" in said
    (file.parent / "mine").mkdir()
    for name, text in (("config.toml", ""), ("metrics.jsonl", '{"step":0}\n{"step":1}\n')):
        (file.parent / "mine" / name).write_text(text)
    said = refusal(capsys, str(file), "--steps=2", "--warm-up=1", "--resume")
    assert "2 of its 4 steps are left" in said
    assert not (file.parent / "mine-profile").exists()


@pytest.mark.parametrize("wrong", ["--steps=0", "--warm-up=-1", "--steps=x"])
def test_numbers_that_mean_nothing_are_refused(file: Path, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["profile", str(file), wrong])
    assert f"expected a whole number, {int('steps' in wrong)} or more; got" in capsys.readouterr().err


def test_a_folder_that_holds_anything_else_is_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = file.parent / "mine-profile"
    out.mkdir()
    (out / "report.txt").touch()
    said = refusal(capsys, str(file), "--steps=1", "--warm-up=0")
    assert f"{out} exists: a profile makes its folder; name a new one with --out FOLDER" in said
    assert f"{file} exists" in refusal(capsys, str(file), "--steps=1", "--warm-up=0", f"--out={file}")
    said = refusal(capsys, str(file), "--steps=1", "--warm-up=0", f"--out={file}/deep")
    assert f"cannot make {file}/deep: {file} is a file; name a folder with --out FOLDER" in said


def test_a_run_that_came_to_nothing_is_no_hindrance(tmp_path: Path) -> None:
    for name in ("mine", "mine.1", ".mine.lock"):
        (tmp_path / name).mkdir()
    profile._refuse(tmp_path, "mine")  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(ConfigError):
        profile._refuse(tmp_path, "other")  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(("code", "wanted"), [(0, 1), (1, 1), (130, 130)])
def test_a_run_that_ended_before_the_steps_is_told(
    file: Path, code: int, wanted: int, capsys: pytest.CaptureFixture[str]
) -> None:
    order = ProfileOrder(str(file.parent), 2, 4)
    assert profile._show(load(file), order, code) == wanted  # pyright: ignore[reportPrivateUsage]
    assert "nothing was recorded of steps 2 to 3: the run's output says why" in capsys.readouterr().err


def test_what_is_there_is_shown_though_a_file_was_cut_off(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = file.parent / "out"
    out.mkdir()
    write_part(out / "trainer-0.json.gz", [event("aten::mm", 1e6, 500.0)])
    (out / "engine-0.json.gz").write_bytes(b"")
    assert profile._show(load(file), ProfileOrder(str(out), 1, 4), 130) == 130  # pyright: ignore[reportPrivateUsage]
    said = capsys.readouterr()
    assert "engine-0.json.gz cannot be read" in said.err
    assert "steps 1 to 2 of 4 of the run in" in said.out
    assert "the run ended before 1 of the 3 steps that were asked for" in said.out
    assert "nothing is there of engine 0: it had not started, or what was said above of it tells why" in said.out
    assert (out / "trace.json.gz").exists()


def test_figures_are_shown_though_no_trace_can_be_written(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = file.parent / "out"
    out.mkdir()
    write_part(out / "trainer-0.json.gz", [event("aten::mm", 1e6, 500.0)])
    (out / ".trace.json.gz").mkdir()
    (out / ".trace.json.gz" / "in-the-way").touch()
    assert profile._show(load(file), ProfileOrder(str(out), 1, 3), 0) == 1  # pyright: ignore[reportPrivateUsage]
    said = capsys.readouterr().out
    assert "aten::mm" in said
    assert "trace.json.gz cannot be written: Is a directory; single processes have files there" in said


def test_who_has_left_nothing_is_named_and_the_steps_are_not_called_missing(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = file.parent / "out"
    out.mkdir()
    write_part(out / "engine-0.json.gz", [event("aten::mm", 1e6, 500.0)], who="engine 0")
    assert profile._show(load(file), ProfileOrder(str(out), 1, 3), 0) == 1  # pyright: ignore[reportPrivateUsage]
    said = capsys.readouterr().out
    assert "nothing is there of trainer 0" in said
    assert "the run ended before" not in said
    write_part(out / "trainer-0.json.gz", [event("aten::mm", 1e6, 500.0)])
    assert profile._show(load(file), ProfileOrder(str(out), 1, 3), 0) == 0  # pyright: ignore[reportPrivateUsage]


def test_an_engine_that_started_after_the_steps_is_no_failure(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order = ProfileOrder(str(file.parent / "out"), 1, 3)
    Path(order.folder).mkdir()
    write_part(order.file("trainer-0"), [event("aten::mm", 1e6, 500.0)])
    order_part(order.file("engine-0"), RecordingFacts("engine 0", 1.0, 1.0, 0, 0), [])
    assert profile._show(load(file), order, 0) == 0  # pyright: ignore[reportPrivateUsage]
    said = capsys.readouterr().out
    assert "engine 0: it had started after these steps, whose samples were there before" in said
    assert "nothing is there of" not in said
