"""Commands that a Python program starts, with a stand-in for `flash` on the import path."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flash.errors import ConfigError, FlashError
from flash.run.command import KEPT_LINES, SHOWN_LINES, notebook, run_command

STAND_IN = """
import json, os, signal, sys, time
from pathlib import Path
times = 0
def interrupted(number, frame):
    global times
    times += 1
    print(f"signal {times}", flush=True)
    if times == int(sys.argv[2]):
        sys.exit(int(sys.argv[3]))
if sys.argv[1] == "wait":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupted)
    print("ready", os.getpid(), os.getsid(0) == os.getpid(), flush=True)
    while True: time.sleep(0.05)
if sys.argv[1] == "refuse":
    pid, _, file = os.environ["FLASH_CALLER"].partition(":")
    assert pid == str(os.getppid())
    Path(file).write_text(json.dumps({"error": sys.argv[2], "message": "no such thing"}))
    sys.exit(2)
if sys.argv[1] == "open":
    sys.exit(0 if os.path.exists(f"/proc/self/fd/{sys.argv[2]}") else 1)
sys.stdout.write("".join(f"line {number}\\n" for number in range(int(sys.argv[2]))))
print("flash: warning: look at this", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""
"""Program in place of `flash`. Its arguments choose the behaviour: wait for signals, refuse the input, look for an
open file, or print lines and end with an exit code."""


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the stand-in where `python -m flash` finds it first."""
    (tmp_path / "flash").mkdir()
    (tmp_path / "flash" / "__init__.py").touch()
    (tmp_path / "flash" / "__main__.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


class Block:
    """Block of output of a notebook. `on_update` is called with its text at each change."""

    def __init__(self, on_update: Any = lambda text: None) -> None:
        self.texts: list[str] = []
        self._on_update = on_update

    def show(self, content: dict[str, str], *, raw: bool, display_id: bool) -> Block:
        """Make the block, as IPython's `display` does."""
        assert display_id
        assert not self.texts, "there is one block"
        self.update(content, raw=raw)
        return self

    def update(self, obj: dict[str, str], *, raw: bool) -> None:
        """Replace the text of the block, as IPython does."""
        assert raw
        self.texts.append(obj["text/plain"])
        self._on_update(self.texts[-1])


def test_the_output_of_a_command_is_that_of_the_program(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command(["7", "2"], None) == 7
    assert capfd.readouterr() == ("line 0\nline 1\n", "flash: warning: look at this\n")


def test_a_notebook_shows_the_last_lines_and_the_warnings_in_one_block(capfd: pytest.CaptureFixture[str]) -> None:
    block = Block()
    assert run_command(["0", "1000"], block.show) == 0
    shown = block.texts[-1].splitlines()
    assert len(shown) <= SHOWN_LINES + KEPT_LINES
    assert shown[0] == "flash: warning: look at this"
    assert shown[-1] == "line 999"
    assert len(block.texts) < 100, "lines that come together are one update"
    assert capfd.readouterr() == ("", "")


def test_a_command_keeps_those_files_of_the_program_open_that_it_is_given(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as file:
        number = file.fileno()
        assert run_command(["open", str(number)], None, [number]) == 0
        assert run_command(["open", str(number)], None) == 1


@pytest.mark.parametrize("variable", ["FLASH_CALLER", "FLASH_LAUNCHER"])
def test_a_process_of_a_run_starts_no_command(
    variable: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ConfigError, match='put the call below `if __name__ == "__main__":`'):
        run_command(["0", "2"], None)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("name", "kind"), [("ConfigError", ConfigError), ("NoSuchError", FlashError)])
def test_an_error_of_the_command_is_raised_here(name: str, kind: type[FlashError]) -> None:
    with pytest.raises(kind, match="no such thing") as raised:
        run_command(["refuse", name], None)
    assert type(raised.value) is kind


@pytest.mark.parametrize(("times", "number"), [(1, signal.SIGINT), (2, signal.SIGINT), (1, signal.SIGTERM)])
def test_each_interrupt_reaches_the_command_once_and_is_raised_when_it_has_ended(times: int, number: int) -> None:
    handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    waited_for = ["ready", *(f"signal {count}" for count in range(1, times))]

    def interrupt(text: str) -> None:
        """Send the next signal when the output shows that the command has handled the one before."""
        if waited_for and waited_for[0] in text:
            waited_for.pop(0)
            os.kill(os.getpid(), number)

    block = Block(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_command(["wait", str(times), "130"], block.show)
    ready, *signals = block.texts[-1].splitlines()
    assert signals == [f"signal {count}" for count in range(1, times + 1)]
    assert ready.endswith(" True"), "a terminal reaches the command only through the program"
    assert not Path("/proc", ready.split()[1]).exists()
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers


def test_an_error_of_the_program_ends_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    def fail(text: str) -> None:
        """Raise the error of a notebook."""
        raise OSError("the notebook is gone")

    block = Block(fail)
    with pytest.raises(OSError, match="the notebook is gone"):
        run_command(["wait", "1", "0"], block.show)
    assert not Path("/proc", block.texts[0].split()[1]).exists()


def test_a_command_runs_in_any_thread(capfd: pytest.CaptureFixture[str]) -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(run_command(["3", "0"], None)))
    thread.start()
    thread.join()
    assert codes == [3]


def test_only_the_kernel_of_a_notebook_has_blocks_of_output(monkeypatch: pytest.MonkeyPatch) -> None:
    shell, display = SimpleNamespace(), object()
    assert notebook() is None
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    assert notebook() is None, "IPython in a terminal"
    shell.kernel = object()
    assert notebook() is display
