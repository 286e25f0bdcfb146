"""Commands of Flash that a Python program starts: a process of their own, its files, its output, its end and its error.

`flash.run.training` calls `run_command`. The command does the same as one that a user types, and the program imports
neither torch nor vLLM for it. In a terminal the command prints as it does there. In a notebook one block of output
shows the last lines, so that a long run does not flood the notebook.

Signals reach the command through the program, because it leads a session of its own. So it does not matter if a
terminal, a notebook or another program interrupts: the first signal ends the run in order, and a second Ctrl-C ends it
at once. If the program is killed, the command notices it and ends the run in order (`flash.cli.main`).

The configuration and the code of a call lie in a folder of its own (`call_folder`). If the program and its command were
killed, the next call in the same folder of outputs removes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from flash.config.objects import CALL_FOLDER
from flash.errors import ConfigError, FlashError, error_of
from flash.run.processes.launch import HANDLED_SIGNALS
from flash.run.processes.launch_state import CALLER, LAUNCHER
from flash.run.processes.supervisor import End
from flash.text import harmless

INTERRUPTED = (End.INTERRUPTED, -signal.SIGINT, -signal.SIGTERM)
"""Exit codes of a command that a signal has ended. The negative ones are of a command that did not handle it yet."""
SHOWN_LINES = 24
"""Number of last lines of output that a notebook shows: a header and the steps after it."""
KEPT_LINES = 8
"""Number of warnings and errors that a notebook shows above the last lines."""
KEPT = ("flash: warning", "flash: error", "warning:", "WARNING", "ERROR")
"""Beginnings of the lines of output that are warnings and errors."""

CALL_LOCK = "lock"
"""Name of the lock file in the folder of a call."""
BOOT = Path("/proc/sys/kernel/random/boot_id")
"""File with the id of this machine's last start, which is the same in all containers of the machine."""


class Display(Protocol):
    """Block of output of a notebook, as IPython's `display` returns it for `display_id=True`."""

    def update(self, obj: Any, *, raw: bool) -> object:
        """Replace the content of the block. `obj` is the content by its MIME type, for which `raw` must be True."""
        ...


