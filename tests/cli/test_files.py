"""Files that commands write and read, and an output without a reader."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flash.cli.arguments import check_folder_writable, check_writable, run_directory
from flash.cli.main import BROKEN_PIPE, main
from flash.errors import ConfigError
from flash.observe.rundir.rundir import RunDirectory


def test_a_path_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check_writable(None, tmp_path / "new.json", tmp_path / "file")
    check_folder_writable(tmp_path / "new")
    (tmp_path / "empty").mkdir()
    check_folder_writable(tmp_path / "empty")
    for wrong, why in [
        (tmp_path, "it is a folder; expected the name of a file"),
        (tmp_path / "gone" / "x.json", f"the folder {tmp_path / 'gone'} does not exist"),
        (tmp_path / "file" / "x.json", f"the folder {tmp_path / 'file'} does not exist"),
    ]:
        with pytest.raises(ConfigError) as caught:
            check_writable(wrong)
        assert str(caught.value) == f"cannot write {wrong}: {why}"
    with pytest.raises(ConfigError, match="it is a file; expected the name of a folder"):
        check_folder_writable(tmp_path / "file")


def test_only_a_regular_file_is_written_over(tmp_path: Path) -> None:
    """A file is renamed over its target, which would remove a device, a pipe, a socket or a link."""
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "loose").symlink_to("gone")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket"))
        for name in ("pipe", "link", "loose", "socket"):
            with pytest.raises(ConfigError) as caught:
                check_writable(tmp_path / name)
            why = "it is a link, a device, a pipe or a socket; expected the name of a regular or a new file"
            assert str(caught.value) == f"cannot write {tmp_path / name}: {why}"


def test_a_trace_does_not_replace_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert main(["simulate", "--faults", "--seed", "1", "--trace", str(tmp_path / "pipe")]) == 2
    assert "it is a link, a device, a pipe or a socket" in capsys.readouterr().err
    assert (tmp_path / "pipe").is_fifo()


def test_a_folder_with_files_in_it_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "mine" / "notes").mkdir(parents=True)
    with pytest.raises(ConfigError, match="mine: there are files in it, which would be lost; name a new folder"):
        check_folder_writable(tmp_path / "mine")


@pytest.mark.parametrize("command", ["simulate", "rhythm"])
def test_a_plot_that_is_not_named_as_a_png_is_refused_before_any_work(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(tmp_path / "gone"), "--plot", str(tmp_path / "x.svg")]) == 2
    told = "--plot: expected a file that ends in .png, since a PNG image is written, got"
    assert capsys.readouterr().err == f"flash: error: {told} {tmp_path / 'x.svg'}\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_to_is_refused_before_any_work(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="you may not write to the folder"):
        check_writable(tmp_path / "x.json")


def a_run(folder: Path, *steps: int) -> Path:
    """Return the run directory of a run that has made these steps."""
    run = RunDirectory.open(folder / "run", "")
    for step in steps:
        run.append_metrics({"step": step, "reward_mean": 0.5, "time": 10.0 + step, "wall_s": 1.0})
    return run.path


@pytest.mark.parametrize(
    ("name", "why"),
    [("empty", "is no run directory: it holds no config.toml"), ("run", "its run has made no step"), ("file", "is no")],
)
def test_plot_says_why_there_is_nothing_to_draw(
    name: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    a_run(tmp_path)
    assert main(["plot", str(tmp_path / name)]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"flash: error: {tmp_path / name}")
    assert why in said.err
    assert not said.out


@pytest.mark.parametrize(("name", "verb"), [("plots", "write"), ("metrics.jsonl", "read")])
def test_plot_names_the_path_that_it_cannot_read_or_write(
    name: str, verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path, 0, 1)
    if verb == "write":
        (run / name).rmdir()
        (run / name).touch()
    else:
        (run / name).unlink()
        (run / name).mkdir()
    assert main(["plot", str(run)]) == 2
    assert f"flash: error: cannot {verb} {run / name}" in capsys.readouterr().err


@pytest.mark.slow
def test_output_without_a_reader_ends_a_command_without_a_message(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "flash", "plot", str(a_run(tmp_path, 0, 1))]
    try:
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (BROKEN_PIPE, "")


def test_replay_in_another_folder_than_the_runs_names_the_missing_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = """
        run = { name = "a-run" }
        model = { path = "outputs/models/tiny" }
        env = { path = "envs.arithmetic:Arithmetic" }
        cluster = { gpus_per_node = 0 }
        tiny_model = {}
    """
    run = RunDirectory.open(tmp_path / "run", config)
    (run.batches / "step-000000.bin").touch()
    assert main(["replay", "run"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(
        "flash: error: there is no folder outputs/models/tiny; the replay begins with that model: name it"
    )
    assert not said.out


@pytest.mark.slow
def test_a_command_works_without_an_output(tmp_path: Path) -> None:
    words = 'exec "$0" -m flash plot "$1" >&-'
    done = subprocess.run(
        ["sh", "-c", words, sys.executable, str(a_run(tmp_path, 0, 1))],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", [["compare", "outputs/one"], ["export"], ["view"], ["trace"]])
def test_a_missing_run_is_reported_with_the_runs_beside_it(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    RunDirectory.open(tmp_path / "outputs" / "one", "")
    (tmp_path / "outputs" / "models").mkdir()
    more = ["new"] if command == ["export"] else []
    assert main([*command, "outputs/two", *more]) == 2
    assert f"outputs/two; {tmp_path / 'outputs'} has one\n" in capsys.readouterr().err


def test_a_missing_run_is_reported_without_folders_that_are_no_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models").mkdir()
    assert main(["plot", str(tmp_path / "two")]) == 2
    assert capsys.readouterr().err == f"flash: error: there is no run {tmp_path / 'two'}\n"


def test_a_run_that_the_file_system_cannot_look_up_is_refused_with_the_reason() -> None:
    """A name that is too long stands for a folder that may not be entered, because root may enter any folder."""
    path = Path("a" * 300)
    with pytest.raises(ConfigError, match=r"^a+ cannot be read: File name too long$"):
        run_directory(path)
