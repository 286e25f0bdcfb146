"""The command that `alarms.command` names: called at each alarm, one after the other, in a thread of its own.

The run neither waits for it nor fails with it.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import IO

from flash.observe.alarms import Given

COMMAND_S = 5.0
"""Time that a call may take: less than the end of an interrupted run may."""
SAID = 1000
"""Bytes of its error output that are told."""
LOOK_S = 0.01
"""Time between two looks at what it says: a pipe that is full would stop it."""
PIPE, READS = 1 << 16, 16
"""Bytes that a pipe holds, and how often it is emptied in one look at one who fills it all the time."""


class AlarmCommand:
    """Call it with alarms, read what went wrong.

    Args:
        command: a program and its arguments, as a shell would split them.
        most_s: what a call may take.
    """

    def __init__(self, command: str, most_s: float = COMMAND_S) -> None:
        self._words, self._most_s = shlex.split(command), most_s
        self._caller = ThreadPoolExecutor(1, thread_name_prefix="alarms")
        self._calls: list[Future[str]] = []

    def call(self, alarm: Given) -> None:
        """Have it called, at once."""
        self._calls.append(self._caller.submit(self._call, alarm))

    def warnings(self) -> list[str]:
        """What has gone wrong since the last time."""
        ended = [call for call in self._calls if call.done()]
        self._calls = [call for call in self._calls if call not in ended]
        return [fault for call in ended if (fault := call.result())]

    def close(self) -> list[str]:
        """Wait for the calls that are under way; what was still to be called is dropped. What went wrong."""
        self._caller.shutdown(cancel_futures=True)
        self._calls = [call for call in self._calls if not call.cancelled()]
        return self.warnings()

    def _call(self, alarm: Given) -> str:
        """What went wrong; empty: nothing."""
        try:
            process = subprocess.Popen(
                self._words,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=os.environ | {"FLASH_ALARM": alarm.name},
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            return f"alarms.command cannot be called: {error}"
        with process:
            said = _end_of(process, f"{alarm.text}\n".encode(), self._most_s)
        if said is None:
            return f"alarms.command took longer than {self._most_s:g} s and was ended"
        if process.returncode == 0:
            return ""
        words = said.decode("utf-8", "replace").strip()
        return f"alarms.command ended with code {process.returncode}: {words}"


def _end_of(process: subprocess.Popen[bytes], text: bytes, most_s: float) -> bytes | None:
    """The first that it says on its error output until it ends; None: it did not in time, and was ended with its kin.

    What it has started may go on, and hold that output open: only its own end counts.
    """
    assert process.stdin is not None
    assert process.stderr is not None
    with suppress(BrokenPipeError):  # it need not read
        process.stdin.write(text)
        process.stdin.close()
    os.set_blocking(process.stderr.fileno(), False)
    deadline, said = time.monotonic() + most_s, b""
    while (code := process.poll()) is None and time.monotonic() < deadline:
        with suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_S)
        said += _waiting(process.stderr, SAID - len(said))
    if code is None and process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        return None
    return said + _waiting(process.stderr, SAID - len(said))


def _waiting(pipe: IO[bytes], most: int) -> bytes:
    """What waits in a pipe, or so much of it; the rest is thrown away."""
    kept = b""
    for _ in range(READS):
        data = pipe.read(PIPE)
        if not data:
            break
        kept += data[: most - len(kept)]
    return kept