@contextmanager
def call_folder(output_dir: Path) -> Generator[tuple[Path, int]]:
    """Make a folder for the configuration and the code of a call, and remove it at the end of the block.

    Folders of killed calls in `output_dir` are removed first. Yields the new folder, and the descriptor of its locked
    file. `run_command` passes the descriptor on to the command, which then holds the lock too. So the folder counts as
    used until both processes have ended.

    Raises:
        OSError: the folder or the file cannot be written.
    """
    _remove_abandoned(output_dir)
    # A process that has the lock file open keeps the folder on a network file system. A later call removes it then.
    with tempfile.TemporaryDirectory(prefix=CALL_FOLDER, dir=output_dir, ignore_cleanup_errors=True) as name:
        # A lock of `flock`, and not one of `flash.run.processes.locks`: the command must inherit it, and another thread
        # of this process may open the file without an effect on it.
        descriptor = os.open(Path(name) / CALL_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # The text is written after the lock is taken: a file with the text and without a lock is that of a dead
            # call. On a file system without locks there is no text, and no call removes the folder of another one.
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.pwrite(descriptor, _place_of_locks(descriptor), 0)
            yield Path(name), descriptor
        finally:
            os.close(descriptor)


def _remove_abandoned(output_dir: Path) -> None:
    """Remove the folders of calls whose program and command have ended without removing them.

    A folder stays if this process cannot see its lock: it belongs to another machine or was made before this machine's
    last start, or the file system has no locks.
    """
    for file in output_dir.glob(f"{CALL_FOLDER}*/{CALL_LOCK}"):
        with suppress(OSError):  # the call is alive, another call removes the folder, or it is another user's
            descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
            try:
                if os.pread(descriptor, 100, 0) != _place_of_locks(descriptor):
                    continue
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            finally:
                os.close(descriptor)
            shutil.rmtree(file.parent, ignore_errors=True)


def _place_of_locks(descriptor: int) -> bytes:
    """Return a text that is the same in all processes that see the same locks on an open file.

    A kernel keeps the locks of each mounted file system apart, and another kernel need not see them. So the text has
    the start of this kernel and the device number of the file system.

    Raises:
        OSError: the start cannot be read.
    """
    return f"{BOOT.read_text().strip()} {os.fstat(descriptor).st_dev}".encode()


def refuse_process_of_run() -> None:
    """Raise ConfigError if this process belongs to a run itself, and so must start no command.

    The processes of a run import the file of a function. If that file starts a run when it is imported, each of its
    runs would start another one, without end.
    """
    # CALLER is set in each command that a program has started, and LAUNCHER in each process of a run.
    if CALLER in os.environ or LAUNCHER in os.environ:
        raise ConfigError(
            "flash.train, flash.sft or flash.evaluate is called in a process of a run. If the run has imported the "
            'file with this call, put the call below `if __name__ == "__main__":`; if an environment, a reward or an '
            "agent makes the call, make it outside of the run"
        )


def run_command(words: Sequence[str], show: Callable[..., Display] | None, kept_open: Sequence[int] = ()) -> int:
    """Run `flash WORDS` to its end in a process of its own, and return its exit code.

    Args:
        words: name and arguments of the command.
        show: function that makes a block of output in a notebook, as `notebook` returns it. None: the command writes to
            the output of this process.
        kept_open: descriptors of open files that the command inherits and keeps open until it ends.

    Raises:
        ConfigError: this process belongs to a run itself.
        FlashError: the command has refused its input; this is its error.
        KeyboardInterrupt: a signal has ended the command, or came while it ran. None of its processes is left.
    """
    refuse_process_of_run()
    with tempfile.TemporaryDirectory(prefix="flash-caller-") as folder:
        file = Path(folder) / "error.json"
        for stream in (sys.stdout, sys.stderr):  # what the program has printed comes first
            stream.flush()
        with _started(words, file, kept_open, piped=show is not None) as (process, signals):
            if show is not None:
                _follow(process, show)
            code = process.wait()
        if signals or code in INTERRUPTED:
            raise KeyboardInterrupt
        if file.is_file():
            row = json.loads(file.read_text(encoding="utf-8"))
            raise error_of(row["error"], row["message"]) or FlashError(row["message"])
        return code


def notebook() -> Callable[..., Display] | None:
    """Return IPython's function `display` if this process is the kernel of a notebook; else None."""
    # A program that runs in a notebook's kernel has IPython already.
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    if get_shell is None or not hasattr(get_shell(), "kernel"):
        return None
    return import_module("IPython.display").display


@contextmanager
def _started(
    words: Sequence[str], file: Path, kept_open: Sequence[int], *, piped: bool
) -> Generator[tuple[subprocess.Popen[bytes], list[int]]]:
    """Start a command, and pass the signals of this process on to it while the block runs.

    Yields the process and the list of signals so far. If the block ends while the command runs, because of an error of
    this process, the command is ended in order.

    Args:
        words: name and arguments of the command.
        file: file in which the command leaves its error, as JSON.
        kept_open: descriptors that the command inherits.
        piped: True if this process reads the output of the command; False: both write to the same output.
    """
    received: list[int] = []
    early: list[int] = []  # signals that came before there was a process
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        """Note a signal, and send it to the command. A signal handler, in the main thread."""
        received.append(number)
        if process is None:
            early.append(number)
        else:
            process.send_signal(number)

    handled: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():  # only there may signals be handled
        # A signal that this process ignores, as under nohup, is ignored by the command too. None stands for a handler
        # of C code, which Python could not restore.
        found = {number: signal.getsignal(number) for number in HANDLED_SIGNALS}
        handled = {number: before for number, before in found.items() if before not in (signal.SIG_IGN, None)}
    for number in handled:
        signal.signal(number, pass_on)
    try:
        # -P keeps the working folder off the import path: a module there could have the name of one of Flash's.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "flash", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else None,
            stderr=subprocess.STDOUT if piped else None,
            env={**os.environ, CALLER: f"{os.getpid()}:{file}"},
            start_new_session=True,
            pass_fds=kept_open,
        )
        for number in early:  # `pass_on` itself sends the signals that come from now on
            process.send_signal(number)
        try:
            yield process, received
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
    finally:
        for number, before in handled.items():
            signal.signal(number, before)


def _follow(process: subprocess.Popen[bytes], show: Callable[..., Display]) -> None:
    """Show the output of a command in one block of a notebook until the command closes it.

    The block has the last warnings and errors, and below them the last lines. Each line is shown once it is complete.
    """
    assert process.stdout is not None
    lines, kept = deque[str](maxlen=SHOWN_LINES), deque[str](maxlen=KEPT_LINES)
    display: Display | None = None
    rest = b""
    # `read1` returns what is there. Lines that arrive while the block is updated become one update.
    while data := process.stdout.read1(1 << 16):  # pyright: ignore[reportAttributeAccessIssue]: a buffered reader
        *whole, rest = (rest + data).split(b"\n")
        for line in (harmless(one.decode("utf-8", "replace")) for one in whole):
            (kept if line.startswith(KEPT) else lines).append(line)
        content = {"text/plain": "\n".join((*kept, *lines))}
        if display is not None:
            display.update(content, raw=True)
        elif whole:
            display = show(content, raw=True, display_id=True)
