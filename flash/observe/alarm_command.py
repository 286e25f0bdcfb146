"""The command that `alarms.command` names: called at each alarm, one after the other, in a thread of its own.

The run neither waits for it nor fails with it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor

from flash.observe.alarms import Given

COMMAND_S = 5.0
"""Time that a call may take: less than the end of an interrupted run may."""


class AlarmCommand:
    """Call it with alarms, read what went wrong.

    Args:
        command: a program and its arguments, as a shell would split them.
    """

    def __init__(self, command: str) -> None:
        self._words = shlex.split(command)
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
            done = subprocess.run(
                self._words,
                input=f"{alarm.text}\n".encode(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=os.environ | {"FLASH_ALARM": alarm.name},
                timeout=COMMAND_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"alarms.command took longer than {COMMAND_S:g} s and was ended"
        except OSError as error:
            return f"alarms.command cannot be called: {error}"
        if done.returncode == 0:
            return ""
        words = done.stderr.decode("utf-8", "replace").strip()
        return f"alarms.command ended with code {done.returncode}: {words}"
